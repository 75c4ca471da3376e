"""From a plan's [task.model] to a module."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from baffle.core.pixels import PixelScale
from baffle.errors import PlanError
from baffle.models.custom import build_custom
from baffle.models.inputs import UNIT, Inputs
from baffle.models.lenet import build_lenet
from baffle.models.mobilenet import build_mobilenet
from baffle.models.softmax import build_softmax
from baffle.models.wrn import build_wrn
from baffle.plan import WRN, Custom, LeNet, MobileNet, Model, Section, Softmax

Builder = Callable[[Any, Inputs], nn.Module]
"""A model's settings and what it is built for → the module. Initial weights come from torch's generator."""

BUILDERS: dict[type[Section], Builder] = {
    LeNet: build_lenet,
    WRN: build_wrn,
    MobileNet: build_mobilenet,
    Softmax: build_softmax,
    Custom: build_custom,
}
"""By the type of a model's settings in a plan. A model that came as ONNX is not built here."""


def build(
    model: Model,
    shape: tuple[int, ...],
    classes: int,
    *,
    scale: PixelScale | None = UNIT,
    folder: Path | None = None,
) -> nn.Module:
    """The model that a plan describes; see `Inputs`."""
    builder = BUILDERS.get(type(model))
    if builder is None:
        known = ", ".join(kind.__name__ for kind in BUILDERS)
        raise PlanError(f"task.model: expected one of {known}, got {type(model).__name__}, which has no builder")
    return builder(model, Inputs(shape, classes, scale, folder))
