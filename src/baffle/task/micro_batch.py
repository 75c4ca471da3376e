"""How many samples run through a model at once: a rule, and a measurement for batches larger than the rule's size."""

import time
from collections.abc import Callable
from functools import partial

import numpy as np

from baffle.core.arrays import F32
from baffle.core.ports import Batch, Runtime, SampleRuntime
from baffle.errors import PlanError

RULE = 64
"""The default size: few enough samples for most models to stay in cache."""

SIZES = (8, RULE, 32, 128, 16, 256)
"""Sizes in the order in which they are tried. A small one comes first to show how long the others will take."""

SECONDS = 0.5
"""CPU seconds for the whole measurement."""

GAIN = 0.9
"""A size replaces the rule only if it takes less than this share of the rule's time, so that noise seldom decides."""

Runtimes = Callable[[int], Runtime]
"""A size of micro-batches → a runtime that uses it."""


def quickest(runtime: Runtimes, weights: F32, batch: Batch) -> int:
    """The size at which a sample takes the least time, among the sizes that can be measured in time.

    If a sample's output depends on the other samples of its micro-batch, the size is part of the model, so the rule
    applies.
    """
    if len(batch.y) <= RULE or samples_interact(runtime, weights, batch):
        return min(RULE, len(batch.y))
    seconds = _seconds_a_sample(runtime, weights, batch)
    best = min(seconds, key=seconds.__getitem__)
    return best if seconds[best] < GAIN * seconds.get(RULE, 0.0) else RULE


def _seconds_a_sample(runtime: Runtimes, weights: F32, batch: Batch) -> dict[int, float]:
    """CPU seconds per sample for each size: the fastest of three passes."""
    passes = 3
    seconds = dict[int, float]()
    began = time.process_time()
    for size in SIZES:
        expected = min(seconds.values(), default=0.0) * size * passes
        if size > len(batch.y) or time.process_time() - began + expected > SECONDS:
            continue
        loss = partial(runtime(size).on(batch.take(slice(size))), weights)
        seconds[size] = min(_seconds(loss) for _ in range(passes)) / size
    return seconds


def _seconds(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def require_separate_samples(runtime: Runtimes, weights: F32, batch: Batch) -> None:
    """Refuse to stack clients whose samples could not be told apart afterwards. The batch has eight samples."""
    whole = runtime(len(batch.y))
    if not isinstance(whole, SampleRuntime):
        raise PlanError("probe.stacked: this runtime gives the mean loss of a batch alone; leave it out")
    whole.samples_on(batch)(weights)
    if samples_interact(runtime, weights, batch):
        raise PlanError(
            "probe.stacked: what the model says about a sample depends on the others in its batch, so a client's "
            "samples must be alone; leave it out"
        )


def samples_interact(runtime: Runtimes, weights: F32, batch: Batch) -> bool:
    """Whether outputs change, by more than rounding, with the size of micro-batches."""
    few = batch.take(slice(8))
    # A last layer whose weights are zero would hide it, so all weights are moved.
    moved = weights + np.random.default_rng(0).normal(0, 0.05, len(weights)).astype(np.float32)
    by_four, by_eight = (runtime(size).outputs(moved, few) for size in (4, 8))
    return bool(np.max(np.abs(by_four - by_eight)) > 1e-3 * np.max(np.abs(by_eight)))
