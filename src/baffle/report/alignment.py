"""How well a run's estimates pointed along the gradient: what was to be expected, and what its scalars say.

A round's estimate is the mean of K vectors v_k = D_k·z_k, one a direction, each of which is the gradient g in the mean.
Different directions are independent, so ⟨v_j, v_k⟩ for j ≠ k is |g|² in the mean, whatever noise and curvature
the scalars D_k carry, and

    cos²(estimate, g)  =  |g|² / |estimate|²,      |g|² ≈ mean of ⟨v_j, v_k⟩ over j ≠ k.

One round says little; the sums over many rounds do, and their spread says how little. The gradient is that of the
round's own samples. Where a weight is touched by one direction only, nothing can be said.
"""

import math
from dataclasses import dataclass

import numpy as np

from baffle.core.arrays import F64
from baffle.core.directions import Directions, blocks, coverage
from baffle.core.rebuild import EXACT_DIRECTIONS
from baffle.core.seeds import Scratch
from baffle.journal.store import Journal
from baffle.task.costs import expected_alignment
from baffle.trajectory import Trajectory

MOST_NUMBERS = 150_000_000
"""A report draws at most so many numbers of directions again, which takes a second or two."""

LARGEST_ERROR = 0.5
"""A measurement whose standard error is a larger part of it than this is not shown."""

FEWEST_ROUNDS = 10


@dataclass(frozen=True)
class Alignment:
    """Expected and measured cosine between estimate and gradient, with the measurement's standard error. `missing` says
    why there is no measurement."""

    expected: float | None
    measured: float | None
    error: float | None
    missing: str = ""


def measure_alignment(journal: Journal, trajectory: Trajectory, *, measure: bool = True) -> Alignment:
    plan = trajectory.plan
    if plan.estimator != "probe":
        return Alignment(None, None, None, "backpropagation has the gradient itself")
    expected = expected_alignment(trajectory)
    if not measure:
        return Alignment(expected, None, None, "the run goes on, or it was not asked for")
    if missing := _unmeasurable(trajectory):
        return Alignment(expected, None, None, missing)
    return measured_alignment(expected, _sampled(journal, trajectory))


def _unmeasurable(trajectory: Trajectory) -> str:
    plan = trajectory.plan
    if plan.outcome_kind != "scalars":
        return "the journal holds whole vectors and no scalars"
    if plan.secure.groups > 1:
        return "the round's groups have sums of their own"
    if plan.federation.tiers:
        return "clients of different tiers answer different directions"
    if min(coverage(trajectory.supports, trajectory.n)) < 2:
        return "some weights are touched by one direction a round, or by none"
    return ""


def _sampled(journal: Journal, trajectory: Trajectory) -> F64:
    """|g|² and |estimate|² of rounds at even steps, as many as there is time for."""
    drawn = sum(support.size for support in trajectory.supports)
    length = journal.length()
    step = max(1, math.ceil(length * drawn / MOST_NUMBERS))
    scratch, pairs = Scratch(), list[tuple[float, float]]()
    for entry in journal.entries():
        if entry.round % step:
            continue
        outcome = entry.outcome()
        if outcome.kind == "scalars":
            (group,) = outcome.groups
            scalars = group.numbers() / (trajectory.ring.scale * group.weight)
            pairs.append(squares(scalars, trajectory.directions(group.key), trajectory, scratch))
    return np.array(pairs).reshape(-1, 2)


def squares(scalars: F64, directions: Directions, trajectory: Trajectory, scratch: Scratch) -> tuple[float, float]:
    """An unbiased |g|², and |estimate|², from the scalars of one round."""
    n, unit = trajectory.n, directions.distribution.unit
    total, alone = np.zeros(n), np.zeros(n)
    for numbers, support in blocks(trajectory.supports, most=EXACT_DIRECTIONS):
        wide = max(1, trajectory.block // len(numbers))
        for start in range(0, support.size, wide):
            stop = min(start + wide, support.size)
            rows = directions.over(support, numbers, start, stop, scratch).astype(np.float64) * unit
            summed, squared = scalars[numbers] @ rows, scalars[numbers] ** 2 @ rows**2
            for weights, here in support.parts(start, stop):
                total[weights] += summed[here]
                alone[weights] += squared[here]
    count = coverage(trajectory.supports, n).astype(np.float64)
    gradient = float(((total**2 - alone) / (count * (count - 1))).sum())
    return gradient, float(((total / count) ** 2).sum())


def measured_alignment(expected: float, pairs: F64) -> Alignment:
    """The cosine over all rounds, with the standard error of a ratio of sums."""
    rounds = len(pairs)
    if rounds < FEWEST_ROUNDS:
        return Alignment(expected, None, None, f"it needs at least {FEWEST_ROUNDS} rounds")
    gradient, estimate = pairs.T
    if not estimate.sum() > 0:
        return Alignment(expected, None, None, "every estimate was zero")
    ratio = float(gradient.sum() / estimate.sum())
    spread = float(np.sqrt(((gradient - ratio * estimate) ** 2).sum() * rounds / (rounds - 1)) / estimate.sum())
    if not ratio > 0 or spread > 2 * LARGEST_ERROR * ratio:
        return Alignment(expected, None, None, f"{rounds:,} rounds are too few to tell it from noise")
    cosine = math.sqrt(ratio)
    return Alignment(expected, cosine, spread / (2 * cosine))
