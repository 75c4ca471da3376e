"""What a few probes say before a run: which steps σ measure derivatives, whether σ and the ring are precise enough for
the plan's losses, and how much the gradients of the model's layers differ in size."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from itertools import pairwise
from typing import cast

import numpy as np

from baffle.core.arrays import F32, F64, rms
from baffle.core.directions import Directions, Support, dense
from baffle.core.probe import SCHEMES, Loss, Scheme
from baffle.errors import PlanError
from baffle.plan.arithmetic import distribution
from baffle.runtime.model import FLOAT64
from baffle.task.load import Task
from baffle.trajectory import Trajectory, trajectory_of

DIRECTIONS = 8  # how many directions are tried, and how many along each layer
NOISE_REFUSED, NOISE_WARNED, NOISE_WANTED = 0.5, 0.05, 0.01  # rounding noise as a share of a typical scalar
CURVATURE_WARNED = 0.5  # the change of a scalar by curvature, as a share of the derivative
STEPS_TRIED = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)  # values of σ that the plan's own is compared with
NOTHING = 1e-30  # a typical scalar if no probe changes the loss
QUANTUM_REFUSED = 0.01  # a step of the ring for a median client, as a share of a typical scalar

TOLERANCE = 0.1
"""A step is in the window if its scalars differ from derivatives by at most this share. They are multiplied by random
directions, so that an error of this size adds a hundredth to the variance of an estimate."""

SMOOTH = 0.5  # if no two neighbouring steps agree within this share, the loss has no derivative that a step measures
LEAST_ROUNDED = 3e-3  # the least step that can measure a derivative through activations of eight bits
STEPS = tuple(float(f"{10 ** (half / 2):.3g}") for half in range(-12, 1))
"""From 1e-6 to 1, two a decade. Smaller steps are lost when they are added to float32 weights."""

TINY = (1e-6, 1e-5)  # steps that measure derivatives in float64, where they agree
MOST_LAYERS = 24  # of more layers, this many are probed, spread evenly over the model
TOO_NOISY = 2.0
"""Beyond this ratio, dense directions are advised against: they would need four times as many for the same estimate. By
exact gradients (benchmarks/any_net.py), a LeNet and a plain net of four layers have 1.0 to 1.5; nets of six and eight
layers, a transformer and SqueezeNet-like nets 2 to 71."""


@dataclass(frozen=True)
class Window:
    """The least and the largest step that measure a derivative, and the root mean square of a scalar there. A smaller
    step differs from derivatives by rounding, a larger one by curvature. For a loss without derivatives, `smooth` is
    false and the bounds mean nothing."""

    low: float
    high: float
    typical: float
    smooth: bool = True
    errors: Mapping[float, float] = field(default_factory=dict)  # step → how far its scalars are from derivatives
    sizes: Mapping[float, float] = field(default_factory=dict)  # step → the root mean square of its scalars

    @property
    def middle(self) -> float:
        return math.sqrt(self.low * self.high)

    def meet(self, other: "Window") -> "Window":
        """The steps that are in both windows. If none is, the two bounds that are nearest to each other."""
        if not (self.smooth and other.smooth):
            return self if self.smooth else other
        low, high = max(self.low, other.low), min(self.high, other.high)
        return Window(min(low, high), max(low, high), other.typical)


def find_window(
    loss: Loss,
    weights: F32,
    scheme: Scheme,
    directions: Directions,
    supports: Sequence[Support],
    steps: Sequence[float] = STEPS,
    exact: Loss | None = None,
    *,
    rounded: bool = False,
) -> Window:
    """Probe a loss at steps of many sizes, along the same directions. Where two neighbouring sizes agree best, the
    scalars are as near to derivatives as this loss allows, whatever its runtime and precision. If the same loss is
    known in float64 (`exact`), tiny steps of that give the derivatives. Of a loss through `rounded` activations, whose
    steps must be large, central differences do, which curve less."""
    with np.errstate(all="ignore"):  # far from the weights a loss may not be finite
        scalars = [scheme(loss, weights, directions, supports, sigma).scalars for sigma in steps]
        if rounded:
            central = [SCHEMES["central"](loss, weights, directions, supports, sigma).scalars for sigma in steps]
            best, derivatives = _derivatives(central)
        elif exact is None:
            best, derivatives = _derivatives(scalars)
        else:
            precise = cast(F32, weights.astype(np.float64))
            best, derivatives = _derivatives(
                [scheme(exact, precise, directions, supports, step).scalars for step in TINY]
            )
        sizes = {step: rms(found) for step, found in zip(steps, scalars, strict=True)}
        if best is None:
            return Window(steps[0], steps[-1], sizes[steps[-1]], smooth=False, sizes=sizes)
        typical = rms(derivatives)
        errors = np.nan_to_num([rms(found - derivatives) / typical for found in scalars], nan=math.inf).tolist()
    low, high = (best, best + 1) if exact is None and not rounded else (int(np.argmin(errors)),) * 2
    while low > 0 and errors[low - 1] <= TOLERANCE:
        low -= 1
    while high < len(steps) - 1 and errors[high + 1] <= TOLERANCE:
        high += 1
    return Window(steps[low], steps[high], typical, errors=dict(zip(steps, errors, strict=True)), sizes=sizes)


def _derivatives(scalars: Sequence[F64]) -> tuple[int | None, F64]:
    """The first of the two neighbouring steps that agree best, and the mean of their scalars. A loss that does not
    change at all agrees with itself and says nothing."""
    disagreements = []
    for near, far in pairwise(scalars):
        size, difference = min(rms(near), rms(far)), rms(far - near)
        disagreements.append(difference / size if size > 0 and math.isfinite(difference) else math.inf)
    best = int(np.argmin(disagreements))
    if disagreements[best] > SMOOTH:
        return None, scalars[best]
    return best, (scalars[best] + scalars[best + 1]) / 2


def steps_of(task: Task) -> tuple[float, ...]:
    """The steps that may measure derivatives of a task's loss."""
    return tuple(step for step in STEPS if step >= LEAST_ROUNDED or not task.model.rounds)


