"""Which part of the weights each direction touches, when not every direction touches all.

A layout says how many directions each support has. The directions are numbered so that those of every support are
spread evenly: a client that evaluates only the first k of them covers all supports in proportion. Code that handles
the directions of one support together collects them first (`grouped`).
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from baffle.core.directions import Support


class LayoutEntry(NamedTuple):
    """A support and the number of its directions."""

    support: Support
    directions: int


Layout = tuple[LayoutEntry, ...]
SupportRow = tuple[int, int, int, int]
"""A support as plain numbers: start, stop, start and stop of the tail."""

Row = tuple[int, int, int, int, int]
"""An entry as plain numbers: those of its support, and its count."""


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
