"""Exact scalars of a gradient, and how well what a server rebuilds from scalars points along that gradient."""

from collections.abc import Sequence

import numpy as np

from baffle.core.arrays import F64
from baffle.core.directions import Directions, Support
from baffle.core.rebuild import gradient_from_scalars
from baffle.core.ring import Ring

CHUNK = 64
"""How many directions are drawn at a time."""


def exact_scalars(directions: Directions, k: int, gradients: F64) -> F64:
    """Products of gradients (one a row) with K directions: K rows, one column for each gradient."""
    n = gradients.shape[1]
    unit = directions.distribution.unit
    parts = [
        directions.draw(range(first, min(first + CHUNK, k)), 0, n).astype(np.float64) @ gradients.T * unit
        for first in range(0, k, CHUNK)
    ]
    return np.concatenate(parts)


def alignment(scalars: F64, directions: Directions, supports: Sequence[Support], gradient: F64) -> float:
    """Cosine of a gradient with the estimate that a server rebuilds from scalars, which pass through the ring on the
    way. Scalars that are all 0 have no direction and count as 0."""
    if not scalars.any():
        return 0.0
    n = len(gradient)
    ring = Ring(clients=1, n_max=1, clip=float(np.abs(scalars).max()))
    totals = ring.decode(ring.encode(scalars, len(scalars), 1, 0.0), 1).totals
    estimate = gradient_from_scalars(totals, 1, directions, supports, n, ring).astype(np.float64)
    return float(estimate @ gradient / (np.linalg.norm(estimate) * np.linalg.norm(gradient)))
