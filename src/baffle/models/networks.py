"""Softmax regression, LeNet and the wide residual network of depth ten, and the layers that models share."""

import math

import torch
from torch import Tensor, nn

from baffle.models.inputs import Inputs
from baffle.plan import WRN, LeNet, Softmax

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "hardswish": nn.Hardswish,
    "relu": nn.ReLU,
    "relu6": nn.ReLU6,
    "selu": nn.SELU,
    "gelu": nn.GELU,
}


def normalisation(name: str, channels: int) -> nn.Module:
    """A normalisation without trained scale and shift. BatchNorm uses the batch's statistics, so it has no buffers."""
    match name:
        case "group":
            return nn.GroupNorm(math.gcd(8, channels), channels, affine=False)
        case "batch":
            return nn.BatchNorm2d(channels, affine=False, track_running_stats=False)
        case _:
            return nn.Identity()


def build_softmax(_: Softmax, inputs: Inputs) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(inputs.one_shape()), inputs.outputs))


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
    """The paper's form has 26,730 weights: one input channel, 16 and 64 channels, averaged over positions."""
    first, second = channels
    act = ACTIVATIONS[activation]
    features = nn.Sequential(
        *(nn.Conv2d(shape[0], first, 5, padding=2), normalisation(norm, first), act(), nn.MaxPool2d(2)),
        *(nn.Conv2d(first, second, 5, padding=2), normalisation(norm, second), act()),
        *([nn.AdaptiveAvgPool2d(1)] if head == "average" else []),
        nn.Flatten(),
    )
    with torch.inference_mode():
        width = features(torch.zeros(2, *shape)).shape[1]
    return features.append(nn.Linear(width, classes))


def build_wrn(model: WRN, inputs: Inputs) -> nn.Module:
    return wrn(inputs.image_shape("wrn"), inputs.outputs, model.widen, model.activation, model.norm)


class Block(nn.Module):
    """Two convolutions, each preceded by a normalisation and an activation, and a 1 × 1 convolution as a shortcut."""

    def __init__(self, before: int, after: int, stride: int, activation: str, norm: str) -> None:
        super().__init__()
        act = ACTIVATIONS[activation]
        self.prepared = nn.Sequential(normalisation(norm, before), act())
        self.residual = nn.Sequential(
            nn.Conv2d(before, after, 3, stride, padding=1, bias=False),
            *(normalisation(norm, after), act()),
            nn.Conv2d(after, after, 3, padding=1, bias=False),
        )
        self.shortcut = nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.prepared(x)
        output: Tensor = self.residual(x) + self.shortcut(x)
        return output


def wrn(
    shape: tuple[int, ...], classes: int, widen: int = 2, activation: str = "hardswish", norm: str = "group"
) -> nn.Sequential:
    """Three residual blocks, the fewest possible. WRN-10-2 has 302,794 weights for images of 3 × 32 × 32 and ten
    classes. Only the first convolution has a bias."""
    widths = [16, 16 * widen, 32 * widen, 64 * widen]
    return nn.Sequential(
        nn.Conv2d(shape[0], widths[0], 3, padding=1),
        *(Block(widths[i], widths[i + 1], stride, activation, norm) for i, stride in enumerate((1, 2, 2))),
        *(normalisation(norm, widths[3]), ACTIVATIONS[activation](), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        nn.Linear(widths[3], classes),
    )
