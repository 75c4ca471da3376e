"""The server's half of a round: the gradient from integer totals and a seed, exactly.

A float64 product of at most 128 directions with totals below 2³¹ stays below 2⁵³, where float64 counts every integer;
so a BLAS may add in any order, with any number of threads, and get the same bits. Products are added as int64.

The weights are handled in pieces, and no more numbers are drawn at a time than fit in cache. Beside its result, a
thread needs about 4 MB, however many weights and directions there are. Outer directions have a quicker way, which
`baffle.core.products` describes, to the same numbers.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np

from baffle.core.arrays import F32, I32, I64
from baffle.core.blas import one_blas_thread
from baffle.core.directions import NUMBERS_AT_ONCE, Directions, Support, blocks, coverage
from baffle.core.products import OuterSum, Tile, tiles
from baffle.core.ring import Encoding
from baffle.core.seeds import Scratch

EXACT_DIRECTIONS = 128
"""One float64 product holds at most this many directions: 128 · 2³¹ · 17,715 < 2⁵³."""

WEIGHTS_AT_ONCE = 1 << 16
"""The largest piece of the weights that a thread works on at a time."""

OUTER_GAIN = 16
"""Outer directions are summed about this many times quicker, so it takes more of them to be worth a thread."""


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
    """G = Σ_k T_k · z_k. No bit of it depends on `chunk` (directions in a product), `block` (numbers drawn at a time)
    or `threads`."""
    _require_totals(totals, supports)
    gradient = np.zeros(n, dtype=np.int64)
    add = _adder(totals, directions, supports, chunk, block)

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
    _require_totals(totals, supports)
    scale = ring.scale * weight * 2.0**directions.distribution.unit_bits
    gradient = np.empty(n, dtype=np.float32)
    if directions.distribution.shapes:
        _fill_tiles(gradient, scale, totals, directions, supports, block, threads)
    else:
        _fill_pieces(gradient, scale, totals, directions, supports, block, threads)
    return gradient


def _fill_pieces(
    gradient: F32,
    scale: float,
    totals: I32,
    directions: Directions,
    supports: Sequence[Support],
    block: int,
    threads: int,
) -> None:
    """Write G / (scale · the directions that touch a weight)."""
    add = _adder(totals, directions, supports, EXACT_DIRECTIONS, block)

    def work(piece: tuple[int, int], scratch: Scratch) -> None:
        start, stop = piece
        exact = scratch.array("exact", (stop - start,), np.int64)
        exact[:] = 0
        add(start, exact, scratch)
        per_weight = np.maximum(coverage(supports, stop, start), 1)
        gradient[start:stop] = exact / (per_weight * scale)

    threads = _useful(threads, len(gradient) * len(supports) // block)
    _share_out(work, _pieces(len(gradient), threads), threads)


def _fill_tiles(
    gradient: F32,
    scale: float,
    totals: I32,
    directions: Directions,
    supports: Sequence[Support],
    block: int,
    threads: int,
) -> None:
    """The same for outer directions."""
    outer = OuterSum(totals, directions, supports, len(gradient), block=block)

    def work(tile: Tile, scratch: Scratch) -> None:
        per_weight = max(outer.coverage(tile), 1)
        np.divide(outer.over(tile, scratch), per_weight * scale, out=tile.of(gradient), casting="same_kind")

    threads = _useful(threads, len(gradient) * len(supports) // (block * OUTER_GAIN))
    with one_blas_thread():
        _share_out(work, tiles(directions, block), threads)


def _adder(
    totals: I32, directions: Directions, supports: Sequence[Support], chunk: int, block: int
) -> Callable[[int, I64, Scratch], None]:
    """A function that adds every T_k · z_k to one piece of the sum, given the weight at which the piece begins."""
    if not 1 <= chunk <= EXACT_DIRECTIONS:
        raise ValueError(f"a chunk is 1 to {EXACT_DIRECTIONS} directions, got {chunk}")
    chunks = list(blocks(supports, most=chunk))
    factors = totals.astype(np.float64)

    def add(begin: int, piece: I64, scratch: Scratch) -> None:
        for numbers, support in chunks:
            last = support.below(begin + len(piece))
            wide = max(1, block // len(numbers))
            for start in range(support.below(begin), last, wide):
                stop = min(start + wide, last)
                drawn = directions.over(support, numbers, start, stop, scratch)
                rows = scratch.array("index", drawn.shape, np.intp).view(np.float64)  # the index is no longer needed
                np.copyto(rows, drawn)
                product = (factors[numbers] @ rows).astype(np.int64)
                for weights, here in support.parts(start, stop):
                    piece[weights.start - begin : weights.stop - begin] += product[here]

    return add


def _require_totals(totals: I32, supports: Sequence[Support]) -> None:
    if len(totals) != len(supports):
        raise ValueError(f"expected a total per direction ({len(supports)}), got {len(totals)}")


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


def gradient_from_vector(totals: I32, weight: int, ring: Encoding) -> F32:
    """The weighted mean of vectors that clients computed themselves (epoch level, backpropagation)."""
    return (totals.astype(np.float64) / (ring.scale * weight)).astype(np.float32)
