"""Which parameters of a user's module are trained."""

from collections.abc import Sequence
from fnmatch import fnmatch

from torch import nn

from baffle.errors import PlanError

LAST = "last"
"""In place of a pattern: the parameters of the last layer."""


def choose_trained(module: nn.Module, train: Sequence[str]) -> nn.Module:
    """The same module, in which exactly the chosen parameters require gradients: without patterns, all that its user
    has not frozen; else those whose names fit a pattern."""
    if not train:
        return module
    names = [name for name, _ in module.named_parameters()]
    for pattern in train:
        if pattern != LAST and not any(fnmatch(name, pattern) for name in names):
            raise PlanError(
                f'train: no parameter of the model fits {pattern!r}; expected "all", "last" or patterns of names such '
                f"as {names[-1] if names else 'head.weight'!r}"
            )
    last = _last_layer(module) if LAST in train else set()
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name in last or any(fnmatch(name, pattern) for pattern in train))
    return module


def _last_layer(module: nn.Module) -> set[str]:
    """The names of the parameters of the last module that has any of its own."""
    owners = [name for name, part in module.named_modules() if list(part.parameters(recurse=False))]
    return {name for name, _ in module.named_parameters() if name.rpartition(".")[0] == owners[-1]} if owners else set()
