"""Softmax regression: one linear layer."""

import math

from torch import nn

from baffle.models.inputs import Inputs
from baffle.plan import Softmax


def build_softmax(_: Softmax, inputs: Inputs) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(inputs.one_shape()), inputs.outputs))