def few_directions(trajectory: Trajectory, count: int) -> tuple[Directions, list[Support]]:
    """So many directions, spread over those of a round."""
    probe = trajectory.plan.probe
    directions = Directions(bytes(32), distribution(probe))
    every = trajectory.supports or dense(trajectory.n, 1)  # an exact head may be all of the model
    return directions, [every[i * len(every) // count] for i in range(count)]


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


def measure(task: Task) -> Precision:
    """Probe one client's batch as the plan says, at the initial weights and with steps of many sizes, and find out how
    much of a scalar is rounding and how much curvature. A loss without derivatives has neither."""
    plan, weights, batch = task.plan, task.initial_weights(), task.first_batch()
    trajectory = trajectory_of(plan, len(weights))
    sigma, tried = plan.probe.sigma, steps_of(task) if task.model.rounds else STEPS_TRIED
    exact = task.runtime(FLOAT64).on(batch) if FLOAT64 in task.model.precisions else None
    scheme, few = SCHEMES[plan.probe.scheme], few_directions(trajectory, DIRECTIONS)
    with task.model.one_thread_each():
        steps, rounded = sorted({sigma, *tried}), task.model.rounds
        window = find_window(task.runtime().on(batch), weights, scheme, *few, steps, exact, rounded=rounded)
    found = _precision(window, sigma) if window.smooth else Precision(window.sizes[sigma], 0.0, sigma, 0.0, 0.0)
    found = replace(found, typical=max(found.typical, NOTHING))
    if plan.outcome_kind != "scalars":
        return found
    weight = trajectory.weight_of(int(np.median([len(share) for share in task.shares])))
    return replace(found, quantum=1 / (trajectory.ring.scale * weight * found.typical))


def _precision(window: Window, sigma: float) -> Precision:
    """Errors below the middle of the window are rounding, those above it curvature. The least step is advised that
    brings the error down to what is wanted, or else to the least possible; none if even that would be refused."""
    error, least = window.errors[sigma], min(window.errors.values())
    noise, curvature = (error, 0.0) if sigma < window.middle else (0.0, error)
    goal = max(NOISE_WANTED, least)
    wanted = next(step for step, left in window.errors.items() if left <= goal) if least < NOISE_REFUSED else math.inf
    return Precision(window.typical, noise, wanted, goal, 0.0, curvature, window.high)


def require_precision(task: Task) -> list[str]:
    """Refuse a plan whose scalars would be noise; return advice if they are merely noisy."""
    return judge(task, measure(task)) if task.draws_directions else []


def judge(task: Task, precision: Precision) -> list[str]:
    """Refuse a plan that is too imprecise, or return advice."""
    plan, sigma = task.plan, f"{task.plan.probe.sigma:g}"
    if not math.isfinite(precision.typical + precision.noise):
        return ["the precision of σ could not be measured: the loss is not finite at the initial weights"]
    remedy = f"to bring it to {precision.noise_wanted:.0%}, use at least {precision.sigma_wanted:.1g}"
    if math.isinf(precision.sigma_wanted):
        remedy = f'no σ up to {max(STEPS_TRIED):g} would do; set probe.precision = "float32"'
    if precision.noise >= NOISE_REFUSED:
        raise PlanError(
            f"probe.sigma: {sigma} is below the precision of the loss: {min(precision.noise, 1):.0%} of a scalar "
            f"would be rounding; {remedy}"
        )
    if precision.typical <= NOTHING and precision.quantum:
        raise PlanError(
            f"probe.sigma: {sigma} is too small: none of {DIRECTIONS} probes changed the loss, as happens with a loss "
            "that moves in steps; a larger one may help"
        )
    if precision.quantum > QUANTUM_REFUSED:
        bound, lower, given = "ring.d_max", "ring.d_max or ring.n_max", plan.ring.d_max
        if plan.privacy.on:
            bound, lower, given = "privacy.clip", "privacy.clip", plan.privacy.clip
        raise PlanError(
            f"{bound}: {given:g} leaves the ring too coarse: a median client's step is {precision.quantum:.1%} of a "
            f"typical scalar ({precision.typical:.3g}), expected at most {QUANTUM_REFUSED:.0%}; lower {lower}"
        )
    if precision.curvature > CURVATURE_WARNED:
        return [
            f"probe.sigma = {sigma} is too large: the loss curves, and scalars differ from derivatives by "
            f"{precision.curvature:.0%} of them; use at most {precision.sigma_most:.1g}"
        ]
    advice = []
    if precision.noise > max(NOISE_WARNED, precision.noise_wanted):
        advice.append(
            f"probe.sigma = {sigma} is small for {plan.probe.precision} losses: {precision.noise:.0%} of a scalar is "
            f"rounding; {remedy}"
        )
    if plan.ring.d_max < 5 * precision.typical and not plan.privacy.on:
        advice.append(
            f"ring.d_max = {plan.ring.d_max:g} will clip: a typical scalar is {precision.typical:.3g}; "
            f"{20 * precision.typical:.1g} would leave room"
        )
    return advice


@dataclass(frozen=True)
class Contrast:
    """How much the gradients of a model's layers differ at its initial weights. Dense directions give every weight the
    same noise, |g|²/K for a gradient g. Directions of one layer each leave a layer its own, |g_s|²/K_s for K_s
    directions. Where layers are alike, the two are equal."""

    layers: int
    factor: float  # the largest gradient of a layer over the smallest, each the root mean square of its weights'
    noise: float  # of dense directions over that of single layers, as a root mean square over the weights


def measure_contrast(task: Task) -> Contrast | None:
    """Compare the layers' gradients on one client's batch. None if the runtime knows fewer than two layers, or fewer
    than two have a gradient."""
    tried = layers = task.model.layers() or ()
    if len(layers) > MOST_LAYERS:
        tried = tuple(layers[i * len(layers) // MOST_LAYERS] for i in range(MOST_LAYERS))
    if len(tried) < 2 or task.plan.estimator != "probe":
        return None
    probe, weights, loss = task.plan.probe, task.initial_weights(), task.runtime().on(task.first_batch())

    def derivatives(number: int) -> F64:
        """One for each layer."""
        directions = Directions(sha256(b"contrast" + bytes([number])).digest(), distribution(probe))
        return SCHEMES[probe.scheme](loss, weights, directions, tried, probe.sigma).scalars

    with task.model.one_thread_each(), np.errstate(over="ignore", invalid="ignore"):  # the loss may not be finite
        scalars = np.array([derivatives(number) for number in range(DIRECTIONS)])
    squares = np.mean(scalars**2, axis=0)  # of the gradients: a scalar's square has the gradient's own as its mean
    alive = squares > 0
    if not np.isfinite(squares).all() or np.count_nonzero(alive) < 2:
        return None
    sizes, squares = np.array([layer.size for layer in tried])[alive], squares[alive]
    roots = np.sqrt(squares / sizes)
    inverses = (1 - 2 / DIRECTIONS) / squares  # without the factor, the mean of an inverse would be too large
    shares = np.sqrt(sizes) / np.sqrt(sizes).sum()  # of the directions, K_s / K
    excess = squares.sum() * inverses * shares
    return Contrast(len(layers), float(roots.max() / roots.min()), float(np.sqrt(np.average(excess, weights=sizes))))


def judge_contrast(task: Task, contrast: Contrast) -> list[str]:
    """Advise against dense directions where they would be too noisy."""
    if task.plan.probe.supports != "dense" or contrast.noise <= TOO_NOISY:
        return []
    return [
        f"the gradients of the model's layers differ by a factor of {contrast.factor:.2g}, and dense directions have "
        f'{contrast.noise:.2g} times the noise of directions that touch one layer each; set probe.supports = "layers"'
    ]
