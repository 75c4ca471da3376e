"""LeNet as the paper uses it: two convolutions and one linear layer."""

import torch
from torch import nn

from baffle.models.inputs import Inputs
from baffle.models.layers import ACTIVATIONS, normalisation
from baffle.plan import LeNet


def build_lenet(model: LeNet, inputs: Inputs) -> nn.Module:
    return lenet(inputs.image_shape("lenet"), inputs.outputs, model.channels, model.head, model.activation, model.norm)


def lenet(
    shape: tuple[int, ...],
    classes: int,
    channels: tuple[int, int] = (16, 64),
    head: str = "average",
    activation: str = "hardswish",
    norm: str = "none",
) -> nn.Sequential:
    """LeNet. The paper's form has 26,730 weights: one input channel, 16 and 64 channels, averaged over positions."""
    first, second = channels
    act = ACTIVATIONS[activation]
    features = nn.Sequential(
        nn.Conv2d(shape[0], first, 5, padding=2),
        normalisation(norm, first),
        act(),
        nn.MaxPool2d(2),
        nn.Conv2d(first, second, 5, padding=2),
        normalisation(norm, second),
        act(),
        *([nn.AdaptiveAvgPool2d(1)] if head == "average" else []),
        nn.Flatten(),
    )
    with torch.inference_mode():
        width = features(torch.zeros(2, *shape)).shape[1]
    return features.append(nn.Linear(width, classes))
