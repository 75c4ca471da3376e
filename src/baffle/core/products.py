"""Exact sums of outer directions: Σ_k T_k a_k b_kᵀ as float64 matrix products.

Every term of an entry is ± T_k, so all partial sums of a product stay within Σ|T_k|. While that is below 2⁵³, float64
counts every integer, and a BLAS may add in any order, with any number of threads, and get the same bits. Directions
whose totals exceed this bound together are divided among several products, which are added as int64.

The weights are handled in tiles: some rows and columns of one tensor. All factors are drawn at once if they are few,
and else for each tile alone.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from baffle.core.arrays import F64, I32, I64
from baffle.core.directions import Directions, Support, grouped
from baffle.core.outer import Place, places, size_of
from baffle.core.seeds import Scratch
from baffle.core.signs import signs

EXACT_SUM = 1 << 53
"""Below this, float64 counts every integer."""

COLUMNS_AT_ONCE = 1 << 12
"""The width of the widest tile."""


class Tile(NamedTuple):
    """Rows and columns of a tensor, each from the first to behind the last. A vector counts as one row."""

    place: Place
    rows: tuple[int, int]
    columns: tuple[int, int]

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows[1] - self.rows[0], self.columns[1] - self.columns[0]

    def of(self, numbers: NDArray[Any]) -> NDArray[Any]:
        """The tile's share of numbers that there is one of for each weight, as a view."""
        whole = numbers[self.place.start : self.place.stop].reshape(-1, self.place.columns or self.place.rows)
        return whole[slice(*self.rows), slice(*self.columns)]


def tiles(directions: Directions, block: int) -> list[Tile]:
    """All weights in tiles of at most `block` weights, in the order of the tensors."""
    found = list[Tile]()
    for place in places(directions.distribution.shapes):
        rows, columns = (place.rows, place.columns) if place.columns else (1, place.rows)
        wide = min(columns, block, COLUMNS_AT_ONCE)
        high = max(1, block // wide)
        found += [
            Tile(place, (row, min(row + high, rows)), (column, min(column + wide, columns)))
            for row in range(0, rows, high)
            for column in range(0, columns, wide)
        ]
    return found


class OuterSum:
    """Σ_k T_k · z_k for outer directions, tile by tile. Factors of at most twice `block` numbers are drawn at a time,
    but of at least one direction. No bit depends on it, nor on `limit`, which the totals of a product stay below."""

    def __init__(
        self,
        totals: I32,
        directions: Directions,
        supports: Sequence[Support],
        n: int,
        *,
        block: int,
        limit: int = EXACT_SUM,
    ) -> None:
        if size_of(directions.distribution.shapes) != n:
            raise ValueError(f"expected tensors of {n} weights, got {size_of(directions.distribution.shapes)}")
        self._key, self._block, self._limit = directions.key, block, limit
        self._totals = totals.astype(np.int64)
        every = places(directions.distribution.shapes)
        self._touching = touching(every, supports)
        self._all: F64 | None = None
        count = every[-1].number + every[-1].rows + every[-1].columns
        if count * len(totals) <= 2 * block:
            self._all = signs(self._key, range(len(totals)), 0, count).astype(np.float64)

    def coverage(self, tile: Tile) -> int:
        """How many directions touch the tile."""
        return len(self._touching[tile.place])

    def over(self, tile: Tile, scratch: Scratch) -> F64 | I64:
        """The tile's share of the sum. It lies in `scratch`."""
        parts = list(self._parts(tile))
        product = scratch.array("product", tile.shape, np.float64)
        if len(parts) == 1:
            self._multiply(parts[0], tile, scratch, product)
            return product
        exact = scratch.array("exact", tile.shape, np.int64)
        exact[:] = 0
        for part in parts:
            self._multiply(part, tile, scratch, product)
            exact += product.astype(np.int64)
        return exact

    def _parts(self, tile: Tile) -> Iterator[I64]:
        """The tile's directions, as many at a time as one product may have."""
        numbers = self._touching[tile.place]
        most = max(1, 2 * self._block // sum(tile.shape))
        waiting = [numbers[start : start + most] for start in range(0, len(numbers), most)][::-1]
        while waiting:
            part = waiting.pop()
            if int(np.abs(self._totals[part]).sum()) < self._limit:
                yield part
            elif len(part) > 1:
                waiting += [part[len(part) // 2 :], part[: len(part) // 2]]
            else:
                raise ValueError(f"expected totals below {self._limit}, got {self._totals[part[0]]}")

    def _multiply(self, numbers: I64, tile: Tile, scratch: Scratch, product: F64) -> None:
        place, factors = tile.place, self._totals[numbers].astype(np.float64)
        first = place.number + place.rows if place.columns else place.number
        right = self._drawn(numbers, first, tile.columns, "right", scratch)
        if place.columns:
            left = self._drawn(numbers, place.number, tile.rows, "left", scratch)
            scaled = np.multiply(left, factors[:, None], out=scratch.array("scaled", left.shape, np.float64))
            np.matmul(scaled.T, right, out=product)
        else:
            np.matmul(factors[None], right, out=product)

    def _drawn(self, numbers: I64, first: int, ends: tuple[int, int], name: str, scratch: Scratch) -> F64:
        """One factor's numbers between two ends, as float64, a row for each direction."""
        if self._all is not None:
            columns = self._all[:, first + ends[0] : first + ends[1]]
            return columns if len(numbers) == len(columns) else columns[numbers]  # in order, all are all
        drawn = signs(self._key, numbers.tolist(), first + ends[0], first + ends[1], scratch)
        rows = scratch.array(name, drawn.shape, np.float64)
        np.copyto(rows, drawn)
        return rows


def touching(every: Sequence[Place], supports: Sequence[Support]) -> dict[Place, I64]:
    """The numbers of the directions that touch each tensor, in order. A support that cuts one is refused."""
    require_whole_tensors(every, supports)
    found, starts = {place: list[int]() for place in every}, [place.start for place in every]
    for support, numbers in grouped(supports).items():
        for part, _ in support.parts():
            for place in every[bisect_left(starts, part.start) : bisect_left(starts, part.stop)]:
                found[place] += numbers
    return {place: np.array(sorted(numbers), np.int64) for place, numbers in found.items()}


def require_whole_tensors(every: Sequence[Place], supports: Sequence[Support]) -> None:
    """Refuse supports that hold a part of a tensor."""
    edges = {place.start for place in every} | {place.stop for place in every}
    for support in set(supports):
        for part, _ in support.parts():
            if not {part.start, part.stop} <= edges:
                raise ValueError(
                    f"outer directions touch whole tensors, but weights {part.start} to {part.stop} cut one"
                )
