"""From a plan's [task.model] to a module."""

from collections.abc import Callable
from typing import Any

from torch import nn

from baffle.errors import PlanError
from baffle.models.custom import build_custom
from baffle.models.inputs import Inputs
from baffle.models.lenet import build_lenet
from baffle.models.mobilenet import build_mobilenet
from baffle.models.softmax import build_softmax
from baffle.models.wrn import build_wrn
from baffle.plan import WRN, Custom, LeNet, MobileNet, Model, Section, Softmax

Builder = Callable[[Any, Inputs], nn.Module]
"""A model's settings, and the inputs that it is built for → the module. Initial weights come from torch's generator."""

BUILDERS: dict[type[Section], Builder] = {
    LeNet: build_lenet,
    WRN: build_wrn,
    MobileNet: build_mobilenet,
    Softmax: build_softmax,
    Custom: build_custom,
}
"""Builders by the type of a model's settings in a plan. ONNX models are not built here."""


def build(model: Model, inputs: Inputs) -> nn.Module:
    """The module that a plan's [task.model] describes."""
    builder = BUILDERS.get(type(model))
    if builder is None:
        known = ", ".join(kind.__name__ for kind in BUILDERS)
        raise PlanError(f"task.model: expected one of {known}, got {type(model).__name__}, which has no builder")
    return builder(model, inputs)
