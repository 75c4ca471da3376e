"""From a plan's [task.model] to a module."""

from collections.abc import Callable, Sequence
from fnmatch import fnmatch
from typing import Any

from torch import nn

from baffle.errors import PlanError
from baffle.models.inputs import Inputs
from baffle.models.mobilenet import build_mobilenet
from baffle.models.networks import build_lenet, build_softmax, build_wrn
from baffle.plan import WRN, Custom, LeNet, MobileNet, Model, Section, Softmax
from baffle.plan.functions import call_own


def build_custom(model: Custom, inputs: Inputs) -> nn.Module:
    """The model that the plan's own function builds."""
    module = call_own("task.model.factory", model.factory, shape=inputs.shape, classes=inputs.outputs)
    if not isinstance(module, nn.Module):
        raise PlanError(f"task.model.factory: {model.factory} must return an nn.Module, got {type(module).__name__}")
    return choose_trained(module, model.train)


def choose_trained(module: nn.Module, train: Sequence[str]) -> nn.Module:
    """The same module, in which exactly the chosen parameters require gradients: those whose names match a pattern,
    those of the last layer for "last", or without patterns all that the user has not frozen."""
    if not train:
        return module
    names = [name for name, _ in module.named_parameters()]
    for pattern in train:
        if pattern != "last" and not any(fnmatch(name, pattern) for name in names):
            raise PlanError(
                f'train: no parameter of the model fits {pattern!r}; expected "all", "last" or patterns of names such '
                f"as {names[-1] if names else 'head.weight'!r}"
            )
    owners = [name for name, part in module.named_modules() if list(part.parameters(recurse=False))]
    for name, parameter in module.named_parameters():
        last = "last" in train and name.rpartition(".")[0] == owners[-1]
        parameter.requires_grad_(last or any(fnmatch(name, pattern) for pattern in train))
    return module


BUILDERS: dict[type[Section], Callable[[Any, Inputs], nn.Module]] = {
    LeNet: build_lenet,
    WRN: build_wrn,
    MobileNet: build_mobilenet,
    Softmax: build_softmax,
    Custom: build_custom,
}
"""Settings, and the inputs that a model is built for → the module, by the settings' type. Initial weights come from
torch's generator. ONNX models are not built here."""


def build(model: Model, inputs: Inputs) -> nn.Module:
    """The module that a plan's [task.model] describes."""
    builder = BUILDERS.get(type(model))
    if builder is None:
        known = ", ".join(kind.__name__ for kind in BUILDERS)
        raise PlanError(f"task.model: expected one of {known}, got {type(model).__name__}, which has no builder")
    return builder(model, inputs)
