"""theorem2: how well an estimate from K directions points along the gradient, against what is predicted."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from baffle.core.arrays import F32
from baffle.core.directions import GAUSSIAN, RADEMACHER, Directions, dense
from baffle.core.rebuild import gradient_from_scalars
from baffle.core.ring import Ring
from baffle.paper.target import Cell, Finished, Result, Scale, Tell
from baffle.plan import Plan

SIZES: Mapping[Scale, tuple[tuple[int, ...], tuple[int, ...], int]] = {
    "smoke": ((100, 1_000), (10, 100), 4),
    "short": ((100, 1_000, 10_000, 100_000), (10, 100, 1_000), 8),
    "full": ((100, 1_000, 10_000, 100_000, 1_000_000), (10, 100, 1_000, 10_000), 8),
}


def cosine(gradient: F32, k: int, key: bytes, distribution: Any) -> float:
    """Of a gradient with what the system makes of its exact scalars: drawn, put into the ring, and rebuilt."""
    directions, n = Directions(key, distribution), len(gradient)
    scalars = np.concatenate(
        [
            directions.draw(range(first, min(first + 64, k)), 0, n).astype(np.float64) @ gradient * distribution.unit
            for first in range(0, k, 64)
        ]
    )
    ring = Ring(clients=1, n_max=1, clip=float(np.abs(scalars).max()))
    totals = ring.decode(ring.encode(scalars, k, 1, 0.0), 1).totals
    found = gradient_from_scalars(totals, 1, directions, dense(n, k), n, ring).astype(np.float64)
    return float(found @ gradient / (np.linalg.norm(found) * np.linalg.norm(gradient)))


@dataclass(frozen=True)
class Alignment:
    """Random gradients of n numbers: what matters for the alignment is n and K alone."""

    name: str = "theorem2"
    about: str = "cosine of the estimate with the gradient, against √(K/(K+n+1))"

    def plans(self, _scale: Scale) -> dict[str, Plan]:
        return {}

    def result(self, _runs: Mapping[str, Finished], scale: Scale, _data: Path | None, tell: Tell) -> Result:
        sizes, ks, turns = SIZES[scale]
        rows: list[list[Cell]] = []
        for n in sizes:
            for k in ks:
                tell(f"{n:,} weights, K = {k:,}")
                gradient = np.random.default_rng(n).normal(size=n).astype(np.float32)
                found = [
                    float(np.mean([cosine(gradient, k, bytes([turn]) * 32, d) for turn in range(turns)]))
                    for d in (GAUSSIAN, RADEMACHER)
                ]
                expected = math.sqrt(k / (k + n + 1))
                rows.append(
                    [n, k, f"{expected:.4f}", *(f"{one:.4f}" for one in found), f"{found[0] / expected - 1:+.1%}"]
                )
        columns = ("weights", "K", "predicted", "gaussian", "rademacher", "gaussian against predicted")
        notes = [f"Each figure is the mean over {turns} keys; exact scalars pass through the ring and are rebuilt."]
        return Result(columns, rows, notes, {}, lambda figure: _draw(figure, rows))


def _draw(figure: Any, rows: list[list[Cell]]) -> None:
    axes = figure.subplots()
    predicted, gaussian, rademacher = ([float(str(row[i])) for row in rows] for i in (2, 3, 4))
    axes.plot([min(predicted), 1], [min(predicted), 1], color="#bbbbbb", linewidth=1)
    axes.plot(predicted, gaussian, "o", markersize=4, label="gaussian")
    axes.plot(predicted, rademacher, "x", markersize=5, label="rademacher")
    axes.set(xscale="log", yscale="log", xlabel="predicted cosine", ylabel="measured cosine")
    axes.legend(frameon=False)
