"""From a plan's [task.model] to a module."""

import torch
from torch import nn

from baffle.errors import PlanError
from baffle.models.lenet import lenet
from baffle.models.wrn import wrn
from baffle.plan import WRN, Custom, LeNet, Model, imported


def build(model: Model, shape: tuple[int, ...], classes: int) -> nn.Module:
    match model:
        case LeNet():
            return lenet(shape, classes, model.channels, model.head, model.activation, model.norm)
        case WRN():
            return wrn(shape, classes, model.widen, model.activation, model.norm)
        case Custom():
            made = imported(model.factory)()
            if not isinstance(made, nn.Module):
                raise PlanError(
                    f"task.model.factory: {model.factory} must return an nn.Module, got {type(made).__name__}"
                )
            return made
        case _:
            width = int(torch.Size(shape).numel())
            return nn.Sequential(nn.Flatten(), nn.Linear(width, classes))
