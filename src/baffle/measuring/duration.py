"""How long a simulation will take on this machine, from a few real rounds.

The rounds have one direction at first, then twice as many, up to all of the plan's while time allows. A round's time
grows in proportion to its forward passes, so the rest is extrapolated. At epoch level clients take one local step, and
their work grows in proportion to the steps.
"""

import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from baffle.client.worker import Stack, forwards_of, local_steps
from baffle.core.directions import LayoutEntry, rows_of
from baffle.core.ports import Runtime
from baffle.federation import federation, sums_of, workers_of
from baffle.journal.store import Journal
from baffle.lineage import Lineage
from baffle.plan import Plan, PrivacySettings
from baffle.server.downlink import Downlink
from baffle.server.round import play_round
from baffle.stopwatch import Clock, Stopwatch
from baffle.task.load import Runtimes, Task, versions
from baffle.task.server_task import with_settings
from baffle.trajectory import Trajectory, trajectory_of

SECONDS = 1.0  # no longer rounds are tried after this time
TESTED = 64  # samples that an evaluation is predicted from


@dataclass(frozen=True)
class Duration:
    """Seconds, on this machine and with the plan's threads."""

    work: float  # clients' work in a round
    overhead: float  # the rest of a round
    evaluation: float
    total: float


@dataclass(frozen=True)
class TimedRuntimes:
    """Runtimes that count the seconds for which they are borrowed: that is clients' work."""

    runtimes: Runtimes
    clock: Clock
    seconds: list[float] = field(default_factory=list)

    @contextmanager
    def borrow(self) -> Iterator[Runtime]:
        with self.runtimes.borrow() as runtime:
            began = self.clock()
            try:
                yield runtime
            finally:  # with few directions, a slow client's vector may not fit the ring
                self.seconds.append(self.clock() - began)


class Point(NamedTuple):
    """A round that was played: a client's mean forward passes, seconds of clients' work, seconds of the rest."""

    forwards: float
    work: float
    rest: float


def measure_duration(task: Task, clock: Clock = time.perf_counter) -> Duration:
    """Predict how long a simulation of a task takes, by a clock on the wall or by one that counts CPU time."""
    plan = task.plan
    with task.model.one_thread_each():
        trajectory = trajectory_of(plan, len(task.initial_weights()))
        runtimes = TimedRuntimes(Runtimes(task, trajectory.threads), clock)
        every = len(trajectory.supports) if task.probes else 1
        k, began = 1, clock()
        points = [_played_with(task, trajectory, k, runtimes)]
        while k < every and clock() - began <= SECONDS:
            k = min(2 * k, every)
            points.append(_played_with(task, trajectory, k, runtimes))
        round_ = _whole_round(task, trajectory, points)
        evaluation = _seconds_an_evaluation(task, trajectory, runtimes)
    rounds = trajectory.steps_before(plan.rounds) / plan.federation.local_steps  # short ones count by their steps
    total = rounds * (round_.work + round_.rest) + -(-plan.rounds // plan.run.evaluate_every) * evaluation
    return Duration(round_.work, round_.rest, evaluation, total)


def _played_with(task: Task, trajectory: Trajectory, k: int, runtimes: TimedRuntimes) -> Point:
    """A round with k directions. It is the second one, since the first sets up the secure sum."""
    tiers, few = [min(k, tier) for tier in task.tiers], trajectory_of(_with_few_directions(trajectory, k), trajectory.n)
    lineage = Lineage(few)
    present = lineage.beginning(few.rule.start(task.initial_weights()))
    workers = workers_of(task, few, runtimes.borrow, tiers)
    stack = Stack(few, dict(enumerate(workers)), runtimes.borrow) if few.plan.probe.stacked else None
    seconds = 0.0
    with (
        tempfile.TemporaryDirectory() as folder,
        Journal.create(Path(folder) / "journal.sqlite", few.plan, present.state, versions(task.model)) as journal,
        federation(few.threads, sums_of(few, task)) as clients,
    ):
        downlink = Downlink(few.plan.run.downlink, journal, lineage)
        clients.enter(lineage, present, workers, downlink, stack)
        for _ in range(2):
            runtimes.seconds.clear()
            began = runtimes.clock()
            present = play_round(few, present, clients, clients, journal, downlink).present
            seconds = runtimes.clock() - began
    work = min(sum(runtimes.seconds) / few.threads, seconds)
    return Point(float(np.mean([forwards_of(few, tier, 1) for tier in tiers])), work, seconds - work)


def _with_few_directions(trajectory: Trajectory, k: int) -> Plan:
    """The plan with k directions, spread over those of a step, and one local step at epoch level. At batch level the
    second round has all steps. Noise takes no time worth counting."""
    plan, every = trajectory.plan, trajectory.supports
    spread = Counter(every[i * len(every) // k] for i in range(k)) if plan.probe.layout else {}
    layout = tuple(rows_of(tuple(LayoutEntry(support, count) for support, count in spread.items())))
    epoch = {"steps": 1, "epochs": 1} if plan.federation.level == "epoch" else {}
    few = with_settings(plan, probe={"k": k, "layout": layout}, federation={"tiers": (), "warm_up": 1, **epoch})
    return msgspec.structs.replace(few, rounds=max(plan.rounds, 2), privacy=PrivacySettings())


def _whole_round(task: Task, trajectory: Trajectory, points: list[Point]) -> Point:
    """A round of the plan, on the line through the two largest rounds that were played."""
    *_, last = points
    before = points[-2] if len(points) > 1 else Point(0, 0.0, last.rest)
    clients = list(zip(task.tiers, task.shares, strict=True))
    steps = [local_steps(trajectory.plan, len(share)) for _, share in clients]
    steps = steps if trajectory.plan.federation.level == "epoch" else [1]
    mean = float(np.mean([forwards_of(trajectory, k, len(share)) for k, share in clients])) / float(np.mean(steps))

    def at(forwards: float, seconds: float, seconds_before: float) -> float:
        slope = max(0.0, seconds - seconds_before) / (last.forwards - before.forwards)
        return seconds + slope * (forwards - last.forwards)

    work, rest = at(mean, last.work, before.work), at(mean, last.rest, before.rest)
    return Point(mean, work * float(np.mean(steps)), rest)


def _seconds_an_evaluation(task: Task, trajectory: Trajectory, runtimes: TimedRuntimes) -> float:
    """The test set at the averaged and at the last weights, by a few samples of it."""
    if not task.source.has_test:
        return 0.0
    test, weights = task.source.test, task.initial_weights()
    few = test.batch(np.arange(min(TESTED, len(test))))
    with runtimes.borrow() as runtime:
        seconds = Stopwatch(runtimes.clock).seconds(lambda: runtime.outputs(weights, few)) * len(test) / len(few.y)
    return seconds if trajectory.threads > 1 or not trajectory.plan.update.ema else 2 * seconds
