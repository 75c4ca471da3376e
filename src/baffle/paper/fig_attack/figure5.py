"""The paper's figure 5: ΔL of real data and of noise, and how far they can be told apart."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from baffle.core.arrays import F32, F64, I64
from baffle.core.directions import GAUSSIAN, Directions, dense
from baffle.core.ports import Batch
from baffle.core.probe import forward_difference
from baffle.paper.fig_attack.cases import SIGMA, Size
from baffle.paper.fig_attack.separation import auc, kolmogorov_smirnov
from baffle.task.load import Task

Separations = Mapping[str, Mapping[str, Mapping[str, list[float]]]]
"""By weights, by kind of input, by measure: one figure for each round."""


def differences(task: Task, weights: F32, size: Size) -> dict[str, list[F64]]:
    """ΔL of `size.rounds` batches of each kind of input, all along the same directions."""
    runtime = task.runtime()
    random = np.random.default_rng(5)
    directions = Directions(bytes(32), GAUSSIAN)
    supports = dense(len(weights), size.differences)
    shape = task.source.shape
    classes = task.source.classes

    def labels() -> I64:
        return random.integers(0, classes, 8)

    def real() -> Batch:
        return task.source.test.batch(random.choice(len(task.source.test), 8, replace=False))

    kinds: dict[str, Callable[[], Batch]] = {
        "real": real,
        "other real": real,
        "Gaussian": lambda: Batch(random.normal(size=(8, *shape)).astype(np.float32), labels()),
        "Laplacian": lambda: Batch(random.laplace(size=(8, *shape)).astype(np.float32), labels()),
    }
    return {
        kind: [
            forward_difference(runtime.on(make()), weights, directions, supports, SIGMA).scalars * SIGMA
            for _ in range(size.rounds)
        ]
        for kind, make in kinds.items()
    }


def separations_of(by_kind: Mapping[str, Sequence[F64]]) -> dict[str, dict[str, list[float]]]:
    """For each kind of input but real data, batch by batch: how far single ΔL can be told from those of real data, and
    how their spread compares."""
    real = by_kind["real"]
    return {
        kind: {
            "ks": [kolmogorov_smirnov(a, b) for a, b in zip(real, batches, strict=True)],
            "auc": [auc(np.abs(b), np.abs(a)) for a, b in zip(real, batches, strict=True)],
            "spread": [float(np.std(b) / np.std(a)) for a, b in zip(real, batches, strict=True)],
        }
        for kind, batches in by_kind.items()
        if kind != "real"
    }
