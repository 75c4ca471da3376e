"""Measures before a run how unlike the gradients of a model's layers are, by a few probes of single layers.

Dense directions give every weight the same noise, |g|²/K for a gradient g. Directions of one layer each leave a layer
its own, |g_s|²/K_s for K_s directions. Where layers are alike, the two are equal.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

import numpy as np

from baffle.core.arrays import F64
from baffle.core.directions import Directions, Support
from baffle.core.probe import SCHEMES
from baffle.task.load import Task
from baffle.trajectory import distribution

LEAST, MOST, SECONDS = 6, 16, 0.5
"""How many directions each layer is probed along: as many as take this many CPU seconds, within these bounds."""

MOST_LAYERS = 24
"""Of more layers, this many are probed, spread evenly over the model."""

TOO_NOISY = 2.0
"""Beyond this ratio, dense directions are advised against: they would need four times as many for the same estimate. By
exact gradients (benchmarks/any_net.py), a LeNet and a plain net of four layers have 1.0 to 1.5; nets of six and eight
layers, a transformer and SqueezeNet-like nets 2 to 71."""


@dataclass(frozen=True)
class Contrast:
    """How unlike a model's layers are at its initial weights."""

    layers: int
    factor: float  # the largest gradient of a layer over the smallest, each the root mean square of its weights'
    noise: float  # of dense directions over that of single layers, as a root mean square over the weights


def measure_contrast(task: Task) -> Contrast | None:
    """Compare the layers' gradients on one client's batch. None if the model has one layer, or its runtime does not
    know them, or no two of them have a gradient at all."""
    layers = task.model.layers() or ()
    tried = layers
    if len(layers) > MOST_LAYERS:
        tried = tuple(layers[i * len(layers) // MOST_LAYERS] for i in range(MOST_LAYERS))
    if len(tried) < 2 or task.plan.estimator != "probe":
        return None
    with task.model.one_thread_each(), np.errstate(over="ignore", invalid="ignore"):  # the loss may not be finite
        scalars = _scalars(task, tried)
    squares = np.mean(scalars**2, axis=0)  # of the gradients: a scalar's square has the gradient's own as its mean
    alive = squares > 0
    if not np.isfinite(squares).all() or np.count_nonzero(alive) < 2:
        return None
    sizes = np.array([layer.size for layer in tried])[alive]
    squares = squares[alive]
    roots = np.sqrt(squares / sizes)
    turns = len(scalars)
    inverses = (1 - 2 / turns) / squares  # without the factor, the mean of an inverse would be too large
    shares = np.sqrt(sizes) / np.sqrt(sizes).sum()  # of the directions, K_s / K
    excess = squares.sum() * inverses * shares
    return Contrast(len(layers), float(roots.max() / roots.min()), float(np.sqrt(np.average(excess, weights=sizes))))


def _scalars(task: Task, layers: Sequence[Support]) -> F64:
    """Directional derivatives, one row after the other, with a column for each layer."""
    probe = task.plan.probe
    weights = task.initial_weights()
    loss = task.runtime().on(task.source.train.batch(task.shares[0][: task.plan.federation.batch or None]))
    rows = list[F64]()
    began = time.process_time()
    while len(rows) < LEAST or (len(rows) < MOST and time.process_time() - began < SECONDS):
        key = sha256(b"contrast" + bytes([len(rows)])).digest()
        directions = Directions(key, distribution(probe))
        rows.append(SCHEMES[probe.scheme](loss, weights, directions, layers, probe.sigma).scalars)
    return np.array(rows)


def judge_contrast(task: Task, contrast: Contrast) -> list[str]:
    """Advice for a plan whose dense directions would not do."""
    if task.plan.probe.supports != "dense" or contrast.noise <= TOO_NOISY:
        return []
    return [
        f"the gradients of the model's layers differ by a factor of {contrast.factor:.2g}, and dense directions have "
        f'{contrast.noise:.2g} times the noise of directions that touch one layer each; set probe.supports = "layers"'
    ]
