"""What must hold of a data set before anything is trained on it. Whatever does not is refused in words that say which
part of the data it is."""

from typing import Any

import numpy as np

from baffle.core.samples import PADDING, Array, Labels, Samples, arrays, count
from baffle.errors import UnusableDataError

AT_ONCE = 1 << 18
"""Numbers that are looked at together: few enough to stay in cache, so that looking takes little memory."""


def sample_array(values: Any) -> Array:
    """Stored samples as an array; they may come as a list."""
    return values if isinstance(values, np.ndarray) else _converted("samples", values)


def label_array(values: Any) -> Labels:
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


def require_lengths(samples: Samples, labels: int, part: str) -> None:
    """Require a label for each sample, and at least one sample."""
    named = samples.items() if isinstance(samples, dict) else enumerate(arrays(samples))
    for name, array in named:
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


def require_labels(labels: Labels, classes: int, part: str) -> None:
    """Require class numbers below `classes`; if there are no classes, finite numbers."""
    if not classes:
        require_finite(labels, f"the data set's {part} labels")
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


def require_finite(array: Array, what: str) -> None:
    """Require finite numbers, looking at a few at a time. Integers always are."""
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


def require_samples(whose: str, x: Any, expected: int) -> Samples:
    """What a function gave as samples, if it is that: arrays of numbers with a row for each sample."""
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
    assert count(x) == expected
    return x


def _kind(value: object) -> str:
    kind = f"an array of {value.dtype}" if isinstance(value, np.ndarray) else f"a {type(value).__name__}"
    return "None" if value is None else kind
