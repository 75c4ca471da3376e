"""Privacy accounting: the Rényi differential privacy of Skellam noise at integer orders, (ε, δ) from it, and a client's
ledger: what all of its runs have cost so far, and what its budget still allows.

Neighbours differ by one client: its vector, or zeros. A sum of clipped integer vectors is released with Skellam noise
of variance μ at every coordinate. Sampling clients or batches gains nothing here, because both are public.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from baffle.core.arrays import F64
from baffle.errors import RefusalError

ORDERS: F64 = np.arange(2, 2**14 + 1, dtype=np.float64)
"""The orders α that an ε is minimised over. The best order is about 2·ln(1/δ)/ε: the last is best near ε = 0.002."""

GRID = 10_000  # a multiplier that is computed from a target is a multiple of 1/GRID, so that a plan can show all of it
MOST_NOISE = 10**6  # the largest multiplier that a target may need. With more noise, a sum would not fit into the ring


@dataclass(frozen=True)
class Release:
    """`count` sums with the same bounds: no client changes a sum by more than `delta_2` in L2 norm and `delta_1` in L1
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
    """The ε, at δ, of all these releases together: their divergences add up at each order, and ε is the least of
    ε(α) + ln((α−1)/α) − (ln δ + ln α)/(α−1) over all orders α (Canonne, Kamath and Steinke 2020, proposition 12). It is
    never below 0; if nothing was released, it is 0."""
    if not 0 < delta < 1:
        raise ValueError(f"a delta between 0 and 1 is expected, got {delta}")
    total = np.zeros_like(ORDERS)
    for release in releases:
        if release.delta_2:
            total += release.count * rdp(ORDERS, release.delta_2, release.delta_1, release.mu)
    if not total.any():
        return 0.0
    epsilons = total + np.log1p(-1 / ORDERS) - (math.log(delta) + np.log(ORDERS)) / (ORDERS - 1)
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


def bound_l1(delta_2: int, dimension: int) -> int:
    """Δ₁: the largest L1 norm of `dimension` integers whose L2 norm is at most Δ₂, min(√d·Δ₂, Δ₂²), rounded up. The
    second term is smaller when Δ₂ < √d: |q| ≤ q² for integers."""
    if delta_2 < 0 or dimension < 1:
        raise ValueError(f"a bound from 0 and a dimension from 1 are expected, got {delta_2} and {dimension}")
    square = dimension * delta_2**2
    return min(math.isqrt(square - 1) + 1 if square else 0, delta_2**2)


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
    """μ: the variance of the noise at a coordinate of the sum, in ring units, for a noise multiplier."""
    return (Fraction(noise) * delta_2) ** 2


@dataclass(frozen=True)
class Budget:
    """All private runs together may cost no more than this ε at this δ."""

    epsilon: float
    delta: float


@dataclass(frozen=True)
class Charge:
    """The cost of one vector, and the client's budget if it has one."""

    release: Release
    budget: Budget | None = None


class Ledger:
    """The vectors that one client has paid for. Vectors of the same cost are counted together."""

    def __init__(self) -> None:
        self._counts: dict[Release, int] = {}

    def add(self, release: Release) -> None:
        one = replace(release, count=1)
        self._counts[one] = self._counts.get(one, 0) + release.count

    def releases(self) -> list[Release]:
        return [replace(release, count=count) for release, count in self._counts.items()]

    def epsilon(self, delta: float, *more: Release) -> float:
        """The cost of all vectors so far together with these."""
        return spent([*self.releases(), *more], delta)

    def require(self, charge: Charge) -> None:
        """Refuse a vector that the budget does not allow."""
        budget = charge.budget
        if budget is None:
            return
        before, after = self.epsilon(budget.delta), self.epsilon(budget.delta, charge.release)
        if after > budget.epsilon:
            raise RefusalError(
                f"this client's budget is spent: its vectors of all runs have cost ε = {before:.4g} at "
                f"δ = {budget.delta:g}, one more would make it {after:.4g}, and most_epsilon is {budget.epsilon:g}"
            )
