"""Whether a plan's σ and ring can carry what its losses say: measured on the task itself, before a run starts."""

import math
from dataclasses import dataclass
from typing import cast

import numpy as np

from baffle.core.arrays import F32
from baffle.core.directions import DISTRIBUTIONS, Directions
from baffle.core.probe import SCHEMES
from baffle.errors import NotFiniteError, PlanError
from baffle.runtime.model import FLOAT64
from baffle.task.load import Task
from baffle.trajectory import trajectory_of

DIRECTIONS = 8
"""How many directions are tried."""

NOISE_REFUSED, NOISE_WARNED, NOISE_WANTED = 0.5, 0.05, 0.01
"""Rounding noise as a share of a typical scalar."""

SIGMAS_IN_HALF = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
"""What is tried where half precision needs a larger σ."""

HALVES = ("bfloat16", "float16")
"""Precisions in which a small step vanishes when it is added to a weight."""

QUANTUM_REFUSED = 0.01
"""A median client's step of the ring as a share of a typical scalar."""


@dataclass(frozen=True)
class Precision:
    """What a few probes at the initial weights show."""

    typical: float  # root mean square of a scalar
    noise: float  # share of it that is rounding in the probe's precision
    sigma_wanted: float  # a σ at which that share would be `noise_wanted`, or infinity
    noise_wanted: float
    quantum: float  # a median client's step of the ring, as a share of a typical scalar


def measure(task: Task) -> Precision | None:
    """Probe one client's batch as the plan says and, along the same directions, with float64 losses. None for a runtime
    that has no float64 to compare with.

    Rounding in float32 falls as 1/σ, so the σ that is wanted follows. In half precision a small step also vanishes when
    it is added to the weights, so larger ones are tried.
    """
    if FLOAT64 not in task.model.precisions:
        return None
    plan, weights = task.plan, task.initial_weights()
    trajectory = trajectory_of(plan, len(weights))
    indices = task.shares[0][: plan.federation.batch or None]
    batch = task.source.train.batch(indices)
    directions = Directions(bytes(32), DISTRIBUTIONS[plan.probe.distribution])
    tried = [trajectory.supports[i * plan.probe.k // DIRECTIONS] for i in range(DIRECTIONS)]

    exact, rounded = task.runtime(FLOAT64).on(batch), task.runtime().on(batch)

    def noise_at(sigma: float) -> tuple[float, float]:
        """The root mean square of a scalar, and the share of it that is rounding."""
        probe = SCHEMES[plan.probe.scheme]
        right = probe(exact, cast(F32, weights.astype(np.float64)), directions, tried, sigma).scalars
        found = probe(rounded, weights, directions, tried, sigma).scalars
        typical = max(float(np.sqrt(np.mean(right**2))), 1e-30)
        return typical, float(np.sqrt(np.mean((found - right) ** 2))) / typical

    typical, noise = noise_at(plan.probe.sigma)
    wanted, goal = plan.probe.sigma * noise / NOISE_WANTED, NOISE_WANTED
    if task.server.precision in HALVES:
        goal, larger = NOISE_WARNED, [sigma for sigma in SIGMAS_IN_HALF if sigma > plan.probe.sigma]
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
    """Refuse a plan whose scalars would be noise; give advice where they are merely noisy."""
    if task.plan.estimator == "backprop":
        return []
    try:
        found = measure(task)
    except NotFiniteError as fault:
        return [f"the precision of σ could not be measured: {fault}"]
    return judge(task, found) if found else []


def _remedy(found: Precision) -> str:
    if math.isinf(found.sigma_wanted):
        return f'no σ up to {max(SIGMAS_IN_HALF):g} would do; set probe.precision = "float32"'
    return f"to bring it to {found.noise_wanted:.0%}, use at least {found.sigma_wanted:.1g}"


def judge(task: Task, found: Precision) -> list[str]:
    plan = task.plan
    if found.noise >= NOISE_REFUSED:
        raise PlanError(
            f"probe.sigma: {plan.probe.sigma:g} is below the precision of the loss: {min(found.noise, 1):.0%} "
            f"of a scalar would be rounding; {_remedy(found)}"
        )
    if found.quantum > QUANTUM_REFUSED:
        raise PlanError(
            f"ring.d_max: {plan.ring.d_max:g} leaves the ring too coarse: a median client's step is "
            f"{found.quantum:.1%} of a typical scalar ({found.typical:.3g}), expected at most "
            f"{QUANTUM_REFUSED:.0%}; lower ring.d_max or ring.n_max"
        )
    advice = []
    if found.noise > NOISE_WARNED:
        advice.append(
            f"probe.sigma = {plan.probe.sigma:g} is small for {plan.probe.precision} losses: {found.noise:.0%} of a "
            f"scalar is rounding; {_remedy(found)}"
        )
    if plan.ring.d_max < 5 * found.typical:
        advice.append(
            f"ring.d_max = {plan.ring.d_max:g} will clip: a typical scalar is {found.typical:.3g}; "
            f"{20 * found.typical:.1g} would leave room"
        )
    return advice
