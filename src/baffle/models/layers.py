"""Layers that several models share."""

import math

from torch import nn

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "hardswish": nn.Hardswish,
    "relu": nn.ReLU,
    "relu6": nn.ReLU6,
    "selu": nn.SELU,
    "gelu": nn.GELU,
}


def normalisation(name: str, channels: int) -> nn.Module:
    """A normalisation without trained scale and shift. BatchNorm uses the statistics of the batch, so it has no
    buffers."""
    match name:
        case "group":
            return nn.GroupNorm(math.gcd(8, channels), channels, affine=False)
        case "batch":
            return nn.BatchNorm2d(channels, affine=False, track_running_stats=False)
        case _:
            return nn.Identity()
