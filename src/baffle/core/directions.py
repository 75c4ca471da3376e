"""Directions, version 1: what a seed means, the same on every machine.

A direction is an integer vector z_k, a pure function of a key, its number k and its support: the part of the weights
that it touches. Number i of stream k belongs to weight i of the support, so any direction, or any slice of one, can be
drawn alone. The paper's δ_k (eq. 4) is σ · unit · z_k.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from baffle.core.arrays import I64, U8, Integers
from baffle.core.seeds import BLOCK, keystream

NUMBERS_AT_ONCE = 1 << 18
"""How many numbers a loop over directions draws at a time: enough to be quick, few enough to stay in cache."""


class Support(NamedTuple):
    """The part of the flat weight vector that a direction touches: a slice, and a second one behind it, because the
    filters of some units and their biases lie apart."""

    start: int
    stop: int
    tail: tuple[int, int] = (0, 0)

    @property
    def size(self) -> int:
        return self.stop - self.start + self.tail[1] - self.tail[0]

    def parts(self) -> list[tuple[slice, slice]]:
        """For each slice of the weights, the slice of the direction's numbers that belongs to it."""
        first = self.stop - self.start
        return [
            (slice(self.start, self.stop), slice(0, first)),
            *([(slice(*self.tail), slice(first, self.size))] if self.tail != (0, 0) else []),
        ]


@dataclass(frozen=True)
class Distribution:
    """How stream bits become the integers of a direction."""

    name: str
    bits: int  # of the stream, for one number
    unit_bits: int  # an integer counts units of 2^-unit_bits
    bound: int  # the largest absolute value
    decode: Callable[[U8], Integers]

    @property
    def unit(self) -> float:
        return 2.0**-self.unit_bits


@cache
def gaussian_table() -> NDArray[np.int16]:
    """The standard normal quantile at (i + ½)/65536, scaled to unit variance, in units of 2⁻¹²."""
    normal = NormalDist()
    quantiles = np.array([normal.inv_cdf((i + 0.5) / 65536) for i in range(65536)])
    table: NDArray[np.int16] = np.rint(quantiles / np.sqrt(np.mean(quantiles**2)) * 4096).astype(np.int16)
    table.flags.writeable = False
    return table


def _gaussian(stream: U8) -> Integers:
    # Every uint16 is inside the table; "wrap" spares the check for it.
    return gaussian_table().take(stream.view("<u2"), mode="wrap")


def _rademacher(stream: U8) -> Integers:
    bits = np.unpackbits(stream, axis=1, bitorder="little")
    bits <<= 1
    bits -= 1  # 0 wraps to 255, which is −1 as int8
    return bits.view(np.int8)


GAUSSIAN = Distribution("gaussian", bits=16, unit_bits=12, bound=17715, decode=_gaussian)
RADEMACHER = Distribution("rademacher", bits=1, unit_bits=0, bound=1, decode=_rademacher)
DISTRIBUTIONS = {d.name: d for d in (GAUSSIAN, RADEMACHER)}


@dataclass(frozen=True)
class Directions:
    """All directions of one key."""

    key: bytes
    distribution: Distribution

    def draw(self, numbers: range, start: int, stop: int) -> Integers:
        """Numbers `start` to `stop` of each direction in `numbers`, a row each."""
        per_block = 8 * BLOCK // self.distribution.bits
        first = start // per_block
        stream = keystream(self.key, numbers, first, -(-stop // per_block) - first)
        skip = start - first * per_block
        return self.distribution.decode(stream)[:, skip : skip + stop - start]


def dense(n: int, k: int) -> tuple[Support, ...]:
    """K directions over all n weights, as in the paper."""
    return (Support(0, n),) * k


def blocks(supports: Sequence[Support], most: int | None = None) -> Iterator[tuple[range, Support]]:
    """Neighbouring directions with one support, in pieces small enough to draw at once (at most `most` directions)."""
    first = 0
    for support, same in groupby(supports):
        count = sum(1 for _ in same)
        rows = max(1, NUMBERS_AT_ONCE // max(1, support.size))
        rows = rows if most is None else min(rows, most)
        for start in range(first, first + count, rows):
            yield range(start, min(start + rows, first + count)), support
        first += count


def coverage(supports: Sequence[Support], n: int) -> I64:
    """For each weight, the number of directions that touch it."""
    edges = np.zeros(n + 1, dtype=np.int64)
    for support, same in groupby(supports):
        count = sum(1 for _ in same)
        for weights, _ in support.parts():
            edges[weights.start] += count
            edges[weights.stop] -= count
    return np.cumsum(edges)[:n]
