"""A data set: stored samples, how they become model input, and which domain or writer each comes from."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from baffle.core.arrays import F32, I64
from baffle.core.pixels import PixelScale
from baffle.core.ports import Batch
from baffle.errors import DataError

Prepare = Callable[[NDArray[Any]], F32]
"""Stored samples → model input."""

Augment = Callable[[NDArray[Any], bytes], NDArray[Any]]
"""Stored samples and a key → the same number of samples, each changed a little; the key determines how."""


@dataclass(frozen=True)
class Dataset:
    """Stored samples, their labels, and how a batch of samples becomes model input.

    `domain_of` and `writer_of` give each sample's domain (an index into `Source.domains`) and writer, if known.
    """

    samples: NDArray[Any]
    labels: I64
    prepare: Prepare
    augment: Augment | None = None
    domain_of: I64 | None = None
    writer_of: I64 | None = None

    def __post_init__(self) -> None:
        for name, groups in (("domain_of", self.domain_of), ("writer_of", self.writer_of)):
            if groups is not None and len(groups) != len(self):
                raise DataError(f"{name}: expected an entry for each of {len(self)} samples, got {len(groups)}")

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: I64, key: bytes | None = None) -> Batch:
        """The samples at these indices; with a key, augmented by that key if the set has an augmentation."""
        samples = self.samples[indices]
        if key is not None and self.augment:
            samples = self.augment(samples, key)
        return Batch(self.prepare(samples), self.labels[indices])


LOOKED_AT = 16
"""Samples of a source whose values are compared with the scale that it states."""

ROUNDING = 1e-3
"""How far outside [0, 1] a pixel may lie."""


@dataclass(frozen=True)
class Source:
    """A training and a test set of one kind, the names of their domains if they have any, and how `prepare` scales
    pixels. A source of images that states no scale has pixels in [0, 1]."""

    train: Dataset
    test: Dataset
    classes: int
    domains: tuple[str, ...] = ()
    scale: PixelScale | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one sample as a model sees it."""
        return self.train.batch(np.zeros(1, np.int64)).x.shape[1:]

    @property
    def pixel_scale(self) -> PixelScale | None:
        """How its pixels are scaled; none if the first samples contradict that, as those of vectors mostly do."""
        scale = self.scale or PixelScale()
        values = self.train.batch(np.arange(min(LOOKED_AT, len(self.train)))).x
        if values.ndim != 4 or scale.channels not in (1, values.shape[1]):
            return None
        mean, deviation = (np.array(numbers)[:, None, None] for numbers in (scale.mean, scale.deviation))
        pixels = values * deviation + mean
        return scale if pixels.min() >= -ROUNDING and pixels.max() <= 1 + ROUNDING else None
