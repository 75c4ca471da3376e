"""LeNet as the paper uses it: two convolutions and one linear layer."""

import math

import torch
from torch import nn

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "hardswish": nn.Hardswish,
    "relu": nn.ReLU,
    "relu6": nn.ReLU6,
    "selu": nn.SELU,
    "gelu": nn.GELU,
}


def normalisation(name: str, channels: int) -> nn.Module:
    """Without trained scale and shift. BatchNorm uses the batch's own statistics, so it keeps no buffers."""
    match name:
        case "group":
            return nn.GroupNorm(math.gcd(8, channels), channels, affine=False)
        case "batch":
            return nn.BatchNorm2d(channels, affine=False, track_running_stats=False)
        case _:
            return nn.Identity()


def lenet(
    shape: tuple[int, ...],
    classes: int,
    channels: tuple[int, int] = (16, 64),
    head: str = "average",
    activation: str = "hardswish",
    norm: str = "none",
) -> nn.Sequential:
    """26,730 weights in the paper's form: 16 and 64 channels on one input channel, averaged over positions."""
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
