"""Data sets: by name, or as your own `Source`. A source is checked before training, and errors say which part of the
data is wrong."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from baffle.core.arrays import I64
from baffle.core.pixels import PixelScale
from baffle.core.ports import Batch
from baffle.core.samples import PADDING, Array, Labels, Samples, Shape, arrays, each, is_plain, shape_of, take
from baffle.core.seeds import permutation
from baffle.errors import DataError, PlanError, UnusableDataError
from baffle.plan import TaskSettings
from baffle.plan.functions import call_own, calling

AT_ONCE = 1 << 18  # numbers that are checked at once: few enough to stay in the cache
LOOKED_AT = 16  # how many samples are compared with the scale that a source states
VALIDATION, MOST_VALIDATED = 5, 10_000  # every so many training samples, and at most so many, are a validation split
VALIDATION_KEY = sha256(b"baffle/validation/1").digest()
ROUNDING = 1e-3  # how far outside [0, 1] a pixel may lie


@dataclass(frozen=True)
class Dataset:
    """Stored samples, their labels, and how a batch of samples becomes model input.

    Samples are one array, or a tuple or dict of arrays; labels are class numbers (for each sample, or for each of its
    tokens) or numbers to predict. The first axis of all of them is the sample. `prepare` makes model input of stored
    samples; `augment` changes each of them slightly, as a key determines. `domain_of` and `writer_of` give each
    sample's domain (an index into `Source.domains`) and writer, if known.
    """

    samples: Any
    labels: Labels
    prepare: Callable[[Any], Samples] = lambda samples: samples
    augment: Callable[[Any, bytes], Any] | None = None
    domain_of: I64 | None = None
    writer_of: I64 | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "samples", each(lambda values: _converted("samples", values), self.samples))
        object.__setattr__(self, "labels", _label_array(self.labels))
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
        _require_samples("the data set's prepare", x, len(indices))
        return Batch(x, self.labels[indices])

    def rows(self, indices: I64) -> "Dataset":
        """A data set of these samples alone."""
        groups = (None if of is None else of[indices] for of in (self.domain_of, self.writer_of))
        return Dataset(take(self.samples, indices), self.labels[indices], self.prepare, self.augment, *groups)


Part = Dataset | Callable[[], Dataset]  # a function reads samples when they are first needed


class Source:
    """A training set and a test set.

    Either part may be missing, or be read when it is first used: a server needs no training samples, and a client no
    test samples. A part is checked as a whole when it is read.

    `classes` is 0 for data whose labels are numbers to predict. `domains` are the names of domains, if there are any.
    `scale` says how `prepare` scales pixels; without it, pixels of images lie in [0, 1]. `shape` is the shape of one
    sample as the model sees it; without it, the first sample is read. `width` is the number of outputs that a model
    needs; by default the number of classes, or of numbers in a label. If you give the shape and the labels are vectors
    or one for each token, give `label_shape` too.
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
        self.classes, self.domains, self.scale = classes, domains, scale
        self._shape, self._width, self._label_shape = shape, width, label_shape
        self._states_shape = shape is not None and is_plain(shape)

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
        """The scale of the pixels. None if it is not stated and the first samples do not lie in [0, 1]."""
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
        """The first samples of the training set, or of the test set if there is no training set."""
        data = self.train if self._parts["training"] is not None else self.test
        return data.batch(np.arange(min(count, len(data))))

    def example(self, count: int) -> Batch:
        """Samples of the right shape and type to try a model on. Floats are invented, so that trying a model needs no
        data; integers are real samples, because only those are sure to be valid ids."""
        if not self._states_shape:
            x = self.first(1).x
            if not isinstance(x, np.ndarray) or x.dtype.kind != "f":
                few = self.first(count)
                return few.take(np.arange(count) % len(few.y))
        shape = [size for size in self.shape if isinstance(size, int)]
        labels: NDArray[Any] = np.zeros((count, *self.label_shape), np.int64 if self.classes else np.float32)
        return Batch(np.random.default_rng(0).standard_normal((count, *shape), np.float32), labels)

    def validation(self) -> "Source":
        """The same data set with a part of its training samples in place of its test set, which is not read. That part
        is the same for every plan and seed, so that all trials are compared on the same samples."""

        def part(*, tested: bool) -> Dataset:
            train = self.train
            order = permutation(VALIDATION_KEY, len(train))
            most = min(len(train) // VALIDATION, MOST_VALIDATED)
            return train.rows(np.sort(order[:most] if tested else order[most:]))

        shape = self._shape if self._states_shape else None
        parts = partial(part, tested=False), partial(part, tested=True)
        label_shape = self._label_shape
        return Source(*parts, self.classes, self.domains, self.scale, shape, width=self._width, label_shape=label_shape)

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


def _label_array(values: Any) -> Labels:
    """Labels as int64 or float32; they may come as a list."""
    labels = _converted("labels", values)
    if labels.dtype.kind in "bui":
        return labels.astype(np.int64, copy=False)
    if labels.dtype.kind == "f":
        return labels.astype(np.float32, copy=False)
    raise UnusableDataError(
        f"baffle.Dataset: its labels are {labels.dtype}, expected class numbers or numbers to predict; convert them"
    )


def _converted(what: str, values: Any) -> Array:
    try:
        array = np.asarray(values)
    except (TypeError, ValueError) as fault:
        raise UnusableDataError(f"baffle.Dataset: its {what} cannot be made an array: {fault}") from None
    if array.ndim == 0:
        raise UnusableDataError(
            f"baffle.Dataset: its {what} must be arrays whose first axis is the sample, got {type(values).__name__}"
        )
    return array


def _require_sound(data: Dataset, part: str, classes: int) -> None:
    """Refuse a part of a source that cannot be used, and say why."""
    samples, labels = data.samples, len(data)
    for name, array in samples.items() if isinstance(samples, dict) else enumerate(arrays(samples)):
        if len(array) != labels:
            which = "" if isinstance(samples, np.ndarray) else f" in input {name}"
            raise UnusableDataError(
                f"the data set has {len(array):,} {part} samples{which}, but {labels:,} labels; expected a label for "
                "each sample"
            )
    if not labels:
        raise UnusableDataError(
            f"the data set's {part} set is empty; expected samples, or None instead of a set without any"
        )
    _require_labels(data.labels, classes, part)
    for array in arrays(data.samples):
        _require_finite(array, f"the data set's {part} samples")
    for array in arrays(data.batch(np.arange(min(2, len(data)))).x):
        _require_finite(array, f"the data set's {part} samples, as its prepare gives them,")


def _require_labels(labels: Labels, classes: int, part: str) -> None:
    """Require class numbers below `classes`; if there are no classes, finite numbers."""
    if not classes:
        _require_finite(labels, f"the data set's {part} labels")
        return
    expected = f"expected class numbers from 0 to {classes - 1}"
    if labels.dtype.kind != "i":
        raise UnusableDataError(
            f"the data set's {part} labels are {labels.dtype}, but it has {classes} classes: {expected}; for numbers "
            "to predict, set classes = 0"
        )
    padded = labels.ndim > 1
    wrong = ((labels < 0) & (labels != PADDING if padded else True)) | (labels >= classes)
    if wrong.any():
        place = tuple(int(axis[0]) for axis in np.nonzero(wrong))
        padding = f" ({PADDING} for padding)" if padded else ""
        raise UnusableDataError(
            f"the data set's {part} labels: {expected}{padding}, got {labels[place]} in sample {place[0]}; correct the "
            "labels, or the source's classes"
        )


def _require_finite(array: Array, what: str) -> None:
    """Require finite numbers, checking a few at a time. Integers always pass."""
    if array.dtype.kind != "f":
        return
    rows = max(1, AT_ONCE // max(1, array[:1].size))
    for start in range(0, len(array), rows):
        finite = np.isfinite(array[start : start + rows])
        if not finite.all():
            sample = start + int(np.nonzero(~finite)[0][0])
            raise UnusableDataError(
                f"{what} hold values that are not finite, first in sample {sample}; remove or replace them"
            )


def _require_samples(whose: str, x: Any, expected: int) -> None:
    """Require that a function returned samples: arrays of numbers with a row for each sample."""
    if not isinstance(x, np.ndarray | tuple | dict) or not len(arrays(x)):
        raise UnusableDataError(f"{whose} gave {_kind(x)}, expected an array, or a tuple or dict of arrays")
    for array in arrays(x):
        if not isinstance(array, np.ndarray) or array.dtype.kind not in "buif":
            raise UnusableDataError(f"{whose} gave {_kind(x)} that holds {_kind(array)}, expected arrays of numbers")
        if array.ndim == 0 or len(array) != expected:
            rows = len(array) if array.ndim else "no"
            raise UnusableDataError(f"{whose} gave {rows} rows for {expected} samples, expected a row for each sample")
    if isinstance(x, dict) and not all(isinstance(name, str) for name in x):
        raise UnusableDataError(f"{whose} gave a dict whose keys are not names of a model's parameters")


def _kind(value: object) -> str:
    kind = f"an array of {value.dtype}" if isinstance(value, np.ndarray) else f"a {type(value).__name__}"
    return "None" if value is None else kind


class Reader(NamedTuple):
    """A function that reads a data set from a folder. One whose images can have any size takes `pixels` too."""

    module: str
    function: str
    sized: bool = False


SOURCES = {  # imported on demand: all readers together would take too much of a small client's memory
    "digits": Reader("baffle.data.handwriting", "digits"),
    "mnist": Reader("baffle.data.handwriting", "mnist"),
    "usps": Reader("baffle.data.handwriting", "usps"),
    "cifar10": Reader("baffle.data.cifar", "cifar10"),
    "cifar100": Reader("baffle.data.cifar", "cifar100"),
    "pacs": Reader("baffle.data.images", "pacs", sized=True),
    "officehome": Reader("baffle.data.images", "officehome", sized=True),
}


def load(name: str, folder: Path | None = None, pixels: int = 0) -> Source:
    """Load a data set by name, or a user's own as "package.module:function". `folder` defaults to $BAFFLE_DATA.

    With `pixels`, images have that size; otherwise the usual one of the set.
    """
    sized = [known for known, reader in SOURCES.items() if reader.sized]
    if pixels and name not in sized:
        raise PlanError(f"task.pixels: only {' and '.join(sized)} can have a size, not {name}; leave it out")
    if ":" in name:
        own = call_own("task.data", name, data=data_folder(folder))
        if not isinstance(own, Source):
            raise DataError(f"task.data: {name} must return a baffle.Source, got {type(own).__name__}")
        return own
    if name not in SOURCES:
        raise DataError(f'task.data: expected one of {", ".join(SOURCES)} or "package.module:function", got {name!r}')
    reader = SOURCES[name]
    read = getattr(import_module(reader.module), reader.function)
    source: Source = read(data_folder(folder), *([pixels] if pixels else []))
    return source


def source_of(task: TaskSettings, folder: Path | None = None, given: Source | None = None) -> Source:
    """The data set that a plan names, or the given one, with a validation split if the plan asks for it."""
    source = given or load(task.data, folder, task.pixels)
    return source.validation() if task.validation else source


def weights_for(task: TaskSettings, source: Source) -> int:
    """How many weights the plan's model has for a data set, found without building it; 0 if its settings don't say."""
    shape = [size for size in source.shape if isinstance(size, int)]
    return task.model.n_weights(shape or [1], source.width)


def least_weights(task: TaskSettings) -> int:
    """The same from the plan's text alone: no file is read, and no function of the user's is called. With a data set of
    the user's own, the model has at least so many weights."""
    if task.data in SOURCES:
        return weights_for(task, load(task.data, None, task.pixels))
    return task.model.n_weights([1], 1)


def data_folder(given: str | Path | None) -> Path | None:
    """The folder of data sets: the given one, or $BAFFLE_DATA."""
    name = given or os.environ.get("BAFFLE_DATA")
    return Path(name) if name else None
