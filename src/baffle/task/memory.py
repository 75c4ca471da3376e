"""How many samples run through a model at once: a size by rule or by a measurement, within a limit on memory."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import msgspec
import numpy as np

from baffle.core.arrays import F32
from baffle.core.directions import NUMBERS_AT_ONCE
from baffle.core.ports import Batch, Runtime, SampleRuntime
from baffle.errors import PlanError
from baffle.plan import ProbeSettings
from baffle.runtime.model import RunnableModel
from baffle.stopwatch import TURNS, Stopwatch

RULE = 64  # the default size: few enough samples for most models to stay in cache

SIZES = (8, RULE, 32, 128, 16, 256)  # in the order in which they are tried: a small one shows how long the others take
SECONDS = 0.5  # CPU seconds for the whole measurement
GAIN = 0.9  # a size replaces the rule if it takes less than this share of its time, so that noise seldom decides
RuntimeOf = Callable[[int], Runtime]  # a size of micro-batches → a runtime that uses it
MEGABYTE = 1 << 20

TRIED = 8  # the memory of up to this many samples is counted; more samples take at most proportionally more
RESERVE = 4 << 20  # bytes beside tensors and directions: code that a library compiles, Python objects, rounding
BYTES_A_NUMBER = 16  # for a number of a direction while it is drawn: stream, index, number, its product with σ


@dataclass(frozen=True)
class Footprint:
    """Upper bounds for whole forward passes along K directions. They are counted, not measured, so every machine with
    the same libraries finds the same bounds."""

    model: RunnableModel
    probe: ProbeSettings
    n_weights: int
    sample: Batch  # a batch of one sample

    def bytes(self, size: int) -> int:
        """An upper bound for probes with micro-batches of `size` samples."""
        tried = min(size, TRIED)
        return self._fixed + math.ceil(self._tensors(tried) * size / tried)

    def largest(self, limit: int) -> int:
        """The largest size of micro-batches that stays within `limit` bytes; 0 if none does."""
        for tried in (TRIED, TRIED // 2, TRIED // 4, 1):
            size = (limit - self._fixed) * tried // self._tensors(tried)
            if size >= tried:
                return size
        return 0

    def room(self, limit_mb: int) -> int:
        """How many bytes of a limit are left for tensors."""
        return max(0, limit_mb * MEGABYTE - self._fixed)

    def within(self, limit_mb: int, size: int, *, given: bool) -> int:
        """The size of micro-batches that respects a limit: `size`, or the largest possible. A size that the plan itself
        gives (`given`) is refused rather than changed."""
        largest = self.largest(limit_mb * MEGABYTE)
        if not largest:
            least = math.ceil(self.bytes(1) / MEGABYTE)
            raise PlanError(f"probe.memory_mb: probes of this model need at least {least} MB, got {limit_mb}")
        if given and size > largest:
            needed = math.ceil(self.bytes(size) / MEGABYTE)
            raise PlanError(
                f"probe.memory_mb: micro-batches of {size} may need {needed} MB, got {limit_mb}; set "
                f"probe.micro_batch to at most {largest}, or to 0"
            )
        return min(size, largest)

    def _tensors(self, count: int) -> int:
        """Peak bytes of tensors in a forward pass of `count` samples."""
        batch = self.sample.take(np.zeros(count, np.int64))
        size = self.model.pass_bytes(msgspec.structs.replace(self.probe, micro_batch=count), batch)
        if size is None:
            raise PlanError("probe.memory_mb: this runtime cannot tell how much memory it takes; leave it out")
        return max(1, size)

    @property
    def _fixed(self) -> int:
        return RESERVE + BYTES_A_NUMBER * min(self.n_weights * self.probe.k, NUMBERS_AT_ONCE)


def quickest_size(runtime: RuntimeOf, weights: F32, batch: Batch, stopwatch: Stopwatch) -> int:
    """The size at which a sample takes the least time, among the sizes that can be measured in time. If a sample's
    output depends on the others of its micro-batch, the size is part of the model, so the rule applies."""
    if len(batch.y) <= RULE or samples_interact(runtime, weights, batch):
        return min(RULE, len(batch.y))
    seconds, left = dict[int, float](), SECONDS  # of a sample, for each size
    for size in SIZES:
        if size > len(batch.y) or min(seconds.values(), default=0.0) * size * TURNS > left:
            continue
        least = stopwatch.least(partial(runtime(size).on(batch.take(slice(size))), weights))
        left -= TURNS * least
        seconds[size] = least / size
    best = min(seconds, key=seconds.__getitem__)
    return best if seconds[best] < GAIN * seconds.get(RULE, 0.0) else RULE


def require_separate_samples(runtime: RuntimeOf, weights: F32, batch: Batch) -> None:
    """Refuse to stack clients whose samples could not be told apart afterwards. The batch has eight samples."""
    whole = runtime(len(batch.y))
    if not isinstance(whole, SampleRuntime):
        raise PlanError("probe.stacked: this runtime gives only the mean loss of a batch; leave it out")
    whole.samples_on(batch)(weights)
    if samples_interact(runtime, weights, batch):
        raise PlanError(
            "probe.stacked: the model's output for a sample depends on the others in its batch, so clients cannot "
            "share a batch; leave it out"
        )


def samples_interact(runtime: RuntimeOf, weights: F32, batch: Batch) -> bool:
    """Whether outputs change, by more than rounding, with the size of micro-batches."""
    few = batch.take(slice(8))
    # A last layer whose weights are zero would hide it, so all weights are moved.
    moved = weights + np.random.default_rng(0).normal(0, 0.05, len(weights)).astype(np.float32)
    by_four, by_eight = (runtime(size).outputs(moved, few) for size in (4, 8))
    return bool(np.max(np.abs(by_four - by_eight)) > 1e-3 * np.max(np.abs(by_eight)))
