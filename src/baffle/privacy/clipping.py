"""A bound on what one client can add to a sum, checked in integers, where no rounding can break it."""

from math import isqrt

import numpy as np

from baffle.core.arrays import I64

LARGEST = 2**31
"""The largest entry and the largest bound: their product fits in 63 bits."""


def clip_encoded(vector: I64, delta_2: int) -> I64:
    """The vector itself if its L2 norm is at most `delta_2`, else shrunk to that, each entry rounded toward zero.

    Each |q| becomes ⌊|q|·Δ₂ / ⌈‖q‖⌉⌋, all in integers. So the new norm is at most Δ₂·‖q‖ / ⌈‖q‖⌉ ≤ Δ₂, exactly, and
    clipping twice is clipping once.
    """
    if not 0 <= delta_2 <= LARGEST:
        raise ValueError(f"a bound of 0 to 2³¹ is expected, got {delta_2}")
    squared = squared_norm(vector)
    if squared <= delta_2**2:
        return vector.copy()
    norm = isqrt(squared - 1) + 1  # rounded up
    shrunk: I64 = np.sign(vector) * (np.abs(vector) * delta_2 // norm)
    return shrunk


def squared_norm(vector: I64) -> int:
    """‖q‖₂² as an exact integer. Entries are split into 16 low bits and the rest, so that no sum overflows."""
    if len(vector) and not -LARGEST <= int(vector.min()) <= int(vector.max()) <= LARGEST:
        raise ValueError("entries within ±2³¹ are expected; a vector is clipped after it is encoded")
    size = np.abs(vector)
    high, low = size >> 16, size & 0xFFFF
    return (int(high @ high) << 32) + (int(high @ low) << 17) + int(low @ low)


def bound_l1(delta_2: int, dimension: int) -> int:
    """Δ₁: the largest L1 norm of `dimension` integers whose L2 norm is at most Δ₂, min(√d·Δ₂, Δ₂²), rounded up. The
    second term is smaller when Δ₂ < √d: |q| ≤ q² for integers."""
    if delta_2 < 0 or dimension < 1:
        raise ValueError(f"a bound from 0 and a dimension from 1 are expected, got {delta_2} and {dimension}")
    square = dimension * delta_2**2
    return min(isqrt(square - 1) + 1 if square else 0, delta_2**2)
