"""The interfaces between the parts of the system: batches, runtimes, transports and aggregations."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from baffle.core import samples
from baffle.core.arrays import F32
from baffle.core.head import Head, LookIntoHead
from baffle.core.messages import RoundRequest
from baffle.core.probe import Loss, SampleLosses
from baffle.core.ring import Sum
from baffle.core.samples import Labels, Rows


class Batch(NamedTuple):
    """Samples and their labels. `x` is of the type Samples; most callers know which form it has."""

    x: Any
    y: Labels

    def take(self, rows: Rows) -> "Batch":
        """The samples of these rows."""
        return Batch(samples.take(self.x, rows), self.y[rows])

    def pieces(self, size: int) -> "list[Batch]":
        """The batch in micro-batches of `size`, of which the last may be smaller; 0 leaves it whole."""
        return [self.take(rows) for rows in samples.pieces(len(self.y), size)]


class Runtime(Protocol):
    """A model for one thread."""

    def on(self, batch: Batch) -> Loss:
        """The loss on a batch, which is prepared once and then asked about many weights."""

    def outputs(self, weights: F32, batch: Batch) -> F32:
        """The model's outputs at these weights, a row for each sample."""


def joined(batches: "Sequence[Batch]") -> Batch:
    """The samples of several batches as one."""
    return Batch(samples.joined([batch.x for batch in batches]), np.concatenate([batch.y for batch in batches]))


@runtime_checkable
class SampleRuntime(Runtime, Protocol):
    """A runtime that can also give the loss of each sample, so that simulated clients can share a batch."""

    def samples_on(self, batch: Batch) -> SampleLosses:
        """The loss of each sample of a batch, which is prepared once and then asked about many weights."""


@runtime_checkable
class HeadRuntime(Runtime, Protocol):
    """A runtime that can also look into a model's last linear layer during a forward pass."""

    @property
    def head(self) -> Head:
        """Where that layer lies among the weights."""

    def head_on(self, batch: Batch, loss: Loss) -> LookIntoHead:
        """The loss on a batch and what a pass knows about the head. The loss is the one that `loss` gives, bit for bit:
        `on(batch)` made it."""


@runtime_checkable
class GradientRuntime(Runtime, Protocol):
    """A runtime that can also backpropagate: for the baseline, and to draw estimates from their law."""

    def gradient_on(self, batch: Batch, seed: int | None = 0) -> Callable[[F32], tuple[float, F32]]:
        """Loss and gradient at weights. The seed determines what is random in training, such as dropout; without one,
        the model is in evaluation mode, as for probes."""


class Transport(Protocol):
    """Carries a message to each client and brings back replies. Clients that do not answer are missing from these."""

    def exchange(self, requests: Mapping[int, bytes]) -> Mapping[int, bytes]: ...


CONTRIBUTED, MISSING = "contributed", "missing"
"""How a client ended a round. Any other text is the reason why its values are not in the sum."""


class Collected(NamedTuple):
    """How a round ended: the sum of each group (or none), how each client ended the round, how many clients were silent
    and how many abstained in each phase, what was refused (including abstentions), the bytes from and to each client,
    and the states that clients signed before the round."""

    sums: Sequence[Sum | None]
    events: Mapping[int, str]
    silent: Mapping[str, int]
    abstained: Mapping[str, int]
    refusals: Sequence[tuple[int, str]]
    uplink: Mapping[int, int]
    downlink: Mapping[int, int]
    states: Mapping[int, bytes] = MappingProxyType({})


class Aggregation(Protocol):
    """Sends requests to groups of clients and returns the sum of each group's replies, by a plain or a secure sum."""

    def collect(self, groups: Sequence[Mapping[int, RoundRequest]], transport: Transport) -> Collected: ...

    def forget(self, client: int) -> None:
        """Drop what is kept about a client that may have restarted."""
