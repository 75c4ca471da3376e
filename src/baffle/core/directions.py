"""Directions, version 1: what a seed means, the same on every machine.

A direction is an integer vector z_k, a pure function of a key, its number k and its support: the part of the weights
that it touches. Number i of stream k belongs to weight i of the support, so any direction, or any slice of one, can be
drawn alone. The paper's δ_k (eq. 4) is σ · unit · z_k.

Directions on the sphere of radius √n, as FedZO has them, are Gaussian ones stretched to that length: u_k is
s_k · unit · z_k with s_k = √n / ‖unit · z_k‖. A client moves along u_k and sends (u_k · ∇L) · s_k. The server still
multiplies integers z_k by integer totals and gets Σ (u_k · ∇L) · u_k without computing a norm.

Outer directions are the exception to the numbering: their numbers follow from factors of whole tensors, which have
places of their own in the stream (`baffle.core.outer`). They know the shapes of the model's tensors, and a support of
theirs consists of whole tensors.

A layout says how many directions each support has. The directions are numbered so that those of every support are
spread evenly: a client that evaluates only the first k of them covers all supports in proportion. Code that handles
the directions of one support together collects them first (`grouped`).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import pairwise
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from baffle.core.arrays import F64, I64, U8, Integers
from baffle.core.outer import Shapes, flat
from baffle.core.seeds import BLOCK, Scratch, decode_signs, keystream, look_up

NUMBERS_AT_ONCE = 1 << 17
"""A loop over directions draws this many numbers at a time: enough to be quick, few enough to stay in cache."""


class Support(NamedTuple):
    """The part of the flat weight vector that a direction touches: one slice, or two where the filters of a unit and
    their biases lie apart. The second, `tail`, lies behind the first."""

    start: int
    stop: int
    tail: tuple[int, int] = (0, 0)

    @property
    def size(self) -> int:
        return self.stop - self.start + self.tail[1] - self.tail[0]

    def parts(self, first: int = 0, last: int | None = None) -> list[tuple[slice, slice]]:
        """Pairs of slices: of weights, and of the numbers of a direction, `first` to `last`, that belong to them."""
        last = self.size if last is None else last
        ends = ((self.start, 0, self.stop - self.start), (self.tail[0], self.stop - self.start, self.size))
        return [
            (slice(weight + low - number, weight + high - number), slice(low - first, high - first))
            for weight, number, end in ends
            if (low := max(first, number)) < (high := min(last, end))
        ]

    def below(self, weight: int) -> int:
        """How many weights of this support come before `weight`. It turns a range of weights into one of numbers."""
        return max(0, min(weight, self.stop) - self.start) + max(0, min(weight, self.tail[1]) - self.tail[0])


@dataclass(frozen=True)
class Distribution:
    """How stream bits become the integers of a direction."""

    name: str
    bits: int  # of the stream, for one number
    unit_bits: int  # an integer counts units of 2^-unit_bits
    bound: int  # the largest absolute value
    decode: Callable[[U8, Scratch], Integers]
    on_sphere: bool = False  # directions are stretched to the length √n
    shapes: Shapes = ()  # of the model's tensors, if directions are outer products

    @property
    def unit(self) -> float:
        return 2.0**-self.unit_bits


@cache
def gaussian_table() -> NDArray[np.int16]:
    """The standard normal quantile at (i + ½)/65536, scaled to unit variance, in units of 2⁻¹²."""
    normal = NormalDist()
    quantiles = np.fromiter((normal.inv_cdf((i + 0.5) / 65536) for i in range(65536)), np.float64, 65536)
    table: NDArray[np.int16] = np.rint(quantiles / np.sqrt(np.mean(quantiles**2)) * 4096).astype(np.int16)
    table.flags.writeable = False
    return table


def _gaussian(stream: U8, scratch: Scratch) -> Integers:
    return look_up(gaussian_table(), stream.view("<u2"), scratch)


GAUSSIAN = Distribution("gaussian", bits=16, unit_bits=12, bound=17715, decode=_gaussian)
RADEMACHER = Distribution("rademacher", bits=1, unit_bits=0, bound=1, decode=decode_signs)
SPHERE = replace(GAUSSIAN, name="sphere", on_sphere=True)
DISTRIBUTIONS = {d.name: d for d in (GAUSSIAN, RADEMACHER, SPHERE)}
"""The distributions that are the same for every model."""

OUTER = "outer"


def distribution_names() -> tuple[str, ...]:
    return (*DISTRIBUTIONS, OUTER)


def distribution_of(name: str, shapes: Shapes = ()) -> Distribution:
    """A distribution by its name. Only that of outer directions needs the shapes of the model's tensors."""
    if name != OUTER:
        return DISTRIBUTIONS[name]
    if not shapes:
        raise ValueError("outer directions need the shapes of the model's tensors, got none")
    return replace(RADEMACHER, name=OUTER, shapes=shapes)


