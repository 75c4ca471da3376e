"""From a plan's [task.model] to a module."""

from pathlib import Path

import torch
from torch import nn

from baffle.core.pixels import PixelScale
from baffle.errors import PlanError
from baffle.models.lenet import lenet
from baffle.models.mobilenet import freeze_front, mobilenet, pretrained_mobilenet
from baffle.models.wrn import wrn
from baffle.plan import WRN, Custom, LeNet, MobileNet, Model
from baffle.plan.functions import call_own

UNIT = PixelScale()
"""Pixels in [0, 1]."""


def build(
    model: Model,
    shape: tuple[int, ...],
    classes: int,
    *,
    scale: PixelScale | None = UNIT,
    folder: Path | None = None,
) -> nn.Module:
    """A model for samples of a shape whose pixels have a scale, none if it is not known. `folder` holds data, and the
    weights of pretrained models beside them."""
    match model:
        case LeNet():
            return lenet(shape, classes, model.channels, model.head, model.activation, model.norm)
        case WRN():
            return wrn(shape, classes, model.widen, model.activation, model.norm)
        case MobileNet():
            if model.weights == "imagenet":
                made = pretrained_mobilenet(shape, classes, folder, _known(scale))
            else:
                made = mobilenet(shape, classes, model.activation, model.norm, scale=scale)
            return freeze_front(made) if model.trained == "head" else made
        case Custom():
            own = call_own("task.model.factory", model.factory, shape=shape, classes=classes)
            if not isinstance(own, nn.Module):
                raise PlanError(
                    f"task.model.factory: {model.factory} must return an nn.Module, got {type(own).__name__}"
                )
            return own
        case _:
            width = int(torch.Size(shape).numel())
            return nn.Sequential(nn.Flatten(), nn.Linear(width, classes))


def _known(scale: PixelScale | None) -> PixelScale:
    if scale is None:
        raise PlanError(
            "task.model: ImageNet's weights need to know how pixels are scaled: expected task.data to give values in "
            "[0, 1], or a baffle.Source with scale = PixelScale(mean, deviation) such that value · deviation + mean "
            "is; got values that are not"
        )
    return scale
