"""The server's half of a round: the gradient from integer totals and a seed, exactly.

A float64 product of at most 128 directions with totals below 2³¹ stays below 2⁵³, where float64 counts every integer;
so a BLAS may add in any order, with any number of threads, and get the same bits. Products are added as int64.

The weights are handled in pieces, and no more numbers are drawn at a time than fit in cache. Beside its result, a
thread needs about 4 MB, however many weights and directions there are.

Outer directions have a quicker way to the same numbers: Σ_k T_k a_k b_kᵀ is a matrix product. Every term of an entry is
± T_k, so all partial sums stay within Σ|T_k|. Directions whose totals together reach 2⁵³ are divided among several
products. Their weights are handled in tiles: some rows and columns of one tensor. All factors are drawn at once if they
are few, and else for each tile alone.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from baffle.core.arrays import F32, F64, I32, I64
from baffle.core.blas import one_blas_thread
from baffle.core.directions import NUMBERS_AT_ONCE, Directions, Support, blocks, coverage, grouped
from baffle.core.outer import Place, places, size_of
from baffle.core.ring import Encoding
from baffle.core.seeds import Scratch, signs

EXACT_SUM = 1 << 53  # below this, float64 counts every integer
EXACT_DIRECTIONS = 128  # one float64 product holds at most this many directions: 128 · 2³¹ · 17,715 < 2⁵³
WEIGHTS_AT_ONCE = 1 << 16  # the largest piece of the weights that a thread works on at a time
COLUMNS_AT_ONCE = 1 << 12  # the width of the widest tile

OUTER_GAIN = 16
"""Outer directions are summed about this many times quicker, so it takes more of them to be worth a thread."""


@dataclass(frozen=True)
class Terms:
    """The terms T_k · z_k of a sum, and how many numbers of z_k are drawn at a time."""

    totals: I32
    directions: Directions
    supports: Sequence[Support]
    block: int

    def __post_init__(self) -> None:
        if len(self.totals) != len(self.supports):
            raise ValueError(f"expected a total per direction ({len(self.supports)}), got {len(self.totals)}")


def rebuild(
    totals: I32,
    directions: Directions,
    supports: Sequence[Support],
    n: int,
    *,
    chunk: int = EXACT_DIRECTIONS,
    block: int = NUMBERS_AT_ONCE,
    threads: int = 1,
) -> I64:
    """G = Σ_k T_k · z_k. No bit of it depends on `chunk` (directions in a product), `block` or `threads`."""
    gradient = np.zeros(n, dtype=np.int64)
    add = _adder(Terms(totals, directions, supports, block), chunk)

    def work(piece: tuple[int, int], scratch: Scratch) -> None:
        add(piece[0], gradient[slice(*piece)], scratch)

    threads = _useful(threads, n * len(supports) // block)
    _share_out(work, _pieces(n, threads), threads)
    return gradient


def gradient_from_scalars(
    totals: I32,
    weight: int,
    directions: Directions,
    supports: Sequence[Support],
    n: int,
    ring: Encoding,
    *,
    block: int = NUMBERS_AT_ONCE,
    threads: int = 1,
) -> F32:
    """The paper's estimate (eq. 6): the mean over directions of D_k · z_k, with D_k the weighted mean over clients."""
    scale = ring.scale * weight * 2.0**directions.distribution.unit_bits
    gradient = np.empty(n, dtype=np.float32)
    fill = _fill_tiles if directions.distribution.shapes else _fill_pieces
    fill(gradient, scale, Terms(totals, directions, supports, block), threads)
    return gradient


def gradient_from_vector(totals: I32, weight: int, ring: Encoding) -> F32:
    """The weighted mean of vectors that clients computed themselves (epoch level, backpropagation)."""
    return (totals.astype(np.float64) / (ring.scale * weight)).astype(np.float32)


