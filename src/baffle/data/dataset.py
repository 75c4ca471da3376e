"""A data set: stored samples, how they become model input, and which domain or writer each comes from."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from baffle.core.arrays import I64, Samples
from baffle.core.pixels import PixelScale
from baffle.core.ports import Batch
from baffle.errors import DataError

Prepare = Callable[[NDArray[Any]], Samples]
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

Part = Dataset | Callable[[], Dataset]
"""Samples, or a function that reads them when they are first needed."""


class Source:
    """A training and a test set of one kind.

    Either part may be missing, or be read when it is first used: a server needs no training sample, a client no test
    sample. `shape` is that of one sample as a model sees it; a source that does not state it is asked for a sample.
    `domains` are names, if there are any. `scale` says how `prepare` scales pixels; a source of images that states none
    has pixels in [0, 1].
    """

    def __init__(
        self,
        train: Part | None,
        test: Part | None,
        classes: int,
        domains: tuple[str, ...] = (),
        scale: PixelScale | None = None,
        shape: tuple[int, ...] | None = None,
    ) -> None:
        self._parts: dict[str, Part | None] = {"training": train, "test": test}
        self.classes = classes
        self.domains = domains
        self.scale = scale
        self._shape = shape
        self._states_shape = shape is not None

    @property
    def train(self) -> Dataset:
        return self._part("training")

    @property
    def test(self) -> Dataset:
        return self._part("test")

    @property
    def shape(self) -> tuple[int, ...]:
        if self._shape is None:
            self._shape = self.first(1).x.shape[1:]
        return self._shape

    @property
    def pixel_scale(self) -> PixelScale | None:
        """How its pixels are scaled; none if that is not stated and the first samples do not lie in [0, 1], as those of
        vectors mostly do not."""
        if self._states_shape and self.scale is not None:
            return self.scale
        scale = self.scale or PixelScale()
        values = self.first(LOOKED_AT).x
        if values.ndim != 4 or scale.channels not in (1, values.shape[1]):
            return None
        mean, deviation = (np.array(numbers)[:, None, None] for numbers in (scale.mean, scale.deviation))
        pixels = values * deviation + mean
        return scale if pixels.min() >= -ROUNDING and pixels.max() <= 1 + ROUNDING else None

    def first(self, count: int) -> Batch:
        """The first samples of whichever part there is."""
        name = "training" if self._parts["training"] is not None else "test"
        data = self._part(name)
        return data.batch(np.arange(min(count, len(data))))

    def example(self, count: int) -> Batch:
        """Samples of the right shape and type to try a model on. Floats are made up, so that nobody needs data to find
        out what a model can do; integers are samples, because only those are sure to be valid ids."""
        if not self._states_shape and self.first(1).x.dtype.kind != "f":
            few = self.first(count)
            rows = np.arange(count) % len(few.y)
            return Batch(few.x[rows], few.y[rows])
        random = np.random.default_rng(0)
        return Batch(random.standard_normal((count, *self.shape), np.float32), np.zeros(count, np.int64))

    def _part(self, name: str) -> Dataset:
        part = self._parts[name]
        if part is None:
            raise DataError(f"the data set has no {name} samples; name a data set that has, or put them in its folder")
        if not isinstance(part, Dataset):
            part = self._parts[name] = part()
        return part
