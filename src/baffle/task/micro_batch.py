"""How many samples go through a model at once: a rule, and a measurement where a batch is larger than the rule's."""

import time
from collections.abc import Callable
from functools import partial

import numpy as np

from baffle.core.arrays import F32
from baffle.core.ports import Batch, Runtime

RULE = 64
"""Few enough for most models to stay in cache."""

SIZES = (8, RULE, 32, 128, 16, 256)
"""In the order in which they are tried: a small one first, which shows how long the others will take."""

SECONDS = 0.5
"""CPU time for the measurement."""

GAIN = 0.9
"""Only a size that takes less than this part of the rule's time replaces it, so that noise seldom does."""

Runtimes = Callable[[int], Runtime]
"""A runtime for a size of micro-batches."""


def quickest(runtime: Runtimes, weights: F32, batch: Batch) -> int:
    """The size at which a sample takes least time, of those for which there is time to measure it.

    Where a sample's output depends on the others that go with it, the size is part of the model, and the rule stays.
    """
    if len(batch.y) <= RULE or _samples_meet(runtime, weights, batch):
        return min(RULE, len(batch.y))
    taken = _seconds_a_sample(runtime, weights, batch)
    best = min(taken, key=taken.__getitem__)
    return best if taken[best] < GAIN * taken.get(RULE, 0.0) else RULE


def _seconds_a_sample(runtime: Runtimes, weights: F32, batch: Batch) -> dict[int, float]:
    """CPU seconds for each size, the quickest of some passes."""
    began, passes, taken = time.process_time(), 3, dict[int, float]()
    for size in SIZES:
        expected = min(taken.values(), default=0.0) * size * passes
        if size > len(batch.y) or time.process_time() - began + expected > SECONDS:
            continue
        loss = partial(runtime(size).on(Batch(batch.x[:size], batch.y[:size])), weights)
        taken[size] = min(_seconds(loss) for _ in range(passes)) / size
    return taken


def _seconds(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def _samples_meet(runtime: Runtimes, weights: F32, batch: Batch) -> bool:
    """Whether the first samples' outputs change, beyond rounding, with the number that goes through at once."""
    few = Batch(batch.x[:8], batch.y[:8])
    # A last layer that starts at zero would hide it.
    moved = weights + np.random.default_rng(0).normal(0, 0.05, len(weights)).astype(np.float32)
    one, other = (runtime(size).outputs(moved, few) for size in (4, 8))
    return bool(np.max(np.abs(one - other)) > 1e-3 * np.max(np.abs(other)))
