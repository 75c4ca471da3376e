"""A wide residual network of depth ten. It has three residual blocks, the fewest possible."""

from torch import Tensor, nn

from baffle.models.inputs import Inputs
from baffle.models.layers import ACTIVATIONS, normalisation
from baffle.plan import WRN


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
            normalisation(norm, after),
            act(),
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
    """WRN-10-2 has 302,794 weights for images of 3 × 32 × 32 and ten classes. Only the first convolution has a bias."""
    widths = [16, 16 * widen, 32 * widen, 64 * widen]
    return nn.Sequential(
        nn.Conv2d(shape[0], widths[0], 3, padding=1),
        Block(widths[0], widths[1], 1, activation, norm),
        Block(widths[1], widths[2], 2, activation, norm),
        Block(widths[2], widths[3], 2, activation, norm),
        normalisation(norm, widths[3]),
        ACTIVATIONS[activation](),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(widths[3], classes),
    )
