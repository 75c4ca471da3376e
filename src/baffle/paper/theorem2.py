"""theorem2: how well an estimate from K directions points along the gradient, against the predicted cosine."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from baffle.core.arrays import F64
from baffle.core.directions import GAUSSIAN, RADEMACHER, Directions, Distribution, dense
from baffle.paper.scalars import alignment, exact_scalars
from baffle.paper.target import Cell, Finished, Result, Scale, Tell
from baffle.plan import Plan

SIZES: Mapping[Scale, tuple[tuple[int, ...], tuple[int, ...], int]] = {
    "smoke": ((100, 1_000), (10, 100), 4),
    "short": ((100, 1_000, 10_000, 100_000), (10, 100, 1_000), 8),
    "full": ((100, 1_000, 10_000, 100_000, 1_000_000), (10, 100, 1_000, 10_000), 8),
}
"""Numbers of weights, values of K, and how many keys each figure is a mean over."""


def cosine(gradient: F64, k: int, key: bytes, distribution: Distribution) -> float:
    """Alignment of a gradient with the estimate from its exact scalars along K directions."""
    directions = Directions(key, distribution)
    scalars = exact_scalars(directions, k, gradient[None])[:, 0]
    return alignment(scalars, directions, dense(len(gradient), k), gradient)


@dataclass(frozen=True)
class Alignment:
    """Random gradients of n numbers, since the alignment depends on n and K alone."""

    name: str = "theorem2"
    about: str = "cosine of the estimate with the gradient, against √(K/(K+n+1))"

    def plans(self, _scale: Scale) -> dict[str, Plan]:
        return {}

    def result(self, _runs: Mapping[str, Finished], scale: Scale, _data: Path | None, tell: Tell) -> Result:
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


TARGET = Alignment()
