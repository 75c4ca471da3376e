"""Checks before a run whether σ and the ring are precise enough for the plan's losses, by measuring a few probes."""

import math
from dataclasses import dataclass
from typing import cast

import numpy as np

from baffle.core.arrays import F32
from baffle.core.directions import DISTRIBUTIONS, Directions
from baffle.core.probe import SCHEMES
from baffle.errors import PlanError
from baffle.runtime.model import FLOAT64
from baffle.task.load import Task
from baffle.trajectory import trajectory_of

DIRECTIONS = 8
"""The number of directions that are tried."""

NOISE_REFUSED, NOISE_WARNED, NOISE_WANTED = 0.5, 0.05, 0.01
"""Rounding noise as a share of a typical scalar."""

SIGMAS_IN_HALF = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
"""Values that are tried if half precision needs a larger σ."""

HALVES = ("bfloat16", "float16")
"""Precisions in which a small step vanishes when it is added to a weight."""

QUANTUM_REFUSED = 0.01
"""A step of the ring for a median client, as a share of a typical scalar."""


@dataclass(frozen=True)
class Precision:
    """The result of a few probes at the initial weights."""

    typical: float  # root mean square of a scalar
    noise: float  # the share of a scalar that is rounding in the probe's precision
    sigma_wanted: float  # a σ at which that share would be `noise_wanted`; infinity if there is none
    noise_wanted: float
    quantum: float  # a step of the ring for a median client, as a share of a typical scalar


def measure(task: Task) -> Precision | None:
    """Probe one client's batch as the plan says, and again along the same directions with float64 losses. None for a
    runtime that has no float64 to compare with.

    Rounding noise in float32 falls as 1/σ, which gives the σ that is needed. In half precision a small step also
    vanishes when it is added to the weights, so larger values are tried.
    """
    if FLOAT64 not in task.model.precisions:
        return None
    plan = task.plan
    weights = task.initial_weights()
    trajectory = trajectory_of(plan, len(weights))
    indices = task.shares[0][: plan.federation.batch or None]
    batch = task.source.train.batch(indices)
    directions = Directions(bytes(32), DISTRIBUTIONS[plan.probe.distribution])
    tried = [trajectory.supports[i * plan.probe.k // DIRECTIONS] for i in range(DIRECTIONS)]
    exact_loss = task.runtime(FLOAT64).on(batch)
    rounded_loss = task.runtime().on(batch)

    def noise_at(sigma: float) -> tuple[float, float]:
        """The root mean square of a scalar, and the share of it that is rounding."""
        probe = SCHEMES[plan.probe.scheme]
        with np.errstate(over="ignore", invalid="ignore"):  # the loss may not be finite
            exact = probe(exact_loss, cast(F32, weights.astype(np.float64)), directions, tried, sigma).scalars
            rounded = probe(rounded_loss, weights, directions, tried, sigma).scalars
            typical = max(float(np.sqrt(np.mean(exact**2))), 1e-30)
            return typical, float(np.sqrt(np.mean((rounded - exact) ** 2))) / typical

    typical, noise = noise_at(plan.probe.sigma)
    goal = NOISE_WANTED
    wanted = plan.probe.sigma * noise / goal
    if task.server.precision in HALVES:
        goal = NOISE_WARNED
        larger = [sigma for sigma in SIGMAS_IN_HALF if sigma > plan.probe.sigma]
        enough = (sigma for sigma in larger if noise_at(sigma)[1] <= goal)
        wanted = next(enough, math.inf) if noise > goal else plan.probe.sigma
    weight = trajectory.weight_of(int(np.median([len(share) for share in task.shares])))
    return Precision(
        typical,
        noise,
        wanted,
        goal,
        1 / (trajectory.ring.scale * weight * typical) if plan.outcome_kind == "scalars" else 0.0,
    )


def require_precision(task: Task) -> list[str]:
    """Refuse a plan whose scalars would be noise; return advice if they are merely noisy."""
    if task.plan.estimator == "backprop":
        return []
    precision = measure(task)
    return judge(task, precision) if precision else []


def _remedy(precision: Precision) -> str:
    if math.isinf(precision.sigma_wanted):
        return f'no σ up to {max(SIGMAS_IN_HALF):g} would do; set probe.precision = "float32"'
    return f"to bring it to {precision.noise_wanted:.0%}, use at least {precision.sigma_wanted:.1g}"


def judge(task: Task, precision: Precision) -> list[str]:
    """Refuse a plan that is too imprecise, or return advice."""
    plan = task.plan
    if not math.isfinite(precision.typical + precision.noise):
        return ["the precision of σ could not be measured: the loss is not finite at the initial weights"]
    if precision.noise >= NOISE_REFUSED:
        raise PlanError(
            f"probe.sigma: {plan.probe.sigma:g} is below the precision of the loss: {min(precision.noise, 1):.0%} "
            f"of a scalar would be rounding; {_remedy(precision)}"
        )
    if precision.quantum > QUANTUM_REFUSED:
        raise PlanError(
            f"ring.d_max: {plan.ring.d_max:g} leaves the ring too coarse: a median client's step is "
            f"{precision.quantum:.1%} of a typical scalar ({precision.typical:.3g}), expected at most "
            f"{QUANTUM_REFUSED:.0%}; lower ring.d_max or ring.n_max"
        )
    advice = []
    if precision.noise > NOISE_WARNED:
        advice.append(
            f"probe.sigma = {plan.probe.sigma:g} is small for {plan.probe.precision} losses: {precision.noise:.0%} "
            f"of a scalar is rounding; {_remedy(precision)}"
        )
    if plan.ring.d_max < 5 * precision.typical:
        advice.append(
            f"ring.d_max = {plan.ring.d_max:g} will clip: a typical scalar is {precision.typical:.3g}; "
            f"{20 * precision.typical:.1g} would leave room"
        )
    return advice
