"""The inputs that a model is built for."""

from dataclasses import dataclass
from pathlib import Path

from baffle.core.pixels import PixelScale
from baffle.core.samples import Shape, is_plain
from baffle.errors import PlanError

UNIT = PixelScale()  # pixels in [0, 1]

LEAST_PIXELS = 2  # the smallest side of an image, so that it can be halved once


@dataclass(frozen=True)
class Inputs:
    """The shape of one sample, the number of classes, the scale of pixels (None if unknown), and the folder of data
    sets, which also holds the weights of pretrained models. `width` is the number of outputs, if that is not the number
    of classes; `label_shape` is the shape of one sample's label."""

    shape: Shape
    classes: int
    scale: PixelScale | None = UNIT
    folder: Path | None = None
    width: int = 0
    label_shape: tuple[int, ...] = ()

    @property
    def outputs(self) -> int:
        """How many outputs a model needs."""
        return self.width or self.classes

    def one_shape(self) -> tuple[int, ...]:
        """The shape of one sample, for models that take a single array."""
        if not is_plain(self.shape):
            inputs = "a dict" if isinstance(self.shape, dict) else "a tuple"
            raise PlanError(
                f"task.model: this model takes one array, but the data set gives {inputs} of {len(self.shape)}; use a "
                '"custom" model that takes them'
            )
        return tuple(size for size in self.shape if isinstance(size, int))

    def image_shape(self, model: str) -> tuple[int, ...]:
        """The shape of one sample, for a model that convolves images."""
        shape = self.one_shape()
        if len(shape) != 3 or min(shape) < 1 or min(shape[1:]) < LEAST_PIXELS:
            raise PlanError(
                f'task.model: a "{model}" takes images of (channels, height, width), {LEAST_PIXELS} pixels each way at '
                f'least, got samples of shape {shape}; use "softmax", which takes any, or a "custom" model'
            )
        return shape
