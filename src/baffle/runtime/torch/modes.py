"""Layers that behave differently in training: in which mode a module runs, and when a person should know.

Probes and evaluation run a module in evaluation mode: dropout is off, and a BatchNorm with running statistics uses
these, as they were when the run began. Backpropagation, the baseline, trains as people do, with dropout on. Running
statistics stay as they are there too: they are not among the weights, so nobody would send them on.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd


def drops(module: nn.Module) -> bool:
    """Whether a layer zeroes some of what it is given in training."""
    return isinstance(module, _DropoutNd) and module.p > 0


def keeps_statistics(module: nn.Module) -> bool:
    """Whether a layer keeps running statistics in training."""
    return isinstance(module, _NormBase) and module.track_running_stats


def advice_on_modes(module: nn.Module) -> list[str]:
    """What a person should know about a model with dropout or running statistics."""
    advice = []
    names = dict(module.named_modules())
    if dropping := [name for name, layer in names.items() if drops(layer)]:
        advice.append(f"task.model: {_few(dropping)} drops nothing, because probes run a model in evaluation mode")
    if keeping := [name for name, layer in names.items() if keeps_statistics(layer)]:
        advice.append(
            f"task.model: {_few(keeping)} uses its initial running statistics throughout, because probes run a model "
            "in evaluation mode; GroupNorm, or track_running_stats=False, needs none"
        )
    return advice


@contextmanager
def training(module: nn.Module, seed: int) -> Iterator[None]:
    """The module as it is trained: dropout as the seed determines, running statistics as they are. It is in evaluation
    mode again afterwards."""
    module.train()
    for layer in module.modules():
        if keeps_statistics(layer):
            layer.eval()
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            yield
    finally:
        module.eval()


def _few(names: list[str]) -> str:
    shown = ", ".join(name or "the module itself" for name in names[:3])
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown
