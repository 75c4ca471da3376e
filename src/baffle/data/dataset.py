"""A data set: stored samples, how they become model input, and which domain or writer each comes from."""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from baffle.core.arrays import I64
from baffle.core.pixels import PixelScale
from baffle.core.ports import Batch
from baffle.core.samples import Labels, Samples, Shape, arrays, each, is_plain, shape_of, take
from baffle.data.soundness import (
    label_array,
    require_finite,
    require_labels,
    require_lengths,
    require_samples,
    sample_array,
)
from baffle.errors import DataError, UnusableDataError
from baffle.plan.functions import calling

Prepare = Callable[[Any], Samples]
"""Stored samples → model input."""

Augment = Callable[[Any, bytes], Any]
"""Stored samples and a key → the same number of samples, each changed a little; the key determines how."""


def unchanged(samples: Any) -> Any:
    """The `prepare` of samples that are stored as a model takes them."""
    return samples


@dataclass(frozen=True)
class Dataset:
    """Stored samples, their labels, and how a batch of samples becomes model input.

    Samples are one array, or a tuple or dict of arrays; labels are class numbers (for each sample, or for each of its
    tokens) or numbers to predict. The first axis of all of them is the sample. `domain_of` and `writer_of` give each
    sample's domain (an index into `Source.domains`) and writer, if known.
    """

    samples: Any
    labels: Labels
    prepare: Prepare = unchanged
    augment: Augment | None = None
    domain_of: I64 | None = None
    writer_of: I64 | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "samples", each(sample_array, self.samples))
        object.__setattr__(self, "labels", label_array(self.labels))
        for name, groups in (("domain_of", self.domain_of), ("writer_of", self.writer_of)):
            if groups is not None and len(groups) != len(self):
                raise DataError(f"{name}: expected an entry for each of {len(self)} samples, got {len(groups)}")

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: I64, key: bytes | None = None) -> Batch:
        """The samples at these indices; with a key, augmented by that key if the set has an augmentation."""
        samples = take(self.samples, indices)
        if key is not None and self.augment:
            with calling("the data set's augment"):
                samples = self.augment(samples, key)
        with calling("the data set's prepare"):
            x = self.prepare(samples)
        return Batch(require_samples("the data set's prepare", x, len(indices)), self.labels[indices])

    def rows(self, indices: I64) -> "Dataset":
        """A data set of these samples alone."""
        groups = (None if of is None else of[indices] for of in (self.domain_of, self.writer_of))
        return Dataset(take(self.samples, indices), self.labels[indices], self.prepare, self.augment, *groups)


LOOKED_AT = 16
"""Samples of a source whose values are compared with the scale that it states."""

ROUNDING = 1e-3
"""How far outside [0, 1] a pixel may lie."""

Part = Dataset | Callable[[], Dataset]
"""Samples, or a function that reads them when they are first needed."""


class Source:
    """A training and a test set of one kind.

    Either part may be missing, or be read when it is first used: a server needs no training sample, a client no test
    sample. A part is checked whole when it is read. `classes` is 0 for data without classes, whose labels are numbers.
    `shape` is that of one sample as a model sees it; a source that does not state it is asked for a sample. `domains`
    are names, if there are any. `scale` says how `prepare` scales pixels; a source of images that states none has
    pixels in [0, 1]. `width`, how many outputs a model needs, is the number of classes or of a label's numbers if it is
    left out. A source that states its shape and has labels for each token, or vectors, states `label_shape` too.
    """

    def __init__(
        self,
        train: Part | None,
        test: Part | None,
        classes: int,
        domains: tuple[str, ...] = (),
        scale: PixelScale | None = None,
        shape: Shape | None = None,
        *,
        width: int = 0,
        label_shape: tuple[int, ...] | None = None,
    ) -> None:
        self._parts: dict[str, Part | None] = {"training": train, "test": test}
        for name, part in self._parts.items():
            if part is not None and not isinstance(part, Dataset) and not callable(part):
                raise UnusableDataError(
                    f"baffle.Source: its {name} set must be a baffle.Dataset, a function that reads one, or None, got "
                    f"{type(part).__name__}"
                )
        self._sound = set[str]()
        self.classes = classes
        self.domains = domains
        self.scale = scale
        self._shape = shape
        self._states_shape = shape is not None and is_plain(shape)
        self._width = width
        self._label_shape = label_shape

    @property
    def train(self) -> Dataset:
        return self._part("training")

    @property
    def test(self) -> Dataset:
        return self._part("test")

    @property
    def has_test(self) -> bool:
        """Whether there is a test set, read or not."""
        return self._parts["test"] is not None

    @property
    def shape(self) -> Shape:
        if self._shape is None:
            self._shape = shape_of(self.first(1).x)
        return self._shape

    @property
    def label_shape(self) -> tuple[int, ...]:
        """The shape of one sample's label; () for one class or one number."""
        if self._label_shape is None:
            stated = () if self.classes or self._width < 2 else (self._width,)
            self._label_shape = stated if self._states_shape else self.first(1).y.shape[1:]
        return self._label_shape

    @property
    def width(self) -> int:
        """How many outputs a model needs."""
        return self._width or self.classes or prod(self.label_shape)

    @property
    def pixel_scale(self) -> PixelScale | None:
        """How its pixels are scaled; none if that is not stated and the first samples do not lie in [0, 1], as those of
        vectors mostly do not."""
        if self._states_shape and self.scale is not None:
            return self.scale
        scale = self.scale or PixelScale()
        values = self.first(LOOKED_AT).x
        if not isinstance(values, np.ndarray) or values.ndim != 4 or scale.channels not in (1, values.shape[1]):
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
        if not self._states_shape and not _is_floats(self.first(1).x):
            few = self.first(count)
            return few.take(np.arange(count) % len(few.y))
        random = np.random.default_rng(0)
        labels: NDArray[Any] = np.zeros((count, *self.label_shape), np.int64 if self.classes else np.float32)
        return Batch(random.standard_normal((count, *self._array_shape), np.float32), labels)

    @property
    def _array_shape(self) -> tuple[int, ...]:
        return tuple(size for size in self.shape if isinstance(size, int))

    def _part(self, name: str) -> Dataset:
        part = self._parts[name]
        if part is None:
            raise DataError(f"the data set has no {name} samples; name a data set that has, or put them in its folder")
        if not isinstance(part, Dataset):
            with calling(f"the function that reads the data set's {name} samples"):
                part = part()
            if not isinstance(part, Dataset):
                raise UnusableDataError(
                    f"the function that reads the data set's {name} samples must return a baffle.Dataset, got "
                    f"{type(part).__name__}"
                )
            self._parts[name] = part
        if name not in self._sound:
            _require_sound(part, name, self.classes)
            self._sound.add(name)
        return part


def _require_sound(data: Dataset, name: str, classes: int) -> None:
    """Refuse a part of a source that cannot be used, with a sentence that says why."""
    require_lengths(data.samples, len(data), name)
    require_labels(data.labels, classes, name)
    for array in arrays(data.samples):
        require_finite(array, f"the data set's {name} samples")
    few = data.batch(np.arange(min(2, len(data))))
    for array in arrays(few.x):
        require_finite(array, f"the data set's {name} samples, as its prepare gives them,")


def _is_floats(x: Samples) -> bool:
    return isinstance(x, np.ndarray) and x.dtype.kind == "f"
