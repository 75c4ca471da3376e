"""sigma: which step σ works in which precision, and why."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from baffle.core.arrays import F32, F64
from baffle.core.directions import GAUSSIAN, Directions, Support, dense
from baffle.core.ports import Batch
from baffle.core.probe import SCHEMES, Loss, losses_along
from baffle.paper.measured_task import accuracy_of, subject, trained
from baffle.paper.scalars import alignment
from baffle.paper.target import Cell, Finished, Result, Scale, Tell
from baffle.plan import Plan
from baffle.runtime.torch.loss import one_thread_each
from baffle.task.load import DTYPES, Task

PAPERS, WORKS = 1e-4, 0.9
"""The paper's σ, and the share of the best cosine in float32 from which a σ is said to work."""

SIGMAS = (1e-6, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
COLOURS = {"float32": "#3f88c5", "bfloat16": "#d1495b", "float16": "#0b6e4f"}


class Size(NamedTuple):
    k: int
    samples: int
    steps: int


SIZES: Mapping[Scale, Size] = {"smoke": Size(4, 8, 30), "short": Size(16, 16, 200), "full": Size(64, 32, 1000)}


class Point(NamedTuple):
    """One step in one precision. Cosines with the gradient are shares of what exact scalars along the same directions
    reach, so 1 is the best there is."""

    sigma: float
    cosine: float
    predicted: float
    moved: float  # share of the weights in which W + σz differs from W, once both are rounded
    moved_if_kept: float  # the same with a W that is rounded itself


Curves = dict[tuple[str, str, str], list[Point]]
"""By weights, scheme and precision."""


@dataclass(frozen=True)
class Sigma:
    name: str = "sigma"
    about: str = "which σ works in float32, bfloat16 and float16, against what rounding and curvature predict"

    def plans(self, _scale: Scale) -> dict[str, Plan]:
        return {}

    def result(self, _runs: Mapping[str, Finished], scale: Scale, data: Path | None, tell: Tell) -> Result:
        size = SIZES[scale]
        with one_thread_each():
            task = subject(scale, data)
            points = {"untrained": task.initial_weights(), "trained": trained(task, size.steps)}
            curves = {
                (state, *key): curve
                for state, weights in points.items()
                for key, curve in measured(task, weights, size, partial(_of, tell, state)).items()
            }
            right = accuracy_of(task, points["trained"])
        rows = [_row(curves, *key) for key in curves]
        columns = (
            "weights",
            "scheme",
            "precision",
            "best σ",
            "there",
            "σ that works",
            "at σ = 1e-4",
            "predicted",
            "moved",
        )
        shown = [
            {"weights": state, "scheme": scheme, "precision": precision, "points": [one._asdict() for one in curve]}
            for (state, scheme, precision), curve in curves.items()
        ]
        about = f"K = {size.k}, {size.samples} samples, {len(points['trained']):,} weights; trained: {size.steps} steps"
        notes = [f"{about} of backpropagation, {right:.0%} right.", *_notes(curves)]
        return Result(columns, rows, notes, {"curves": shown}, partial(draw, curves))


def _of(tell: Tell, state: str, what: str) -> None:
    tell(f"{state}, {what}")


def measured(task: Task, weights: F32, size: Size, tell: Tell) -> dict[tuple[str, str], list[Point]]:
    """For every scheme and precision a curve over σ."""
    directions, n = Directions(bytes(32), GAUSSIAN), len(weights)
    supports, batch = dense(n, size.k), task.source.train.batch(np.arange(size.samples))
    z = directions.draw(range(size.k), 0, n).astype(np.float64) * GAUSSIAN.unit
    gradient = task.runtime(torch.float64).gradient_on(batch)(weights)[1].astype(np.float64)
    best, length = alignment(z @ gradient, directions, supports, gradient), float(np.linalg.norm(gradient))
    exact = Remembered(task.runtime(torch.float64).on(batch))

    def share(loss: Remembered, at: F32, scheme: str, sigma: float) -> float:
        scalars = SCHEMES[scheme](loss, at, directions, supports, sigma).scalars
        return alignment(scalars, directions, supports, gradient) / best

    found: dict[tuple[str, str], list[Point]] = {(scheme, name): [] for scheme in SCHEMES for name in DTYPES}
    for name, dtype in DTYPES.items():
        tell(name)
        loss, error = Remembered(task.runtime(dtype).on(batch)), rounding(task, weights, z, batch, dtype)
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
                found[scheme, name].append(point)
    return found


class Remembered:
    """A loss at one point and along one set of directions that is computed once a step, for both schemes."""

    def __init__(self, loss: Loss) -> None:
        self._loss, self._base, self._along = loss, list[float](), dict[float, F64]()

    def __call__(self, weights: F32) -> float:
        if not self._base:
            self._base.append(self._loss(weights))
        return self._base[0]

    def along(self, weights: F32, directions: Directions, supports: Sequence[Support], step: float) -> F64:
        if step not in self._along:
            self._along[step] = losses_along(self._loss, weights, directions, supports, step)
        return self._along[step]


def rounded(weights: F64, dtype: torch.dtype) -> F64:
    """What a model in some precision has of weights that were added up in float32."""
    single: F64 = torch.from_numpy(weights).float().to(dtype).double().numpy()
    return single


def rounded_move(weights: F32, z: F64, sigma: float, dtype: torch.dtype, scheme: str) -> F64:
    """The direction along which a model is really moved, in place of z."""
    here = weights.astype(np.float64)
    behind, apart = (here, sigma) if scheme == "forward" else (here - sigma * z, 2 * sigma)
    move: F64 = (rounded(here + sigma * z, dtype) - rounded(behind, dtype)) / apart
    return move


def rounding(task: Task, weights: F32, z: F64, batch: Batch, dtype: torch.dtype) -> float:
    """How far the arithmetic of a forward pass scatters the loss: its error at weights that need no rounding."""
    near = [rounded(weights + 1e-3 * row, dtype).astype(np.float32) for row in z[:8]]
    loss, exact = task.runtime(dtype).on(batch), task.runtime(torch.float64).on(batch)
    return float(np.std([loss(one) - exact(one) for one in near], ddof=1))


def working(curve: Sequence[Point], best: float) -> list[Point]:
    return [one for one in curve if one.cosine >= WORKS * best]


def _best(curves: Curves, state: str, scheme: str) -> float:
    return max(one.cosine for one in curves[state, scheme, "float32"])


def _row(curves: Curves, state: str, scheme: str, precision: str) -> list[Cell]:
    curve = curves[state, scheme, precision]
    top, fine = max(curve, key=lambda one: one.cosine), working(curve, _best(curves, state, scheme))
    (here,) = (one for one in curve if one.sigma == PAPERS)
    works = f"{fine[0].sigma:g} to {fine[-1].sigma:g}" if fine else "none"
    return [
        *(state, scheme, precision, f"{top.sigma:g}", f"{top.cosine:.2f}", works),
        *(f"{here.cosine:.2f}", f"{here.predicted:.2f}", f"{here.moved:.0%}, {here.moved_if_kept:.0%}"),
    ]


def _notes(curves: Curves) -> list[str]:
    said = []
    for precision in ("float16", "bfloat16"):
        held = []
        for (state, scheme, name), curve in curves.items():
            if name == precision:
                fine = working(curve, _best(curves, state, scheme))
                held.append(any(one.sigma == PAPERS for one in fine))
        verdict = "holds" if all(held) else "does not hold" if not any(held) else "holds in part"
        said.append(f"{precision}: {verdict} ({sum(held)} of {len(held)} cases)")
    return [
        "Cosines are those of the rebuilt estimate with the gradient of backpropagation in float64, as a share of what "
        f"exact scalars along the same directions reach. A σ works where that is at least {WORKS:.0%} of the best in "
        "float32 with the same scheme.",
        "Predicted from three things that are measured apart: curvature, as float64 losses show it; the scatter ε of "
        "the loss by the arithmetic of a forward pass (√2·ε/σ against a scalar, half of it with central differences); "
        "and the difference between z and the move that is left of it when W + σz is rounded. It takes the errors of "
        "two nearby points for independent, and is what many directions would give; K of one key scatter around it.",
        f"Moved: the share of the weights that a step of {PAPERS:g} changes at all, with weights that are kept in "
        "float32 and rounded when they enter the model, as here, and with weights that are kept in that precision. "
        "With the first a step below half a unit does not vanish everywhere: some weights jump by a whole unit "
        "instead, which is right on average and noisy. With the second it is lost.",
        "Losses are taken in float32 from half-precision outputs; taken in half they would be coarser still.",
        f"The paper says that σ = {PAPERS:g} works well in half precision. Here: {'; '.join(said)}.",
    ]


def draw(curves: Curves, figure: Any) -> None:
    states, schemes = (list(dict.fromkeys(key[i] for key in curves)) for i in (0, 1))
    panels = figure.subplots(len(schemes), len(states), sharex=True, sharey=True, squeeze=False)
    for (state, scheme, precision), curve in curves.items():
        axes, colour = panels[schemes.index(scheme)][states.index(state)], COLOURS[precision]
        sigmas = [one.sigma for one in curve]
        axes.plot(
            sigmas, [one.cosine for one in curve], "o-", color=colour, markersize=3, linewidth=1.4, label=precision
        )
        axes.plot(sigmas, [one.predicted for one in curve], ":", color=colour, linewidth=1)
        axes.set_title(f"{state}, {scheme}", fontsize=9)
    for axes in panels.flat:
        axes.axvline(PAPERS, color="#999999", linewidth=0.8, linestyle="--")
        axes.set(xscale="log", ylim=(-0.5, 1.1))
    panels[0][0].legend(frameon=False, fontsize=7, loc="lower center")
    for axes in panels[-1]:
        axes.set_xlabel("σ (dashed: the paper's; dotted: predicted)", fontsize=8)
    figure.supylabel("cosine, share of the attainable", fontsize=9)


TARGET = Sigma()
