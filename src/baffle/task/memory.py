"""How much memory a client's probes take beside its model and its batch, and the micro-batches that keep to a limit."""

import math
from dataclasses import dataclass

from baffle.core.arrays import F32
from baffle.core.directions import NUMBERS_AT_ONCE
from baffle.core.ports import Batch
from baffle.errors import PlanError
from baffle.runtime.torch.footprint import RESERVE, tensor_bytes
from baffle.runtime.torch.loss import one_thread_each
from baffle.task.micro_batch import Runtimes

MEGABYTE = 1 << 20

TRIED = 8
"""Samples that are counted; more of them take at most proportionally more."""

BYTES_A_NUMBER = 16
"""Of a direction while it is drawn: stream, index, number, and its product with σ."""


@dataclass(frozen=True)
class Footprint:
    """Upper bounds for whole forward passes along K directions. They are counted, not timed, so every machine with the
    same libraries finds the same ones."""

    runtime: Runtimes
    weights: F32
    sample: Batch  # of one
    k: int

    def bytes(self, size: int) -> int:
        """What probes with micro-batches of `size` take at most."""
        tried = min(size, TRIED)
        return self._fixed + math.ceil(self._tensors(tried) * size / tried)

    def largest(self, limit: int) -> int:
        """The largest size of micro-batches that stays within so many bytes; 0 if none does."""
        for tried in (TRIED, TRIED // 2, TRIED // 4, 1):
            size = (limit - self._fixed) * tried // self._tensors(tried)
            if size >= tried:
                return size
        return 0

    def within(self, limit_mb: int, size: int, *, given: bool) -> int:
        """A size of micro-batches that keeps to a limit: the wanted one, or the largest; a given one is not changed."""
        most = self.largest(limit_mb * MEGABYTE)
        if not most:
            least = math.ceil(self.bytes(1) / MEGABYTE)
            raise PlanError(f"probe.memory_mb: probes of this model need at least {least} MB, got {limit_mb}")
        if given and size > most:
            needed = math.ceil(self.bytes(size) / MEGABYTE)
            raise PlanError(
                f"probe.memory_mb: micro-batches of {size} may need {needed} MB, got {limit_mb}; set "
                f"probe.micro_batch to at most {most}, or to 0"
            )
        return min(size, most)

    def _tensors(self, count: int) -> int:
        """Bytes of tensors in a forward pass of so many samples."""
        batch = Batch(self.sample.x.repeat(count, 0), self.sample.y.repeat(count, 0))
        loss = self.runtime(count)
        with one_thread_each():
            return max(1, tensor_bytes(lambda: loss.on(batch)(self.weights)))

    @property
    def _fixed(self) -> int:
        return RESERVE + BYTES_A_NUMBER * min(len(self.weights) * self.k, NUMBERS_AT_ONCE)
