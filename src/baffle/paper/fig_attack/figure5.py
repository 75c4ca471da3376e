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

Told = Mapping[str, Mapping[str, Mapping[str, list[float]]]]
"""By weights, by kind of input, by measure: a figure for each round."""


def differences(task: Task, weights: F32, size: Size) -> dict[str, list[F64]]:
    """ΔL of several batches of each kind, all along the same directions."""
    runtime, random = task.runtime(), np.random.default_rng(5)
    directions, supports = Directions(bytes(32), GAUSSIAN), dense(len(weights), size.differences)
    shape, classes = task.source.shape, task.source.classes

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


def told_apart(of_kind: Mapping[str, Sequence[F64]]) -> dict[str, dict[str, list[float]]]:
    """For each kind but the first, batch by batch: how far single values of it can be told from real ones, and how the
    spread of all of them compares."""
    return {
        kind: {
            "ks": [kolmogorov_smirnov(a, b) for a, b in zip(of_kind["real"], several, strict=True)],
            "auc": [auc(np.abs(b), np.abs(a)) for a, b in zip(of_kind["real"], several, strict=True)],
            "spread": [float(np.std(b) / np.std(a)) for a, b in zip(of_kind["real"], several, strict=True)],
        }
        for kind, several in of_kind.items()
        if kind != "real"
    }
