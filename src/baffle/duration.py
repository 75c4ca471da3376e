"""How long a simulation will take on this machine, from a few measured probes.

Two things are measured apart. Clients' work: a few directions of one batch, on all threads at once, since threads share
the machine's memory and caches. Everything else: real rounds, through the secure sum, the update and the journal, in
which clients compute nothing. Both take a second or two at most, however large the plan is.
"""

import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

import msgspec
import numpy as np

from baffle.client.client import Client
from baffle.client.replica import Replica
from baffle.client.worker import Worker, forwards_of
from baffle.core.arrays import F32
from baffle.core.ring import RingVector
from baffle.journal.store import Journal
from baffle.lineage import Lineage
from baffle.plan import PrivacySettings
from baffle.server.downlink import Downlink
from baffle.server.round import play_round
from baffle.simulation import aggregation
from baffle.task.load import Runtimes, Task, versions
from baffle.trajectory import Trajectory, trajectory_of
from baffle.transport.local import LocalTransport

WORK_SECONDS, ROUND_SECONDS = 0.6, 0.6
"""How long each of the two measurements goes on, beyond its first piece."""

FEW = 8
"""Directions of the first piece of work."""

MOST_ROUNDS = 10

TESTED = 64
"""Samples that an evaluation is predicted from."""


@dataclass(frozen=True)
class Duration:
    """Seconds, on this machine and with the plan's threads."""

    forward: float
    """One forward pass, with what a probe does around it, of one client among as many as there are threads."""
    overhead: float
    """A round without clients' work."""
    evaluation: float
    total: float


class Idle(Worker):
    """A worker that takes part and computes nothing."""

    def vector(self, _round_number: int, _weights: F32) -> RingVector:
        trajectory = self.trajectory
        nothing = np.zeros(trajectory.length)
        return trajectory.ring.encode(nothing, trajectory.length, trajectory.weight_of(len(self.indices)), 0.0)


Clock = Callable[[], float]
"""Seconds since some moment."""


def measure_duration(task: Task, clock: Clock = time.perf_counter) -> Duration:
    """Predict how long a simulation of a task takes, by a clock on the wall or by one that counts CPU time."""
    plan = task.plan
    with task.model.one_thread_each():
        trajectory = trajectory_of(plan, len(task.initial_weights()))
        runtimes = Runtimes(task, trajectory.threads)
        bare = trajectory_of(msgspec.structs.replace(plan, privacy=PrivacySettings()), trajectory.n)
        forward = _seconds_a_forward(task, bare, runtimes, clock)  # noise takes no time worth counting
        overhead = _seconds_a_round(task, trajectory, runtimes, clock)
        evaluation = _seconds_an_evaluation(task, trajectory, runtimes, clock)
    sizes = zip(task.tiers, task.shares, strict=True)
    forwards = float(np.mean([forwards_of(trajectory, k, len(share)) for k, share in sizes]))
    # The clients of a round are shared out among the threads; the last ones may leave threads without work.
    turns = -(-plan.per_round // trajectory.threads)
    evaluations = plan.rounds // plan.run.evaluate_every + (plan.rounds % plan.run.evaluate_every > 0)
    total = plan.rounds * (turns * forwards * forward + overhead) + evaluations * evaluation
    return Duration(forward, overhead, evaluation, total)


def _seconds_a_forward(task: Task, trajectory: Trajectory, runtimes: Runtimes, clock: Clock) -> float:
    """A client on every thread probes a few directions, then twice as many, up to all of a round while time allows.
    What does not grow with the directions is spread over as many of them as in a round, or nearly."""
    weights, most = task.initial_weights(), trajectory.plan.probe.k
    k, spent, passes = min(FEW, most), 0.0, 0
    began = clock()
    with ThreadPoolExecutor(trajectory.threads) as pool:
        for number in count():
            few = _with_directions(trajectory, k)
            workers = [_worker(task, few, client, runtimes) for client in range(trajectory.threads)]
            start = clock()
            list(pool.map(lambda worker, number=number: worker.vector(number, weights), workers))
            spent += clock() - start
            passes += forwards_of(few, k, len(workers[0].indices))
            if number and clock() - began > WORK_SECONDS:
                break
            if k < most or not number:
                k, spent, passes = min(2 * k, most), 0.0, 0
    return spent / passes


def _worker(task: Task, trajectory: Trajectory, client: int, runtimes: Runtimes) -> Worker:
    """A client with one batch of samples: at epoch level one local step is enough to know the others."""
    number = client % len(task.shares)
    batch = task.shares[number][: task.plan.federation.batch or None]
    return Worker(number, trajectory.plan.probe.k, trajectory, task.source.train, batch, runtimes.borrow)


def _with_directions(trajectory: Trajectory, k: int) -> Trajectory:
    """A trajectory of k directions, spread over those of a round; one local step at epoch level."""
    plan = trajectory.plan
    every = len(trajectory.supports)
    supports = tuple(trajectory.supports[i * every // k] for i in range(k))
    probe = msgspec.structs.replace(plan.probe, k=k, layout=())
    length = len(supports) if plan.outcome_kind == "scalars" else trajectory.length
    return replace(trajectory, plan=msgspec.structs.replace(plan, probe=probe), supports=supports, length=length)


def _seconds_a_round(task: Task, trajectory: Trajectory, runtimes: Runtimes, clock: Clock) -> float:
    """Rounds in which clients compute nothing. The first sets up the secure sum; if there are more, it is left out."""
    plan = trajectory.plan
    lineage = Lineage(trajectory)
    present = lineage.beginning(trajectory.rule.start(task.initial_weights()))
    replica = Replica(lineage, present)
    sums, sessions = aggregation(trajectory, task)
    clients = [
        Client(replica, Idle(number, k, trajectory, task.source.train, share, runtimes.borrow), sessions.get(number))
        for number, (k, share) in enumerate(zip(task.tiers, task.shares, strict=True))
    ]
    seconds = list[float]()
    began = clock()
    with (
        tempfile.TemporaryDirectory() as folder,
        Journal.create(Path(folder) / "journal.sqlite", plan, present.state, versions(task.model)) as journal,
        LocalTransport(lambda number, data: clients[number].answer(data), trajectory.threads) as transport,
    ):
        downlink = Downlink(plan.run.downlink, journal, lineage)
        for number in range(len(clients)):
            downlink.holds(number, 0)
        while len(seconds) < MOST_ROUNDS and (not seconds or clock() - began < ROUND_SECONDS):
            start = clock()
            present = play_round(trajectory, present, transport, sums, journal, downlink).present
            seconds.append(clock() - start)
    return float(np.mean(seconds[1:] or seconds))


def _seconds_an_evaluation(task: Task, trajectory: Trajectory, runtimes: Runtimes, clock: Clock) -> float:
    """The test set at the averaged and at the last weights, by a few samples of it."""
    if not task.source.has_test:
        return 0.0
    test, weights = task.source.test, task.initial_weights()
    few = test.batch(np.arange(min(TESTED, len(test))))
    with runtimes.borrow() as runtime:
        start = clock()
        runtime.outputs(weights, few)
        seconds = (clock() - start) * len(test) / len(few.y)
    return seconds if trajectory.threads > 1 or not trajectory.plan.update.ema else 2 * seconds
