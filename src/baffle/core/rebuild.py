"""The server's half of a round: the gradient from integer totals and a seed, exactly.

A float64 product of at most 128 directions with totals below 2³¹ stays below 2⁵³, where float64 counts every integer;
so a BLAS may add in any order, with any number of threads, and get the same bits. Products are added as int64.

The weights are handled in pieces, and no more numbers are drawn at a time than fit in cache. Beside its result, a
thread needs about 4 MB, however many weights and directions there are.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from baffle.core.arrays import F32, I32, I64
from baffle.core.directions import NUMBERS_AT_ONCE, Directions, Support, blocks, coverage
from baffle.core.ring import Encoding
from baffle.core.seeds import Scratch

EXACT_DIRECTIONS = 128
"""One float64 product holds at most this many directions: 128 · 2³¹ · 17,715 < 2⁵³."""

WEIGHTS_AT_ONCE = 1 << 16
"""The largest piece of the weights that a thread works on at a time."""


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
    gradient = np.zeros(n, dtype=np.int64)
    add = _adder(totals, directions, supports, chunk, block)

    def work(start: int, stop: int, scratch: Scratch) -> None:
        add(start, gradient[start:stop], scratch)

    _in_pieces(work, n, threads, n * len(supports) // block)
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
    add = _adder(totals, directions, supports, EXACT_DIRECTIONS, block)

    def work(start: int, stop: int, scratch: Scratch) -> None:
        exact = scratch.array("exact", (stop - start,), np.int64)
        exact[:] = 0
        add(start, exact, scratch)
        per_weight = np.maximum(coverage(supports, stop, start), 1)
        gradient[start:stop] = exact / (per_weight * scale)

    _in_pieces(work, n, threads, n * len(supports) // block)
    return gradient


def _adder(
    totals: I32, directions: Directions, supports: Sequence[Support], chunk: int, block: int
) -> Callable[[int, I64, Scratch], None]:
    """A function that adds every T_k · z_k to one piece of the sum, given the weight at which the piece begins."""
    if len(totals) != len(supports):
        raise ValueError(f"expected a total per direction ({len(supports)}), got {len(totals)}")
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
                drawn = directions.draw(numbers, start, stop, scratch)
                rows = scratch.array("index", drawn.shape, np.intp).view(np.float64)  # the index is no longer needed
                np.copyto(rows, drawn)
                product = (factors[numbers] @ rows).astype(np.int64)
                for weights, here in support.parts(start, stop):
                    piece[weights.start - begin : weights.stop - begin] += product[here]

    return add


def _in_pieces(work: Callable[[int, int, Scratch], None], n: int, threads: int, most: int) -> None:
    """Call `work` for pieces of the weights from 0 to n, on at most `threads` threads and at most `most`."""
    threads = max(1, min(threads, most))
    count = max(-(-n // WEIGHTS_AT_ONCE), threads)
    left = iter([(n * i // count, n * (i + 1) // count) for i in range(count)])

    def share(_: int) -> None:
        scratch = Scratch()
        for start, stop in left:
            work(start, stop, scratch)

    if threads == 1:
        share(0)
    else:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(share, range(threads)))


def gradient_from_vector(totals: I32, weight: int, ring: Encoding) -> F32:
    """The weighted mean of vectors that clients computed themselves (epoch level, backpropagation)."""
    return (totals.astype(np.float64) / (ring.scale * weight)).astype(np.float32)
