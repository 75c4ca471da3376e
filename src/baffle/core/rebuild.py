"""The server's half of a round: the gradient from integer totals and a seed, exactly.

A float64 product of at most 128 directions with totals below 2³¹ stays below 2⁵³, where float64 counts every integer;
so a BLAS may add in any order, with any number of threads, and get the same bits. Pieces are added as int64.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from baffle.core.arrays import F32, I32, I64
from baffle.core.directions import Directions, Support, blocks, coverage
from baffle.core.ring import Ring

EXACT_DIRECTIONS = 128
"""As many directions as one float64 product may hold: 128 · 2³¹ · 17,715 < 2⁵³."""


def rebuild(
    totals: I32,
    directions: Directions,
    supports: Sequence[Support],
    n: int,
    *,
    chunk: int = EXACT_DIRECTIONS,
    threads: int = 1,
) -> I64:
    """G = Σ_k T_k · z_k. Neither `chunk` nor `threads` can change a bit of it."""
    if len(totals) != len(supports):
        raise ValueError(f"expected a total per direction ({len(supports)}), got {len(totals)}")
    if not 1 <= chunk <= EXACT_DIRECTIONS:
        raise ValueError(f"a chunk is 1 to {EXACT_DIRECTIONS} directions, got {chunk}")
    exact = totals.astype(np.float64)

    def share(pieces: list[tuple[range, Support]]) -> I64:
        part = np.zeros(n, dtype=np.int64)
        for numbers, support in pieces:
            rows = directions.draw(numbers, 0, support.size).astype(np.float64)
            product = (exact[numbers.start : numbers.stop] @ rows).astype(np.int64)
            for weights, here in support.parts():
                part[weights] += product[here]
        return part

    pieces = list(blocks(supports, most=chunk))
    if threads == 1:
        return share(pieces)
    with ThreadPoolExecutor(threads) as pool:
        parts = list(pool.map(share, (pieces[i::threads] for i in range(threads))))
    total: I64 = np.add.reduce(parts)
    return total


def gradient_from_scalars(
    totals: I32, weight: int, directions: Directions, supports: Sequence[Support], n: int, ring: Ring
) -> F32:
    """The paper's estimate (eq. 6): the mean over directions of D_k · z_k, with D_k the weighted mean over clients."""
    exact = rebuild(totals, directions, supports, n).astype(np.float64)
    per_weight = np.maximum(coverage(supports, n), 1).astype(np.float64)
    scale = ring.scale * weight * 2.0**directions.distribution.unit_bits
    return (exact / (per_weight * scale)).astype(np.float32)


def gradient_from_vector(totals: I32, weight: int, ring: Ring) -> F32:
    """The weighted mean of vectors that clients computed themselves (epoch level, backpropagation)."""
    return (totals.astype(np.float64) / (ring.scale * weight)).astype(np.float32)
