"""sigma: which step σ works in which precision, and why."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from baffle.client.abstaining import Tell
from baffle.core.arrays import F32, F64
from baffle.core.directions import GAUSSIAN, Directions, Support, dense
from baffle.core.ports import Batch
from baffle.core.probe import SCHEMES, Loss, losses_along
from baffle.paper.gradients import accuracy_of, alignment, gradient_runtime, measured_task, trained
from baffle.paper.target import Cell, Measurement, Result, Scale
from baffle.runtime.torch.loss import one_thread_each
from baffle.runtime.torch.model import DTYPES
from baffle.task.load import Task

PAPERS = 1e-4  # the paper's σ
WORKS = 0.9  # a σ works if it reaches at least this share of the best cosine in float32
SIGMAS = (1e-6, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
COLOURS = {"float32": "#3f88c5", "bfloat16": "#d1495b", "float16": "#0b6e4f"}  # by the precision of the probes


class Size(NamedTuple):
    k: int
    samples: int
    steps: int


SIZES: Mapping[Scale, Size] = {"smoke": Size(4, 8, 30), "short": Size(16, 16, 200), "full": Size(64, 32, 1000)}


class Point(NamedTuple):
    """One step σ in one precision. Cosines are shares of that of exact scalars, so 1 is the best possible."""

    sigma: float
    cosine: float
    predicted: float
    moved: float  # share of the weights that differ between W and W + σz, once both are rounded
    moved_if_kept: float  # the same for a W that is itself kept in this precision


Curves = dict[tuple[str, str, str], list[Point]]  # over σ, by weights, scheme and precision


def measure(scale: Scale, data: Path | None, tell: Tell) -> Result:
    size = SIZES[scale]
    with one_thread_each():
        task = measured_task(scale, data)
        states = {"untrained": task.initial_weights(), "trained": trained(task, size.steps)}
        curves = {
            (state, *key): curve
            for state, weights in states.items()
            for key, curve in measured(task, state, weights, size, tell).items()
        }
        right = accuracy_of(task, states["trained"])
    rows = [_row(curves, *key) for key in curves]
    columns = (
        *("weights", "scheme", "precision", "best σ", "there", "σ that works"),
        *("at σ = 1e-4", "predicted", "moved"),
    )
    raw = [
        {"weights": state, "scheme": scheme, "precision": precision, "points": [point._asdict() for point in curve]}
        for (state, scheme, precision), curve in curves.items()
    ]
    about = f"K = {size.k}, {size.samples} samples, {len(states['trained']):,} weights; trained: {size.steps} steps"
    notes = [f"{about} of backpropagation, {right:.0%} right.", *_notes(curves)]
    return Result(columns, rows, notes, {"curves": raw}, partial(draw, curves))


def measured(task: Task, state: str, weights: F32, size: Size, tell: Tell) -> dict[tuple[str, str], list[Point]]:
    """A curve over σ for every scheme and precision. `state` is what progress reports call the weights."""
    n = len(weights)
    directions = Directions(bytes(32), GAUSSIAN)
    supports = dense(n, size.k)
    batch = task.source.train.batch(np.arange(size.samples))
    z = directions.draw(range(size.k), 0, n).astype(np.float64) * GAUSSIAN.unit
    gradient = gradient_runtime(task, "float64").gradient_on(batch)(weights)[1].astype(np.float64)
    length = float(np.linalg.norm(gradient))
    best = alignment(z @ gradient, directions, supports, gradient)
    exact = Remembered(task.runtime("float64").on(batch))

    def share(loss: Remembered, at: F32, scheme: str, sigma: float) -> float:
        scalars = SCHEMES[scheme](loss, at, directions, supports, sigma).scalars
        return alignment(scalars, directions, supports, gradient) / best

    curves: dict[tuple[str, str], list[Point]] = {(scheme, name): [] for scheme in SCHEMES for name in COLOURS}
    for name in COLOURS:
        dtype = DTYPES[name]
        tell(f"{state}, {name}")
        loss = Remembered(task.runtime(name).on(batch))
        error = rounding(task, weights, z, batch, name)
        kept = rounded(weights.astype(np.float64), dtype).astype(np.float32)
        for sigma in SIGMAS:
            for scheme, apart in (("forward", sigma), ("central", 2 * sigma)):
                move = rounded_move(weights, z[0], sigma, dtype, scheme)
                lost = float(np.linalg.norm((move - z[0]) * gradient)) / length
                noise = math.hypot(math.sqrt(2) * error / (apart * length), lost)
                smooth = share(exact, cast(F32, weights.astype(np.float64)), scheme, sigma)
                point = Point(
                    sigma,
                    share(loss, weights, scheme, sigma),
                    smooth / math.sqrt(1 + noise**2),
                    float(np.mean(move != 0)),
                    float(np.mean(rounded_move(kept, z[0], sigma, dtype, scheme) != 0)),
                )
                curves[scheme, name].append(point)
    return curves


@dataclass(frozen=True)
class Remembered:
    """A loss at one point and along one set of directions. Each step is computed once, and both schemes use it."""

    loss: Loss
    known: dict[float, Any] = field(default_factory=dict)  # by step; 0 is the point itself

    def __call__(self, weights: F32) -> float:
        if 0 not in self.known:
            self.known[0] = self.loss(weights)
        return float(self.known[0])

    def along(self, weights: F32, directions: Directions, supports: Sequence[Support], step: float) -> F64:
        if step not in self.known:
            self.known[step] = losses_along(self.loss, weights, directions, supports, step)
        along: F64 = self.known[step]
        return along


def rounded(weights: F64, dtype: torch.dtype) -> F64:
    """Weights that were added up in float32, rounded to this precision."""
    single: F64 = torch.from_numpy(weights).float().to(dtype).double().numpy()
    return single


def rounded_move(weights: F32, z: F64, sigma: float, dtype: torch.dtype, scheme: str) -> F64:
    """The direction in which rounding really moves a model, instead of z."""
    here = weights.astype(np.float64)
    behind, apart = (here, sigma) if scheme == "forward" else (here - sigma * z, 2 * sigma)
    move: F64 = (rounded(here + sigma * z, dtype) - rounded(behind, dtype)) / apart
    return move


def rounding(task: Task, weights: F32, z: F64, batch: Batch, precision: str) -> float:
    """How far the arithmetic of a forward pass scatters the loss, measured at weights that need no rounding."""
    near = [rounded(weights + 1e-3 * row, DTYPES[precision]).astype(np.float32) for row in z[:8]]
    loss = task.runtime(precision).on(batch)
    exact = task.runtime("float64").on(batch)
    return float(np.std([loss(at) - exact(at) for at in near], ddof=1))


def working(curves: Curves, state: str, scheme: str, precision: str) -> list[Point]:
    """The steps that work in a precision."""
    best = max(point.cosine for point in curves[state, scheme, "float32"])
    return [point for point in curves[state, scheme, precision] if point.cosine >= WORKS * best]


def _row(curves: Curves, state: str, scheme: str, precision: str) -> list[Cell]:
    curve = curves[state, scheme, precision]
    top = max(curve, key=lambda point: point.cosine)
    fine = working(curves, state, scheme, precision)
    (papers,) = (point for point in curve if point.sigma == PAPERS)
    works = f"{fine[0].sigma:g} to {fine[-1].sigma:g}" if fine else "none"
    return [
        *(state, scheme, precision, f"{top.sigma:g}", f"{top.cosine:.2f}", works),
        *(f"{papers.cosine:.2f}", f"{papers.predicted:.2f}", f"{papers.moved:.0%}, {papers.moved_if_kept:.0%}"),
    ]


def _notes(curves: Curves) -> list[str]:
    verdicts = []
    for precision in ("float16", "bfloat16"):
        fine = [working(curves, *key) for key in curves if key[2] == precision]
        works = [any(point.sigma == PAPERS for point in curve) for curve in fine]
        verdict = "holds" if all(works) else "does not hold" if not any(works) else "holds in part"
        verdicts.append(f"{precision}: {verdict} ({sum(works)} of {len(works)} cases)")
    return [
        "Cosines are those of the rebuilt estimate with the gradient of backpropagation in float64, as a share of the "
        f"cosine that exact scalars along the same directions reach. A σ works if this is at least {WORKS:.0%} of the "
        "best in float32 with the same scheme.",
        "The prediction combines three things that are measured separately: curvature, from losses in float64; the "
        "scatter ε of the loss from the arithmetic of a forward pass (√2·ε/σ against a scalar, half of that with "
        "central differences); and the difference between z and the move that remains when W + σz is rounded. It "
        "treats the errors of two nearby points as independent, and holds for many directions; the K directions of "
        "one key scatter around it.",
        f"Moved is the share of the weights that a step of {PAPERS:g} changes at all: first for weights that are kept "
        "in float32 and rounded when they enter the model, as here, then for weights that are kept in that precision. "
        "In the first case a step below half a unit does not vanish everywhere: some weights jump by a whole unit "
        "instead, which is right on average and noisy. In the second case it is lost.",
        "Losses are computed in float32 from half-precision outputs; in half precision they would be coarser still.",
        f"The paper says that σ = {PAPERS:g} works well in half precision. Here: {'; '.join(verdicts)}.",
    ]


def draw(curves: Curves, figure: Any) -> None:
    states, schemes = (list(dict.fromkeys(key[i] for key in curves)) for i in (0, 1))
    panels = figure.subplots(len(schemes), len(states), sharex=True, sharey=True, squeeze=False)
    for (state, scheme, precision), curve in curves.items():
        axes = panels[schemes.index(scheme)][states.index(state)]
        colour = COLOURS[precision]
        sigmas = [point.sigma for point in curve]
        cosines, predicted = [point.cosine for point in curve], [point.predicted for point in curve]
        axes.plot(sigmas, cosines, "o-", color=colour, markersize=3, linewidth=1.4, label=precision)
        axes.plot(sigmas, predicted, ":", color=colour, linewidth=1)
        axes.set_title(f"{state}, {scheme}", fontsize=9)
    for axes in panels.flat:
        axes.axvline(PAPERS, color="#999999", linewidth=0.8, linestyle="--")
        axes.set(xscale="log", ylim=(-0.5, 1.1))
    panels[0][0].legend(frameon=False, fontsize=7, loc="lower center")
    for axes in panels[-1]:
        axes.set_xlabel("σ (dashed: the paper's; dotted: predicted)", fontsize=8)
    figure.supylabel("cosine, share of the attainable", fontsize=9)


TARGET = Measurement(
    "sigma",
    "which σ works in float32, bfloat16 and float16, against what rounding and curvature predict",
    measure,
    "mnist",
)