def _fill_pieces(gradient: F32, scale: float, terms: Terms, threads: int) -> None:
    """Write G / (scale · the directions that touch a weight)."""
    add = _adder(terms, EXACT_DIRECTIONS)

    def work(piece: tuple[int, int], scratch: Scratch) -> None:
        start, stop = piece
        exact = scratch.array("exact", (stop - start,), np.int64)
        exact[:] = 0
        add(start, exact, scratch)
        per_weight = np.maximum(coverage(terms.supports, stop, start), 1)
        gradient[start:stop] = exact / (per_weight * scale)

    threads = _useful(threads, len(gradient) * len(terms.supports) // terms.block)
    _share_out(work, _pieces(len(gradient), threads), threads)


def _fill_tiles(gradient: F32, scale: float, terms: Terms, threads: int) -> None:
    """The same for outer directions."""
    outer = OuterSum(terms, len(gradient))

    def work(tile: Tile, scratch: Scratch) -> None:
        per_weight = max(outer.coverage(tile), 1)
        np.divide(outer.over(tile, scratch), per_weight * scale, out=tile.of(gradient), casting="same_kind")

    threads = _useful(threads, len(gradient) * len(terms.supports) // (terms.block * OUTER_GAIN))
    with one_blas_thread():
        _share_out(work, tiles(terms.directions, terms.block), threads)


def _adder(terms: Terms, chunk: int) -> Callable[[int, I64, Scratch], None]:
    """A function that adds every T_k · z_k to one piece of the sum, given the weight at which the piece begins."""
    if not 1 <= chunk <= EXACT_DIRECTIONS:
        raise ValueError(f"a chunk is 1 to {EXACT_DIRECTIONS} directions, got {chunk}")
    chunks = list(blocks(terms.supports, most=chunk))
    factors = terms.totals.astype(np.float64)

    def add(begin: int, piece: I64, scratch: Scratch) -> None:
        for numbers, support in chunks:
            last = support.below(begin + len(piece))
            wide = max(1, terms.block // len(numbers))
            for start in range(support.below(begin), last, wide):
                stop = min(start + wide, last)
                drawn = terms.directions.over(support, numbers, start, stop, scratch)
                rows = scratch.array("index", drawn.shape, np.intp).view(np.float64)  # the index is no longer needed
                np.copyto(rows, drawn)
                product = (factors[numbers] @ rows).astype(np.int64)
                for weights, here in support.parts(start, stop):
                    piece[weights.start - begin : weights.stop - begin] += product[here]

    return add


def _useful(threads: int, blocks_of_work: int) -> int:
    """No more threads than blocks of work, and at least one."""
    return max(1, min(threads, blocks_of_work))


def _pieces(n: int, threads: int) -> list[tuple[int, int]]:
    """The weights from 0 to n in equal pieces, at least one for each thread."""
    count = max(-(-n // WEIGHTS_AT_ONCE), threads)
    return [(n * i // count, n * (i + 1) // count) for i in range(count)]


Part = TypeVar("Part")


def _share_out(work: Callable[[Part, Scratch], None], parts: Sequence[Part], threads: int) -> None:
    """Call `work` for every part, on so many threads."""
    left = iter(list(parts))

    def share(_: int) -> None:
        scratch = Scratch()
        for part in left:
            work(part, scratch)

    if threads == 1:
        share(0)
    else:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(share, range(threads)))


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

    def __init__(self, terms: Terms, n: int, limit: int = EXACT_SUM) -> None:
        shapes = terms.directions.distribution.shapes
        if size_of(shapes) != n:
            raise ValueError(f"expected tensors of {n} weights, got {size_of(shapes)}")
        self._key, self._block, self._limit = terms.directions.key, terms.block, limit
        self._totals = terms.totals.astype(np.int64)
        every = places(shapes)
        self._touching = touching(every, terms.supports)
        self._all: F64 | None = None
        count = every[-1].number + every[-1].rows + every[-1].columns
        if count * len(self._totals) <= 2 * self._block:
            self._all = signs(self._key, range(len(self._totals)), 0, count).astype(np.float64)

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
            return columns if len(numbers) == len(columns) else columns[numbers]  # `numbers` is sorted
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
                cut = f"weights {part.start} to {part.stop} cut one"
                raise ValueError(f"outer directions touch whole tensors, but {cut}")
