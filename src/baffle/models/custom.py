"""A user's own model, built by a function that the plan names."""

from torch import nn

from baffle.errors import PlanError
from baffle.models.inputs import Inputs
from baffle.models.trained_part import choose_trained
from baffle.plan import Custom
from baffle.plan.functions import call_own


def build_custom(model: Custom, inputs: Inputs) -> nn.Module:
    module = call_own("task.model.factory", model.factory, shape=inputs.shape, classes=inputs.outputs)
    if not isinstance(module, nn.Module):
        raise PlanError(f"task.model.factory: {model.factory} must return an nn.Module, got {type(module).__name__}")
    return choose_trained(module, model.train)
