"""Whether a plan's σ and ring can carry what its losses say: measured on the task itself, before a run starts."""

from dataclasses import dataclass
from typing import cast

import numpy as np
import torch

from baffle.app.task import Task
from baffle.core.arrays import F32
from baffle.core.directions import DISTRIBUTIONS, Directions
from baffle.core.probe import SCHEMES
from baffle.errors import NotFiniteError, PlanError
from baffle.trajectory import trajectory

DIRECTIONS = 8
"""How many directions are tried."""

NOISE_REFUSED, NOISE_WARNED, NOISE_WANTED = 0.5, 0.05, 0.01
"""Rounding noise as a share of a typical scalar."""

QUANTUM_REFUSED = 0.01
"""A median client's step of the ring as a share of a typical scalar."""


@dataclass(frozen=True)
class Precision:
    """What a few probes at the initial weights show."""

    typical: float  # root mean square of a scalar
    noise: float  # share of it that is rounding in float32
    sigma_wanted: float  # smallest σ at which that share would be 1 %
    quantum: float  # a median client's step of the ring, as a share of a typical scalar


def measure(task: Task) -> Precision:
    """Probe one client's batch with float32 losses and, along the same directions, with float64 ones."""
    plan, weights = task.plan, task.initial_weights()
    course = trajectory(plan, len(weights))
    indices = task.shares[0][: plan.federation.batch or None]
    batch = task.source.train.batch(indices)
    directions = Directions(bytes(32), DISTRIBUTIONS[plan.probe.distribution])
    tried = [course.supports[i * plan.probe.k // DIRECTIONS] for i in range(DIRECTIONS)]

    def scalars(dtype: torch.dtype, at: F32) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        loss = task.runtime(dtype).on(batch)
        return SCHEMES[plan.probe.scheme](loss, at, directions, tried, plan.probe.sigma).scalars

    exact = scalars(torch.float64, cast(F32, weights.astype(np.float64)))
    error = float(np.sqrt(np.mean((scalars(torch.float32, weights) - exact) ** 2)))
    typical = max(float(np.sqrt(np.mean(exact**2))), 1e-30)
    weight = course.weight_of(int(np.median([len(share) for share in task.shares])))
    return Precision(
        typical,
        error / typical,
        plan.probe.sigma * error / typical / NOISE_WANTED,
        1 / (course.ring.scale * weight * typical) if plan.outcome_kind == "scalars" else 0.0,
    )


def require_precision(task: Task) -> list[str]:
    """Refuse a plan whose scalars would be noise; give advice where they are merely noisy."""
    if task.plan.estimator == "backprop":
        return []
    try:
        found = measure(task)
    except NotFiniteError as fault:
        return [f"the precision of σ could not be measured: {fault}"]
    return judge(task, found)


def judge(task: Task, found: Precision) -> list[str]:
    plan = task.plan
    if found.noise >= NOISE_REFUSED:
        raise PlanError(
            f"probe.sigma: {plan.probe.sigma:g} is below the precision of the loss: {min(found.noise, 1):.0%} "
            f"of a scalar would be rounding; use at least {found.sigma_wanted:.1g}"
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
            f"probe.sigma = {plan.probe.sigma:g} is small for float32 losses: {found.noise:.0%} of a scalar is "
            f"rounding; {found.sigma_wanted:.1g} would bring it to 1 %"
        )
    if plan.ring.d_max < 5 * found.typical:
        advice.append(
            f"ring.d_max = {plan.ring.d_max:g} will clip: a typical scalar is {found.typical:.3g}; "
            f"{20 * found.typical:.1g} would leave room"
        )
    return advice
