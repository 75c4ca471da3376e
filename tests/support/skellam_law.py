"""Skellam's law by another way than the sampler's: Bessel functions, instead of two Poisson laws."""

import math

import numpy as np

from baffle.core.arrays import F64


def skellam_logs(variance: float, reach: int) -> F64:
    """ln P(x), x = 0 … reach, of Skellam noise, by Miller's backward recurrence for Bessel's I: all terms positive,
    so that even the smallest is right to a few bits."""
    ratios = np.zeros(reach + 200)  # I(n+1)/I(n)
    for n in range(len(ratios) - 2, -1, -1):
        ratios[n] = 1 / (2 * (n + 1) / variance + ratios[n + 1])
    logs = np.concatenate([[0.0], np.cumsum(np.log(ratios[:reach]))])
    two_sided = np.exp(logs).sum() * 2 - 1
    whole: F64 = logs - math.log(two_sided)
    return whole
