"""law: where the law of an estimate holds: scalars that were probed, against those that it expects."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from baffle.client.abstaining import Tell
from baffle.core.arrays import F32, F64
from baffle.core.directions import GAUSSIAN, Directions, dense
from baffle.core.probe import SCHEMES
from baffle.paper.gradients import exact_scalars, gradient_runtime, measured_task, trained
from baffle.paper.sigma import Remembered
from baffle.paper.target import Cell, Measurement, Result, Scale
from baffle.runtime.torch.loss import one_thread_each
from baffle.task.load import Task

HOLDS = 0.1  # errors of this share of a scalar add 1 % to the noise of an estimate
SIGMAS = (1e-6, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
PRECISIONS = ("float32", "float16")


class Size(NamedTuple):
    k: int
    samples: int
    steps: int


SIZES: Mapping[Scale, Size] = {"smoke": Size(8, 8, 30), "short": Size(32, 8, 200), "full": Size(256, 32, 1000)}


class Case(NamedTuple):
    """What a set of scalars was probed at, and how."""

    weights: str
    activation: str
    scheme: str
    precision: str
    sigma: float


SHOWN = {
    Case("trained", "hardswish", "forward", "float32", 1e-3): "float32, σ = 0.001: it holds",
    Case("trained", "hardswish", "forward", "float32", 1e-1): "large σ: 0.1, curvature",
    Case("trained", "relu", "forward", "float32", 1e-2): "kinks: ReLU, σ = 0.01",
    Case("trained", "hardswish", "forward", "float16", 1e-4): "float16, σ = 0.0001: rounding",
}
"""The panels of the figure."""

Probed = dict[Case, tuple[F64, F64]]  # scalars as probed, and as expected, as shares of the gradient's length


def error(probed: F64, expected: F64) -> float:
    """The root mean square of what the law does not know, as a share of a scalar's."""
    return float(np.sqrt(np.mean((probed - expected) ** 2)))


def measure(scale: Scale, data: Path | None, tell: Tell) -> Result:
    size, found = SIZES[scale], Probed()
    with one_thread_each():
        for activation in ("hardswish", "relu"):
            task = measured_task(scale, data, f"task.model.activation={activation}")
            for state, weights in (("untrained", task.initial_weights()), ("trained", trained(task, size.steps))):
                tell(f"{state}, {activation}")
                found |= probed_at(task, state, activation, weights, size)
    rows: list[list[Cell]] = []
    for state, activation, scheme, precision, _ in [case for case in found if case.sigma == SIGMAS[0]]:
        errors = [error(*found[Case(state, activation, scheme, precision, sigma)]) for sigma in SIGMAS]
        holds = [f"{sigma:g}" for sigma, each in zip(SIGMAS, errors, strict=True) if each <= HOLDS]
        rows.append([state, activation, scheme, precision, *(f"{each:.2g}" for each in errors), ", ".join(holds)])
    columns = ("weights", "activation", "scheme", "precision", *(f"σ = {sigma:g}" for sigma in SIGMAS), "holds at σ =")
    notes = [
        f"K = {size.k} Gaussian directions, {size.samples} samples; trained: {size.steps} steps of backpropagation.",
        "A figure is the root mean square of the difference between a scalar that was probed and the one that the law "
        f"expects along the same direction, z·g, as a share of |g|. The law holds at {HOLDS:g} or less: then what it "
        "does not know adds at most 1 % to the noise of an estimate. All scalars on this page were probed.",
    ]
    raw = [case._asdict() | {"probed": a.tolist(), "expected": b.tolist()} for case, (a, b) in found.items()]
    return Result(columns, rows, notes, {"scalars": raw}, partial(draw, found))


def probed_at(task: Task, state: str, activation: str, weights: F32, size: Size) -> Probed:
    """Scalars at some weights, by every scheme, in every precision and with every σ."""
    directions, supports = Directions(bytes(32), GAUSSIAN), dense(len(weights), size.k)
    batch = task.source.train.batch(np.arange(size.samples))
    gradient = gradient_runtime(task, "float64").gradient_on(batch, None)(weights)[1].astype(np.float64)
    length = float(np.linalg.norm(gradient))
    expected, found = exact_scalars(directions, size.k, gradient[None])[:, 0] / length, Probed()
    for precision in PRECISIONS:
        loss = Remembered(task.runtime(precision).on(batch))
        for scheme, probe in SCHEMES.items():
            for sigma in SIGMAS:
                scalars = probe(loss, weights, directions, supports, sigma).scalars
                found[Case(state, activation, scheme, precision, sigma)] = scalars / length, expected
    return found


def draw(found: Probed, figure: Any) -> None:
    panels = figure.subplots(2, 2).flat
    for (case, title), axes in zip(SHOWN.items(), panels, strict=True):
        probed, expected = found[case]
        most = float(np.abs(expected).max())
        axes.plot([-most, most], [-most, most], color="#bbbbbb", linewidth=1)
        axes.plot(expected, probed, "o", markersize=3)
        axes.set_title(f"{title}; error {error(probed, expected):.2g}", fontsize=8)
    figure.supxlabel("scalar that the law expects, z·g / |g|", fontsize=9)
    figure.supylabel("scalar that was probed / |g|", fontsize=9)


TARGET = Measurement("law", "where an estimate has its law: scalars probed against scalars expected", measure)
