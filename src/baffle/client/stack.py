"""Simulated clients as one: the samples of all clients of a round go through the model together.

At batch level with shared seeds all of them are asked about the same moved weights. So a sample's loss is the same in
whoever's batch it is, up to rounding, and each client gets the mean over its own samples.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from baffle.client.worker import BorrowRuntime, Work, Worker
from baffle.core.arrays import F32, F64
from baffle.core.ports import Batch, SampleRuntime, joined
from baffle.core.probe import SCHEMES
from baffle.core.ring import RingVector
from baffle.core.samples import pieces
from baffle.errors import RefusalError
from baffle.schedule import choose_groups
from baffle.trajectory import Trajectory

IsAway = Callable[[int, int], bool]
"""Round and client → whether the client is not asked."""


class Stack:
    """The workers of all clients. The first vector of a round that is asked for brings those of all its clients.

    Clients with the same directions make up one batch, which is cut into the plan's micro-batches. Threads share these,
    so no bit depends on how many threads there are.
    """

    def __init__(
        self,
        trajectory: Trajectory,
        workers: Mapping[int, Worker],
        borrow: BorrowRuntime,
        is_away: IsAway = lambda _round, _client: False,
    ) -> None:
        self._trajectory = trajectory
        self._workers = workers
        self._borrow = borrow
        self._is_away = is_away
        self._lock = threading.Lock()
        self._round = -1
        self._vectors: Mapping[int, RingVector] = {}

    def worker(self, client: int) -> "StackedWorker":
        return StackedWorker(client, self)

    def vector(self, client: int, round_number: int, weights: F32) -> RingVector:
        """What a client contributes to a round."""
        with self._lock:
            if self._round != round_number:
                self._vectors = self.vectors(round_number, weights)
                self._round = round_number
            return self._vectors[client]

    def vectors(self, round_number: int, weights: F32) -> dict[int, RingVector]:
        """What each client of a round contributes to it."""
        alike = dict[tuple[int, int], list[int]]()  # clients by the key and the number of their directions
        for group, clients in enumerate(choose_groups(self._trajectory, round_number)):
            key = self._trajectory.key_number(round_number, group)
            for client in clients:
                if not self._is_away(round_number, client):
                    alike.setdefault((key, self._workers[client].k), []).append(client)
        found = dict[int, RingVector]()
        for (key, k), clients in alike.items():
            found |= self._probed(sorted(clients), key, k, round_number, weights)
        return found

    def _probed(
        self, clients: Sequence[int], key: int, k: int, round_number: int, weights: F32
    ) -> dict[int, RingVector]:
        """The vectors of clients that probe the same directions."""
        batches = [self._workers[client].batch_of_round(round_number) for client in clients]
        scalars, losses = self._scalars(joined(batches), key, k, weights)
        stops = np.cumsum([len(batch.y) for batch in batches])
        rows = [slice(stop - len(batch.y), stop) for stop, batch in zip(stops, batches, strict=True)]
        return {
            client: self._workers[client].encoded(Work(scalars[:, own].mean(axis=1), float(losses[own].mean())))
            for client, own in zip(clients, rows, strict=True)
        }

    def _scalars(self, batch: Batch, key: int, k: int, weights: F32) -> tuple[F64, F64]:
        """A row of scalars for each direction, with a column for each sample; and each sample's loss."""
        trajectory, probe = self._trajectory, self._trajectory.plan.probe
        directions, supports = trajectory.directions(key), trajectory.supports[:k]

        def work(rows: slice) -> tuple[F64, F64]:
            with self._borrow() as runtime, np.errstate(over="ignore", divide="ignore", invalid="ignore"):
                if not isinstance(runtime, SampleRuntime):
                    raise RefusalError("this runtime gives the mean loss of a batch alone; leave probe.stacked out")
                losses = runtime.samples_on(batch.take(rows))
                probed = SCHEMES[probe.scheme](losses, weights, directions, supports, probe.sigma, trajectory.block)
                return probed.scalars, probed.base

        micro_batches = -(-len(batch.y) // probe.micro_batch)
        each = -(-micro_batches // trajectory.threads) * probe.micro_batch
        with ThreadPoolExecutor(trajectory.threads, thread_name_prefix="stack") as pool:
            parts = list(pool.map(work, pieces(len(batch.y), each)))
        return np.concatenate([part[0] for part in parts], axis=1), np.concatenate([part[1] for part in parts])


@dataclass(frozen=True)
class StackedWorker:
    """One client's place in a stack."""

    client: int
    stack: Stack

    def vector(self, round_number: int, weights: F32) -> RingVector:
        return self.stack.vector(self.client, round_number, weights)
