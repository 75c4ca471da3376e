"""Outer directions: z = a bᵀ for a matrix, with a and b of ±1, so that a layer's share of a direction has rank one.

E[z zᵀ] = 1 and ‖z‖² = n, as for dense directions of ±1. In return x (W + σ a bᵀ)ᵀ = x Wᵀ + σ (x·b) aᵀ: directions need
no weights of their own, many of them share a forward pass, and Σ_k T_k a_k b_kᵀ is one matrix product.

A model is a list of tensors, in the order of its flat weight vector. A tensor of two or more dimensions counts as a
matrix of out × in: its first dimension times all others, as they lie in memory. Any other tensor is a vector.

Where the numbers of direction k lie in stream k (those of `signs`), without gaps, and whichever of the
tensors a direction touches:

    for each tensor in turn   a matrix: out numbers of a, then in numbers of b
                              a vector of size s: its s numbers

So tensor t begins at number Σ_{s<t} (out_s + in_s, or size_s), and the factors of any tensor can be drawn alone.
"""

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

import numpy as np

from baffle.core.arrays import Integers
from baffle.core.seeds import Scratch, signs

Shape = tuple[int, ...]
Shapes = tuple[Shape, ...]  # the shape of every tensor of a model, in the order of its flat weight vector


class Place(NamedTuple):
    """Where a tensor lies among the weights, and where its factors lie among the numbers of a direction's stream."""

    start: int  # its first weight
    number: int  # the first number of its factors
    rows: int  # out, or the size of a vector
    columns: int  # in; 0 for a vector

    @property
    def stop(self) -> int:
        return self.start + self.rows * (self.columns or 1)


@lru_cache(maxsize=64)
def places(shapes: Shapes) -> tuple[Place, ...]:
    """Every tensor's place."""
    found, start, number = list[Place](), 0, 0
    for shape in shapes:
        rows, columns = (shape[0], prod(shape[1:])) if len(shape) > 1 else (prod(shape), 0)
        found.append(Place(start, number, rows, columns))
        start, number = found[-1].stop, number + rows + columns
    return tuple(found)


def size_of(shapes: Shapes) -> int:
    """The weights of all tensors together."""
    return sum(prod(shape) for shape in shapes)


def flat(
    key: bytes, numbers: Sequence[int], shapes: Shapes, start: int, stop: int, scratch: Scratch | None = None
) -> Integers:
    """z itself, from weight `start` to weight `stop` of the model, a row for each direction. It lies in `scratch`."""
    scratch = scratch or Scratch()
    z = scratch.array("outer", (len(numbers), stop - start), np.int8)
    touched = [place for place in places(shapes) if place.start < stop and start < place.stop]
    whole = [place for place in touched if start <= place.start and place.stop <= stop]
    if whole:
        first, last = whole[0].number, whole[-1].number + whole[-1].rows + whole[-1].columns
        drawn = signs(key, numbers, first, last, scratch)
        for place in whole:
            a = place.number - first
            b = a + place.rows
            right = drawn[:, b : b + place.columns] if place.columns else None
            _multiply(drawn[:, a:b], right, z[:, place.start - start : place.stop - start])
    for place in touched:
        low, high = max(start, place.start), min(stop, place.stop)
        if (low, high) != (place.start, place.stop):
            z[:, low - start : high - start] = _slice(key, numbers, place, low - place.start, high - place.start)
    return z


def _multiply(a: Integers, b: Integers | None, z: Integers) -> None:
    """Write a bᵀ, or a alone, into z."""
    if b is None:
        z[:] = a
    else:
        # 1 + (a ⊕ b) is a · b for numbers of ±1, and quicker: processors multiply no bytes.
        split = z.reshape(len(a), a.shape[1], b.shape[1])  # the same memory: only the last axis is divided
        np.bitwise_xor(a[:, :, None], b[:, None, :], out=split)
        z += 1


def _slice(key: bytes, numbers: Sequence[int], place: Place, low: int, high: int) -> Integers:
    """Weights `low` to `high` of one tensor."""
    if not place.columns:
        return signs(key, numbers, place.number + low, place.number + high)
    first, last = low // place.columns, -(-high // place.columns)
    a = signs(key, numbers, place.number + first, place.number + last)
    b = signs(key, numbers, place.number + place.rows, place.number + place.rows + place.columns)
    rows = np.empty((len(numbers), (last - first) * place.columns), np.int8)
    _multiply(a, b, rows)
    return rows[:, low - first * place.columns : high - first * place.columns]
