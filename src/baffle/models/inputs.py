"""The inputs that a model is built for."""

from dataclasses import dataclass
from pathlib import Path

from baffle.core.pixels import PixelScale

UNIT = PixelScale()
"""Pixels in [0, 1]."""


@dataclass(frozen=True)
class Inputs:
    """The shape of one sample, the number of classes, the scale of pixels (None if unknown), and the folder of data
    sets, which also holds the weights of pretrained models."""

    shape: tuple[int, ...]
    classes: int
    scale: PixelScale | None = UNIT
    folder: Path | None = None
