"""Bounds the memory of a client's probes beside its model and batch, and finds micro-batches that respect a limit."""

import math
from dataclasses import dataclass

import msgspec
import numpy as np

from baffle.core.directions import NUMBERS_AT_ONCE
from baffle.core.ports import Batch
from baffle.errors import PlanError
from baffle.plan import ProbeSettings
from baffle.runtime.model import RunnableModel

MEGABYTE = 1 << 20

TRIED = 8
"""The memory of up to this many samples is counted; more samples take at most proportionally more."""

RESERVE = 4 << 20
"""Bytes beside tensors and directions: code that a library compiles for new shapes, Python objects, rounding."""

BYTES_A_NUMBER = 16
"""Bytes for each number of a direction while it is drawn: stream, index, number, and its product with σ."""


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
