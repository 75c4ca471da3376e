"""A simulated run round by round, with the CPU time that its rounds took, for benchmarks that stop by the clock."""

import tempfile
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path

from baffle.core.ports import Batch
from baffle.federation import federation, sums_of, workers_of
from baffle.journal.store import Journal
from baffle.lineage import Lineage
from baffle.runtime.torch.loss import accuracy
from baffle.server.downlink import Downlink
from baffle.server.round import play_round
from baffle.task.load import Runtimes, Task, versions
from baffle.trajectory import trajectory_of


@dataclass(frozen=True)
class Progress:
    """A run after some rounds."""

    rounds: int
    seconds: float
    """CPU time of the rounds so far, clients and server together."""
    uplink_bytes: int
    """What a client sent in the last round."""
    accuracy: Callable[[Batch], float]
    """That of the averaged weights. It is not on the clock."""


def training(task: Task) -> Generator[Progress]:
    """Play rounds without end. Clients are asked one after the other."""
    plan, initial, spent = task.plan, task.initial_weights(), 0.0
    trajectory = trajectory_of(plan, len(initial))
    lineage = Lineage(trajectory)
    present = lineage.beginning(trajectory.rule.start(initial))
    runtimes = Runtimes(task, 1)

    def measured(batch: Batch) -> float:
        with runtimes.borrow() as runtime:
            return round(accuracy(runtime, trajectory.rule.smooth_weights(present.state), batch), 4)

    with (
        tempfile.TemporaryDirectory() as folder,
        Journal.create(Path(folder) / "journal.sqlite", plan, present.state, versions(task.model)) as journal,
        federation(1, sums_of(trajectory, task)) as clients,
    ):
        downlink = Downlink(plan.run.downlink, journal, lineage)
        clients.enter(lineage, present, workers_of(task, trajectory, runtimes.borrow), downlink)
        while True:
            began = time.process_time()
            played = play_round(trajectory, present, clients, clients, journal, downlink)
            spent += time.process_time() - began
            present = played.present
            yield Progress(present.round, spent, played.metrics["uplink_bytes"] // plan.per_round, measured)
