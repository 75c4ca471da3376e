"""Samples as a model takes them: one array, a tuple of arrays or a dict of arrays, whose first axis counts samples.

A module is called with `module(x)`, `module(*x)` or `module(**x)`. All functions that slice, count or describe samples
are here, so that other modules need not distinguish the three forms.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]

Samples: TypeAlias = Array | tuple[Array, ...] | dict[str, Array]
"""Model input. Floats, or integers such as token ids, which must not be rounded."""

Labels: TypeAlias = NDArray[Any]
"""The targets of a model, with the sample as the first axis: class numbers (int64), one for each sample or each token;
or numbers (float32), one or more for each sample."""

Shape: TypeAlias = tuple[int, ...] | tuple[tuple[int, ...], ...] | dict[str, tuple[int, ...]]
"""The shape of one sample: one for each array."""

Rows: TypeAlias = NDArray[np.int64] | slice

PADDING = -100  # the label of a position that is ignored

A = TypeVar("A")
B = TypeVar("B")


def each(function: Callable[[A], B], x: "A | tuple[A, ...] | dict[str, A]") -> "B | tuple[B, ...] | dict[str, B]":
    """Apply a function to every array (or tensor) and keep the form."""
    if isinstance(x, tuple):
        return tuple(map(function, x))
    if isinstance(x, dict):
        return {name: function(array) for name, array in x.items()}
    return function(x)


def arrays(x: "A | tuple[A, ...] | dict[str, A]") -> tuple[A, ...]:
    """All arrays (or tensors), in order."""
    if isinstance(x, tuple):
        return x
    return tuple(x.values()) if isinstance(x, dict) else (x,)


def count(x: Samples) -> int:
    return len(arrays(x)[0])


def take(x: Samples, rows: Rows) -> Samples:
    """The samples of these rows."""
    return each(lambda array: array[rows], x)


def joined(parts: Sequence[Samples]) -> Samples:
    """Samples of the same form, one after the other."""
    first = parts[0]
    if isinstance(first, dict):
        return {name: np.concatenate([part[name] for part in parts]) for name in first}  # type: ignore[call-overload]
    if isinstance(first, tuple):
        return tuple(np.concatenate(each) for each in zip(*parts, strict=True))
    return np.concatenate(parts)  # type: ignore[arg-type]


def pieces(length: int, size: int) -> Iterator[slice]:
    """Rows in pieces of `size`, of which the last may be smaller; all rows in one piece if `size` is 0."""
    size = size or length
    return (slice(start, min(start + size, length)) for start in range(0, length, size))


def shape_of(x: Samples) -> Shape:
    """The shape of one sample."""
    return each(lambda array: array.shape[1:], x)


def is_plain(shape: Shape) -> bool:
    """Whether a shape is that of one array."""
    return isinstance(shape, tuple) and not any(isinstance(size, tuple) for size in shape)


def describe(x: Samples) -> str:
    """Describe samples in an error message: "float32 of shape (3, 8, 8)"."""
    described = each(lambda array: f"{array.dtype} of shape {array.shape[1:]}", x)
    if isinstance(described, dict):
        return ", ".join(f"{name}: {text}" for name, text in described.items())
    return ", ".join(arrays(described))
