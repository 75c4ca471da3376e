"""How far two sets of numbers can be told apart."""

import numpy as np
from numpy.typing import NDArray

from baffle.core.arrays import F64


def auc(inside: NDArray[np.float64], outside: NDArray[np.float64]) -> float:
    """How often a score of the first kind is above one of the second: 0.5 by chance."""
    a, b = np.ravel(inside), np.sort(np.ravel(outside))
    below, upto = np.searchsorted(b, a, "left"), np.searchsorted(b, a, "right")
    return float(np.mean((below + upto) / 2) / len(b))


def kolmogorov_smirnov(one: F64, other: F64) -> float:
    """The largest difference of two empirical distribution functions; a best threshold is right in (1 + this) / 2 of
    the cases."""
    at = np.concatenate([one, other])
    shares = [np.searchsorted(np.sort(few), at, "right") / len(few) for few in (one, other)]
    return float(np.max(np.abs(shares[0] - shares[1])))
