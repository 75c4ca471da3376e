"""What sigma, theorem2 and fig-attack measure: LeNet on MNIST (smoke: on the digits), untrained or trained a little,
exact scalars of its gradients, and how well an estimate from scalars points along a gradient. The last is theorem2
itself, against the predicted cosine."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from baffle.client.abstaining import Tell
from baffle.core.arrays import F32, F64
from baffle.core.directions import GAUSSIAN, RADEMACHER, Directions, Distribution, Support, dense
from baffle.core.ports import GradientRuntime
from baffle.core.rebuild import gradient_from_scalars
from baffle.core.ring import Ring
from baffle.core.seeds import batch_indices
from baffle.core.update import adam
from baffle.errors import PlanError
from baffle.paper.target import Cell, Measurement, Result, Scale
from baffle.paper.training_runs import PRESET
from baffle.plan import load
from baffle.runtime.torch.loss import accuracy
from baffle.task.load import Task, load_task

RATE = 0.01  # Adam's, in training
SAMPLES = 32  # in a step of training
AT_ONCE = 64  # directions that are drawn at a time


def measured_task(scale: Scale, data: Path | None, *settings: str) -> Task:
    """The preset of a scale at batch level, loaded as a run loads it, in a runtime that can backpropagate."""
    return load_task(load(PRESET[scale], ["federation.level=batch", "run.runtime=torch", *settings]), data)


def gradient_runtime(task: Task, precision: str = "") -> GradientRuntime:
    """A runtime that can backpropagate."""
    runtime = task.runtime(precision)
    if not isinstance(runtime, GradientRuntime):
        raise PlanError("task.model: this measurement backpropagates, and the model's runtime can only run inference")
    return runtime


def trained(task: Task, steps: int) -> F32:
    """The weights after this many steps of backpropagation, which stand for a run that is well under way."""
    weights, runtime, step = task.initial_weights(), gradient_runtime(task), adam(RATE, 0.9, 0.99)
    state, n = step.init(weights), len(task.source.train)
    for number in range(steps):
        chosen = batch_indices(lambda epoch: epoch.to_bytes(32, "big"), n, SAMPLES, number)
        _, gradient = runtime.gradient_on(task.source.train.batch(chosen))(weights)
        state, change = step.update(state, gradient, weights)
        weights = weights + change
    return weights


def accuracy_of(task: Task, weights: F32, most: int = 1000) -> float:
    """The share of right answers on the first `most` samples of the test set."""
    test = task.source.test
    return accuracy(task.runtime(), weights, test.batch(np.arange(min(most, len(test)))))


def exact_scalars(directions: Directions, k: int, gradients: F64) -> F64:
    """Products of gradients (one a row) with K directions: K rows, one column for each gradient."""
    n, unit = gradients.shape[1], directions.distribution.unit
    parts = [
        directions.draw(range(first, min(first + AT_ONCE, k)), 0, n).astype(np.float64) @ gradients.T * unit
        for first in range(0, k, AT_ONCE)
    ]
    return np.concatenate(parts)


def alignment(scalars: F64, directions: Directions, supports: Sequence[Support], gradient: F64) -> float:
    """Cosine of a gradient with the estimate that a server rebuilds from scalars in the ring; 0 if all scalars are."""
    if not scalars.any():
        return 0.0
    n = len(gradient)
    ring = Ring(clients=1, n_max=1, clip=float(np.abs(scalars).max()))
    totals = ring.decode(ring.encode(scalars, len(scalars), 1, 0.0), 1).totals
    estimate = gradient_from_scalars(totals, 1, directions, supports, n, ring).astype(np.float64)
    return float(estimate @ gradient / (np.linalg.norm(estimate) * np.linalg.norm(gradient)))


SIZES: Mapping[Scale, tuple[tuple[int, ...], tuple[int, ...], int]] = {  # weights, values of K, keys of a mean
    "smoke": ((100, 1_000), (10, 100), 4),
    "short": ((100, 1_000, 10_000, 100_000), (10, 100, 1_000), 8),
    "full": ((100, 1_000, 10_000, 100_000, 1_000_000), (10, 100, 1_000, 10_000), 8),
}


def cosine(gradient: F64, k: int, key: bytes, distribution: Distribution) -> float:
    """Alignment of a gradient with the estimate from its exact scalars along K directions."""
    directions = Directions(key, distribution)
    scalars = exact_scalars(directions, k, gradient[None])[:, 0]
    return alignment(scalars, directions, dense(len(gradient), k), gradient)


def measure(scale: Scale, _data: Path | None, tell: Tell) -> Result:
    """Compare cosines on random gradients of n numbers, since the alignment depends on n and K alone."""
    sizes, ks, keys = SIZES[scale]
    rows: list[list[Cell]] = []
    for n in sizes:
        for k in ks:
            tell(f"{n:,} weights, K = {k:,}")
            gradient = np.random.default_rng(n).normal(size=n).astype(np.float32).astype(np.float64)
            measured = [
                float(np.mean([cosine(gradient, k, bytes([key]) * 32, distribution) for key in range(keys)]))
                for distribution in (GAUSSIAN, RADEMACHER)
            ]
            expected = math.sqrt(k / (k + n + 1))
            excess = f"{measured[0] / expected - 1:+.1%}"
            rows.append([n, k, f"{expected:.4f}", *(f"{mean:.4f}" for mean in measured), excess])
    columns = ("weights", "K", "predicted", "gaussian", "rademacher", "gaussian against predicted")
    notes = [f"Each figure is the mean over {keys} keys. Exact scalars pass through the ring and are rebuilt."]
    return Result(columns, rows, notes, {}, lambda figure: _draw(figure, rows))


def _draw(figure: Any, rows: list[list[Cell]]) -> None:
    axes = figure.subplots()
    predicted, gaussian, rademacher = ([float(str(row[i])) for row in rows] for i in (2, 3, 4))
    axes.plot([min(predicted), 1], [min(predicted), 1], color="#bbbbbb", linewidth=1)
    axes.plot(predicted, gaussian, "o", markersize=4, label="gaussian")
    axes.plot(predicted, rademacher, "x", markersize=5, label="rademacher")
    axes.set(xscale="log", yscale="log", xlabel="predicted cosine", ylabel="measured cosine")
    axes.legend(frameon=False)


THEOREM2 = Measurement("theorem2", "cosine of the estimate with the gradient, against √(K/(K+n+1))", measure)
