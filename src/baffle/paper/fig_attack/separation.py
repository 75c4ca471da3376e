"""How far two sets of numbers can be told apart."""

import numpy as np
from numpy.typing import NDArray

from baffle.core.arrays import F64


def auc(inside: NDArray[np.float64], outside: NDArray[np.float64]) -> float:
    """How often a score inside is above a score outside, with ties counted half: 0.5 by chance."""
    scores = np.ravel(inside)
    others = np.sort(np.ravel(outside))
    below = np.searchsorted(others, scores, "left")
    up_to = np.searchsorted(others, scores, "right")
    return float(np.mean((below + up_to) / 2) / len(others))


def kolmogorov_smirnov(one: F64, other: F64) -> float:
    """The largest difference between two empirical distribution functions. The best threshold is right in
    (1 + this) / 2 of the cases."""
    at = np.concatenate([one, other])
    shares = [np.searchsorted(np.sort(values), at, "right") / len(values) for values in (one, other)]
    return float(np.max(np.abs(shares[0] - shares[1])))