@dataclass(frozen=True)
class Directions:
    """All directions of one key."""

    key: bytes
    distribution: Distribution

    def over(
        self,
        support: Support,
        numbers: Sequence[int],
        start: int = 0,
        stop: int | None = None,
        scratch: Scratch | None = None,
    ) -> Integers:
        """Numbers `start` to `stop` of each direction in `numbers`, a row each, if they touch this support. The result
        may lie in `scratch`."""
        stop = support.size if stop is None else stop
        parts = support.parts(start, stop) if self.distribution.shapes else []
        if not parts:
            return self.draw(numbers, start, stop, scratch)
        if len(parts) == 1:
            return self.draw(numbers, parts[0][0].start, parts[0][0].stop, scratch)
        return np.concatenate([self.draw(numbers, weights.start, weights.stop) for weights, _ in parts], axis=1)

    def draw(self, numbers: Sequence[int], start: int, stop: int, scratch: Scratch | None = None) -> Integers:
        """Numbers `start` to `stop` of each direction in `numbers`, a row each, if they touch all weights. The result
        lies in `scratch`. Over a part of the weights only outer directions have other numbers: see `over`."""
        scratch = scratch or Scratch()
        if self.distribution.shapes:
            return flat(self.key, numbers, self.distribution.shapes, start, stop, scratch)
        per_block = 8 * BLOCK // self.distribution.bits
        first = start // per_block
        stream = keystream(self.key, numbers, first, -(-stop // per_block) - first, scratch)
        skip = start - first * per_block
        return self.distribution.decode(stream, scratch)[:, skip : skip + stop - start]

    def stretch(self, numbers: Sequence[int], size: int) -> F64:
        """s_k for directions over `size` weights: the factor from unit · z_k to the direction itself."""
        if not self.distribution.on_sphere:
            return np.ones(len(numbers))
        return np.array([_stretch(self, number, size) for number in numbers])


@lru_cache(maxsize=1 << 14)  # a probe asks twice, and clients that share a key ask again
def _stretch(directions: Directions, number: int, size: int) -> float:
    """√n / ‖unit · z‖ from an exact sum of squares, so the same everywhere. A direction of zeros is not stretched."""
    square = 0
    for start in range(0, size, NUMBERS_AT_ONCE):
        (z,) = directions.draw([number], start, min(start + NUMBERS_AT_ONCE, size)).astype(np.float64)
        square += int(z @ z)  # below 2⁵³, where float64 counts every integer
    return math.sqrt((size << 2 * directions.distribution.unit_bits) / square) if square else 1.0


def dense(n: int, k: int) -> tuple[Support, ...]:
    """K directions over all n weights, as in the paper."""
    return (Support(0, n),) * k


def grouped(supports: Sequence[Support]) -> dict[Support, list[int]]:
    """The numbers of each support's directions, in the order in which supports first appear."""
    groups = dict[Support, list[int]]()
    for number, support in enumerate(supports):
        groups.setdefault(support, []).append(number)
    return groups


def blocks(
    supports: Sequence[Support], block: int = NUMBERS_AT_ONCE, *, most: int | None = None
) -> Iterator[tuple[Sequence[int], Support]]:
    """Directions that share a support, in batches of at most `block` numbers but at least one direction. If `most` is
    given, a batch has that many directions instead."""
    for support, numbers in grouped(supports).items():
        rows = most or max(1, block // max(1, support.size))
        for start in range(0, len(numbers), rows):
            yield numbers[start : start + rows], support


def coverage(supports: Sequence[Support], stop: int, start: int = 0) -> I64:
    """For each weight from `start` to `stop`, the number of directions that touch it."""
    edges = np.zeros(stop - start + 1, dtype=np.int64)
    for support, numbers in grouped(supports).items():
        for weights, _ in support.parts(support.below(start), support.below(stop)):
            edges[weights.start - start] += len(numbers)
            edges[weights.stop - start] -= len(numbers)
    return np.cumsum(edges, out=edges)[:-1]


class LayoutEntry(NamedTuple):
    """A support and the number of its directions."""

    support: Support
    directions: int


Layout = tuple[LayoutEntry, ...]
SupportRow = tuple[int, int, int, int]  # a support as plain numbers: start, stop, start and stop of the tail
Row = tuple[int, int, int, int, int]  # an entry as plain numbers: those of its support, and its count


def supports(layout: Layout) -> tuple[Support, ...]:
    """The support of every direction, in order. Direction i of an entry's n is placed (i + ½)/n of the way along."""
    counts = np.array([entry.directions for entry in layout], dtype=np.int64)
    owners = np.repeat(np.arange(len(layout)), counts)
    turns = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
    order = np.argsort((turns + 0.5) / counts[owners], kind="stable")
    return tuple(layout[number].support for number in owners[order].tolist())


def allocate(sizes: Sequence[int], costs: Sequence[float], k: int) -> list[int]:
    """Share k directions out among supports: K_s ∝ √(n_s / c_s), for n_s weights and a cost of c_s for each scalar.

    Every support gets at least one. The rest go by largest remainder, and to the earlier support in a tie.
    """
    if k < len(sizes):
        raise ValueError(f"expected a direction for each of {len(sizes)} supports, got {k} directions")
    wanted = [math.sqrt(size / cost) for size, cost in zip(sizes, costs, strict=True)]
    counts = [1] * len(sizes)
    open_numbers = list(range(len(sizes)))
    # A support whose share is below one is settled at one; the others share what is left.
    while open_numbers:
        left = k - (len(sizes) - len(open_numbers))
        total = math.fsum(wanted[number] for number in open_numbers)
        shares = {number: left * wanted[number] / total for number in open_numbers}
        small = [number for number in open_numbers if shares[number] < 1]
        if not small:
            for number in open_numbers:
                counts[number] = math.floor(shares[number])
            by_remainder = sorted(open_numbers, key=lambda number: (counts[number] - shares[number], number))
            missing = k - sum(counts)
            for number in by_remainder[:missing]:
                counts[number] += 1
            break
        open_numbers = [number for number in open_numbers if number not in small]
    return counts


def lay_out(layers: Sequence[Support], k: int) -> Layout:
    """Share k directions out among the layers of a model: K_s ∝ √n_s, because a whole forward pass costs the same for
    each. If there are more layers than directions, neighbouring layers share theirs."""
    joined = merge(layers, k)
    return tuple(map(LayoutEntry, joined, allocate([layer.size for layer in joined], [1.0] * len(joined), k)))


def merge(layers: Sequence[Support], most: int) -> tuple[Support, ...]:
    """The same weights in at most `most` supports: the two neighbours that have the fewest weights together become one
    until there are few enough. Slices of one layer that lie apart count as neighbours of what lies between them."""
    if len(layers) <= most:
        return tuple(layers)
    slices = sorted((part.start, part.stop) for layer in layers for part, _ in layer.parts())
    while len(slices) > most:
        sizes = [right[1] - left[0] for left, right in pairwise(slices)]
        at = sizes.index(min(sizes))
        slices[at : at + 2] = [(slices[at][0], slices[at + 1][1])]
    return tuple(Support(start, stop) for start, stop in slices)


def rows_of(layout: Layout) -> list[Row]:
    """A layout as a plan can hold it."""
    return [(*row_of(entry.support), entry.directions) for entry in layout]


def layout_of(rows: Sequence[Row]) -> Layout:
    return tuple(LayoutEntry(support_of(row), count) for *row, count in rows)


def row_of(support: Support) -> SupportRow:
    return support.start, support.stop, *support.tail


def support_of(row: Sequence[int]) -> Support:
    start, stop, first, last = row
    return Support(start, stop, (first, last))
