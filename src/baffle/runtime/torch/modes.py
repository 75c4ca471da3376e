"""Layers that behave differently in training: the mode that a module runs in, and advice to the user about it.

Probes and evaluation run a module in evaluation mode: dropout is off, and a BatchNorm with running statistics uses
them as they were when the run began. Backpropagation, the baseline, trains as usual, with dropout on. Running
statistics do not change there either: they are not among the weights, so they would never be sent to anybody.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

GENERATOR = threading.Lock()
"""Held by the thread whose module draws from PyTorch's generator."""


def drops(module: nn.Module) -> bool:
    """Whether a layer sets some of its inputs to zero in training."""
    return isinstance(module, _DropoutNd) and module.p > 0


def keeps_statistics(module: nn.Module) -> bool:
    """Whether a layer keeps running statistics in training."""
    return isinstance(module, _NormBase) and module.track_running_stats


def advice_on_modes(module: nn.Module, *, backpropagates: bool = False) -> list[str]:
    """What the user should know about a model with dropout or running statistics."""
    advice = []
    names = dict(module.named_modules())
    dropping = [name for name, layer in names.items() if drops(layer)]
    keeping = [name for name, layer in names.items() if keeps_statistics(layer)]
    if dropping and not backpropagates:
        advice.append(f"task.model: dropout in {_few(dropping)} is off, because probes run a model in evaluation mode")
    if keeping:
        advice.append(
            f"task.model: {_few(keeping)} uses its initial running statistics throughout, because they are not among "
            "the weights that clients send; GroupNorm, or track_running_stats=False, needs none"
        )
    return advice


class TrainingMode:
    """One module as it is trained: dropout as a seed determines, running statistics as they are.

    PyTorch has one random generator for all threads, so modules that draw from it take turns. Whether a module does is
    found out when it is first trained; others run side by side.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._draws: bool | None = None

    @contextmanager
    def seeded(self, seed: int) -> Iterator[None]:
        """The module is in training mode inside, and in evaluation mode again afterwards."""
        self._module.train()
        for layer in self._module.modules():
            if keeps_statistics(layer):
                layer.eval()
        try:
            if self._draws is False:
                yield
                return
            with GENERATOR, torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                before = torch.get_rng_state()
                yield
                self._draws = self._draws or not torch.equal(before, torch.get_rng_state())
        finally:
            self._module.eval()


def _few(names: list[str]) -> str:
    """At most three of a module's layers, by name."""
    shown = ", ".join(f"layer {name}" if name else "the module itself" for name in names[:3])
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown
