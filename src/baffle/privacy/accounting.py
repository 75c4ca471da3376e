"""What a run gives away, counted: Rényi differential privacy of Skellam noise at integer orders, and (ε, δ) from it.

Neighbours differ by one client: its vector, or zeros. A sum of clipped integer vectors is released with Skellam noise
of variance μ at every coordinate. Nothing is gained from sampling clients or batches: both are public.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from baffle.core.arrays import F64
from baffle.privacy.clipping import bound_l1

ORDERS: F64 = np.arange(2, 2**14 + 1, dtype=np.float64)
"""The orders α that an ε is minimised over. The best order is about 2·ln(1/δ)/ε: the last is best near ε = 0.002."""

GRID = 10_000
"""A multiplier that is computed from a target is a multiple of 1/GRID, so that a plan can show all of it."""

MOST_NOISE = 10**6
"""No target needs a larger multiplier; a sum would have no room for its noise."""


@dataclass(frozen=True)
class Release:
    """`count` sums that were released alike: no client moves one by more than `delta_2` in L2 norm and `delta_1` in L1
    norm, and each coordinate's noise has a variance of at least `mu`, all in ring units."""

    delta_2: int
    delta_1: int
    mu: float
    count: int = 1

    def __post_init__(self) -> None:
        if self.delta_2 < 0 or self.delta_1 < 0 or not self.mu > 0 or self.count < 0:
            raise ValueError(f"bounds and a count from 0 and a variance above 0 are expected, got {self}")


def rdp(alpha: float | F64, delta_2: float, delta_1: float, mu: float) -> float | F64:
    """The Rényi divergence of integer order α between sums with and without one client, at most:

        ε(α) ≤ αΔ₂²/2μ + min(((2α−1)Δ₂² + 6Δ₁)/4μ², 3Δ₁/2μ)

    The first term is that of Gaussian noise; the second is what Skellam costs beyond it, and vanishes as μ grows
    (Agarwal, Kairouz and Liu 2021, arXiv 2110.04995).
    """
    gaussian = alpha * (delta_2**2 / (2 * mu))
    beyond = np.minimum(((2 * alpha - 1) * delta_2**2 + 6 * delta_1) / (4 * mu**2), 3 * delta_1 / (2 * mu))
    return gaussian + beyond


def spent(releases: Iterable[Release], delta: float) -> float:
    """The ε, at δ, of all these releases together: their divergences add up at each order; then the least ε over all
    orders (`convert`)."""
    total = np.zeros_like(ORDERS)
    for release in releases:
        if release.delta_2:
            total += release.count * rdp(ORDERS, release.delta_2, release.delta_1, release.mu)
    return convert(total, delta)


def convert(divergences: F64, delta: float) -> float:
    """ε from the divergence at each of ORDERS: min over α of ε(α) + ln((α−1)/α) − (ln δ + ln α)/(α−1) (Canonne, Kamath
    and Steinke 2020, proposition 12). It is never below 0; if nothing was released, it is 0."""
    if not 0 < delta < 1:
        raise ValueError(f"a delta between 0 and 1 is expected, got {delta}")
    if not divergences.any():
        return 0.0
    less = ORDERS - 1
    epsilons = divergences + np.log1p(-1 / ORDERS) - (math.log(delta) + np.log(ORDERS)) / less
    return max(0.0, float(epsilons.min()))


def epsilon(noise: float, delta: float, rounds: int, *, delta_2: int, dimension: int) -> float:
    """The ε, at δ, of `rounds` sums of vectors of `dimension` integers clipped to `delta_2`, with a noise multiplier of
    `noise` = √μ/Δ₂: that of the sum, with the least noise that honest survivors guarantee."""
    if not rounds or not delta_2:
        return 0.0
    if not noise > 0:
        return math.inf
    mu = float(sum_variance(noise, delta_2))
    return spent([Release(delta_2, bound_l1(delta_2, dimension), mu, rounds)], delta)


def noise_for(target: float, delta: float, rounds: int, *, delta_2: int, dimension: int) -> float:
    """The least noise multiplier, as a multiple of 1/GRID, with which `rounds` sums cost at most `target` at δ."""
    if not target > 0:
        raise ValueError(f"an epsilon above 0 is expected, got {target}")
    if not rounds or not delta_2:
        return 0.0

    def enough(steps: int) -> bool:
        return epsilon(steps / GRID, delta, rounds, delta_2=delta_2, dimension=dimension) <= target

    too_little, sufficient = 0, 1
    while not enough(sufficient):
        too_little, sufficient = sufficient, 2 * sufficient
        if sufficient > MOST_NOISE * GRID:
            raise ValueError(f"no noise up to {MOST_NOISE} times the clipping norm gives an epsilon of {target:g}")
    while sufficient - too_little > 1:
        middle = (too_little + sufficient) // 2
        too_little, sufficient = (too_little, middle) if enough(middle) else (middle, sufficient)
    return sufficient / GRID


def sum_variance(noise: float, delta_2: int) -> Fraction:
    """μ: the variance of the sum's noise at a coordinate, in ring units, that a noise multiplier stands for."""
    return (Fraction(noise) * delta_2) ** 2


def share_variance(mu: Fraction | float, least_survivors: int, colluders: int = 0) -> Fraction:
    """The variance that each client adds, so that the fewest survivors of a sum add up to μ although `colluders` of
    them add nothing. It is exact: `skellam.draw` takes fractions."""
    honest = least_survivors - colluders
    if honest < 1:
        raise ValueError(f"{least_survivors} survivors with {colluders} colluders leave nobody to add noise")
    return Fraction(mu) / honest


def bound_tail(variance: Fraction | float, coordinates: int, failure: float = 2.0**-40) -> int:
    """The least T that this bound gives, with which none of `coordinates` Skellam numbers of this variance is beyond ±T
    except with probability `failure`. A sum of m shares has m times a share's variance.

    A Skellam number X of variance V has ln E[exp(sX)] = V(cosh s − 1). By Markov's inequality, P(X ≥ t) is at most
    exp(V(cosh s − 1) − st) for any s ≥ 0. The best s is asinh(t/V), which gives the exponent

        E(t) = t·asinh(t/V) − (√(V² + t²) − V) = t·asinh(t/V) − t²/(√(V² + t²) + V),

    and E increases in t. X is symmetric, so P(|X| ≥ t) ≤ 2·exp(−E(t)); the union over coordinates gives the rest. The
    integer T + 1 is the least with 2·K·exp(−E(T + 1)) ≤ `failure`, up to a rounding of E on the safe side.
    """
    v = float(variance)
    if not (v >= 0 and coordinates >= 1 and 0 < failure < 1):
        raise ValueError(f"a variance from 0, a coordinate or more and a probability are expected, got {v}")
    if v == 0:
        return 0
    needed = (math.log(2 * coordinates) - math.log(failure)) * (1 + 1e-12)

    def rare(t: int) -> bool:
        return t * math.asinh(t / v) - t * t / (math.hypot(v, t) + v) >= needed

    common, beyond = 0, 1
    while not rare(beyond):
        common, beyond = beyond, 2 * beyond
    while beyond - common > 1:
        middle = (common + beyond) // 2
        common, beyond = (common, middle) if rare(middle) else (middle, beyond)
    return beyond - 1
