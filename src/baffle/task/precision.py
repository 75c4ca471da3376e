"""Checks before a run whether σ and the ring are precise enough for the plan's losses, by measuring a few probes."""

import math
from dataclasses import dataclass, replace
from typing import cast

import numpy as np

from baffle.core.arrays import F32, F64
from baffle.core.directions import Directions, Support
from baffle.core.ports import Batch
from baffle.core.probe import SCHEMES
from baffle.errors import PlanError
from baffle.runtime.model import FLOAT64
from baffle.task.load import Task
from baffle.task.window import TOLERANCE, find_window, rms
from baffle.trajectory import Trajectory, distribution, trajectory_of

DIRECTIONS = 8
"""The number of directions that are tried."""

NOISE_REFUSED, NOISE_WARNED, NOISE_WANTED = 0.5, 0.05, 0.01
"""Rounding noise as a share of a typical scalar."""

SIGMAS_IN_HALF = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
"""Values that are tried if half precision needs a larger σ."""

HALVES = ("bfloat16", "float16")
"""Precisions in which a small step vanishes when it is added to a weight."""

CURVATURE_WARNED = 0.5
"""The change of a scalar by curvature, as a share of the derivative."""

STEPS_TRIED = (1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
DIRECTIONS_OVER_STEPS = 4
"""Steps and directions that are tried where there is no float64 to compare with."""

LEAST_SIGMA = 1e-6
"""No smaller σ is recommended because of curvature."""

TINY = 1e-6
"""A step that measures derivatives in float64."""

NOTHING = 1e-30
"""A typical scalar if no probe changes the loss."""

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
    curvature: float = 0.0  # how much the loss's curvature changes a scalar, as a share of the derivative
    sigma_most: float = math.inf  # a σ at which that would be a tenth


def measure(task: Task) -> Precision | None:
    """Probe one client's batch as the plan says, at the initial weights, and find out how much of a scalar is rounding
    and how much curvature. None for a loss that no step measures a derivative of."""
    plan = task.plan
    weights = task.initial_weights()
    trajectory = trajectory_of(plan, len(weights))
    batch = task.source.train.batch(task.shares[0][: plan.federation.batch or None])
    found = (_against_float64 if FLOAT64 in task.model.precisions else _over_steps)(task, trajectory, weights, batch)
    if found is None or plan.outcome_kind != "scalars":
        return found
    weight = trajectory.weight_of(int(np.median([len(share) for share in task.shares])))
    return replace(found, quantum=1 / (trajectory.ring.scale * weight * found.typical))


def _over_steps(task: Task, trajectory: Trajectory, weights: F32, batch: Batch) -> Precision | None:
    """Without float64: compare the scalars at steps of many sizes."""
    plan = task.plan
    sigma, steps = plan.probe.sigma, sorted({plan.probe.sigma, *STEPS_TRIED})
    loss, probe = task.runtime().on(batch), SCHEMES[plan.probe.scheme]
    window = find_window(loss, weights, probe, *_few(trajectory, DIRECTIONS_OVER_STEPS), steps)
    if not window.smooth:
        return None
    error, below = window.errors[sigma], sigma < window.middle
    noise, curvature = (error, 0.0) if below else (0.0, error)
    wanted = window.low * TOLERANCE / NOISE_WANTED  # rounding falls as 1/σ
    return Precision(window.typical, noise, wanted, NOISE_WANTED, 0.0, curvature, window.high)


def _few(trajectory: Trajectory, count: int) -> tuple[Directions, list[Support]]:
    """So many directions, spread over those of a round."""
    plan = trajectory.plan
    directions = Directions(bytes(32), distribution(plan.probe))
    return directions, [trajectory.supports[i * plan.probe.k // count] for i in range(count)]


def _against_float64(task: Task, trajectory: Trajectory, weights: F32, batch: Batch) -> Precision:
    """Probe along the same directions with losses in the plan's precision and in float64.

    Rounding noise in float32 falls as 1/σ, which gives the σ that is needed. In half precision a small step also
    vanishes when it is added to the weights, so larger values are tried. Curvature is what changes with the step in
    float64.
    """
    plan = task.plan
    directions, tried = _few(trajectory, DIRECTIONS)
    exact_loss = task.runtime(FLOAT64).on(batch)
    rounded_loss = task.runtime().on(batch)

    def noise_at(sigma: float) -> tuple[float, float]:
        """The root mean square of a scalar, and the share of it that is rounding."""
        probe = SCHEMES[plan.probe.scheme]
        with np.errstate(over="ignore", invalid="ignore"):  # the loss may not be finite
            exact = probe(exact_loss, cast(F32, weights.astype(np.float64)), directions, tried, sigma).scalars
            rounded = probe(rounded_loss, weights, directions, tried, sigma).scalars
            typical = max(float(np.sqrt(np.mean(exact**2))), NOTHING)
            return typical, float(np.sqrt(np.mean((rounded - exact) ** 2))) / typical

    def derivatives_at(step: float) -> F64:
        with np.errstate(over="ignore", invalid="ignore"):
            exact = cast(F32, weights.astype(np.float64))
            return SCHEMES[plan.probe.scheme](exact_loss, exact, directions, tried, step).scalars

    def curvature_at(sigma: float) -> float:
        """How far scalars are from those of a tiny step, which are derivatives in float64, as a share."""
        near = derivatives_at(min(sigma / 10, TINY))
        return rms(derivatives_at(sigma) - near) / rms(near) if rms(near) > 0 else math.inf

    typical, noise = noise_at(plan.probe.sigma)
    curvature, most = curvature_at(plan.probe.sigma), plan.probe.sigma
    if curvature > CURVATURE_WARNED and not curvature_at(10 * TINY) < TOLERANCE:
        curvature = 0.0  # a loss that moves in steps has no derivatives that scalars could differ from
    while curvature > CURVATURE_WARNED and most > LEAST_SIGMA and curvature_at(most) > TOLERANCE:
        most /= 10
    goal = NOISE_WANTED
    wanted = plan.probe.sigma * noise / goal
    if task.server.precision in HALVES:
        goal = NOISE_WARNED
        larger = [sigma for sigma in SIGMAS_IN_HALF if sigma > plan.probe.sigma]
        enough = (sigma for sigma in larger if noise_at(sigma)[1] <= goal)
        wanted = next(enough, math.inf) if noise > goal else plan.probe.sigma
    return Precision(typical, noise, wanted, goal, 0.0, curvature, most)


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
    if precision.typical <= NOTHING and precision.quantum:
        raise PlanError(
            f"probe.sigma: {plan.probe.sigma:g} is too small: none of {DIRECTIONS} probes changed the loss, as happens "
            "with a loss that moves in steps; a larger one may help"
        )
    if precision.quantum > QUANTUM_REFUSED:
        bound, lower, given = "ring.d_max", "ring.d_max or ring.n_max", plan.ring.d_max
        if plan.privacy.on:
            bound, lower, given = "privacy.clip", "privacy.clip", plan.privacy.clip
        raise PlanError(
            f"{bound}: {given:g} leaves the ring too coarse: a median client's step is {precision.quantum:.1%} of a "
            f"typical scalar ({precision.typical:.3g}), expected at most {QUANTUM_REFUSED:.0%}; lower {lower}"
        )
    advice = []
    if precision.curvature > CURVATURE_WARNED:
        return [
            f"probe.sigma = {plan.probe.sigma:g} is too large: the loss curves, and scalars differ from derivatives by "
            f"{precision.curvature:.0%} of them; use at most {precision.sigma_most:.1g}"
        ]
    if precision.noise > NOISE_WARNED:
        advice.append(
            f"probe.sigma = {plan.probe.sigma:g} is small for {plan.probe.precision} losses: {precision.noise:.0%} "
            f"of a scalar is rounding; {_remedy(precision)}"
        )
    if plan.ring.d_max < 5 * precision.typical and not plan.privacy.on:
        advice.append(
            f"ring.d_max = {plan.ring.d_max:g} will clip: a typical scalar is {precision.typical:.3g}; "
            f"{20 * precision.typical:.1g} would leave room"
        )
    return advice
