"""Short trial runs on a plan's own training data: no journal, no secure sum, no test sample.

A part of every client's samples is held out, and trials are judged by the loss on these. Trials on one ground share
their keys, whatever their σ and rate are: the same batches and the same directions make small differences show.
"""

import math
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from baffle.client.worker import Worker, forwards_of
from baffle.core.arrays import F32, F64, I64
from baffle.core.chain import Present
from baffle.core.directions import Directions
from baffle.core.messages import Outcome
from baffle.core.ports import Batch
from baffle.core.probe import SCHEMES
from baffle.core.ring import RingVector, Sum, add
from baffle.core.seeds import permutation
from baffle.core.state import apply
from baffle.data.partition import share_out
from baffle.data.sources import Source
from baffle.errors import MessageError
from baffle.plan import Plan
from baffle.schedule import choose_groups
from baffle.server.round import close_round
from baffle.task.features import Backbones
from baffle.task.load import Runtimes, Task, load_task
from baffle.task.privacy import with_clip
from baffle.task.window import STEPS, Window, find_window, rms
from baffle.trajectory import Trajectory, distribution, optimizer, trajectory_of

HELD_OUT, MOST_HELD_OUT = 0.2, 512
"""The share of the training samples that judge trials, and the most of them."""

PIECES = 16
"""The held-out samples are judged in this many pieces, so that the scatter between pieces tells how sure a comparison
of two trials is."""

DIRECTIONS = 16
"""How many directions are probed to find a window."""

SMALL_RATE = 1e-3
"""At epoch level the optimizer's step is measured at this rate."""

REFERENCE_SIGMA, REFERENCE_RATE = 1e-3, 0.01
"""Keys of trials follow from the plan with these, so that advice does not depend on the σ and the rate that the plan
comes with."""


class Trial(NamedTuple):
    """A run that has come so far, under its settings."""

    trajectory: Trajectory
    present: Present

    @property
    def smooth_weights(self) -> F32:
        return self.trajectory.rule.smooth_weights(self.present.state)


@dataclass
class Spent:
    """What trials have cost so far, over all grounds."""

    forwards: int = 0
    rounds: int = 0


class Ground:
    """A plan's model and clients, with their samples but those held out."""

    def __init__(self, plan: Plan, data: str | Path | None, spent: Spent, backbones: Backbones | None = None) -> None:
        held_out: list[I64] = []

        def share(plan: Plan, source: Source) -> list[I64]:
            kept, out = split_off(share_out(plan, source), plan.seed)
            held_out.append(out)
            return kept

        task = load_task(with_settings(plan, REFERENCE_SIGMA, REFERENCE_RATE), data, backbones, share)
        self.task: Task
        self.task, self.why_clip = with_clip(task)
        self.initial = self.task.initial_weights()
        self._base = trajectory_of(self.task.plan, len(self.initial))
        self._runtimes = Runtimes(self.task, self._base.threads)
        pieces = np.array_split(held_out[0], min(PIECES, len(held_out[0])))
        self._judges = [self.task.source.train.batch(piece) for piece in pieces]
        self._spent = spent

    @property
    def plan(self) -> Plan:
        return self.task.plan

    @property
    def trajectory(self) -> Trajectory:
        return self._base

    @property
    def forwards_a_round(self) -> int:
        """Forward passes of all clients in one round, in the mean over rounds."""
        sizes = zip(self.task.tiers, self.task.shares, strict=True)
        each = [forwards_of(self._base, k, len(share)) for k, share in sizes]
        return round(self.plan.per_round * float(np.mean(each)))

    def begin(self, sigma: float, rate: float) -> Trial:
        """A trial at the initial weights."""
        plan = with_settings(self.plan, sigma, rate)
        rule = self._base.rule
        if plan.federation.level == "batch":
            rule = replace(rule, optimizer=optimizer(plan.update))
        trajectory = replace(self._base, plan=plan, rule=rule)
        return Trial(trajectory, Present(0, rule.start(self.initial), b""))

    def advance(self, trial: Trial, rounds: int) -> Trial:
        """The trial after more rounds. A round in which no loss is finite changes nothing."""
        with ThreadPoolExecutor(trial.trajectory.threads) as pool:
            for _ in range(rounds):
                trial = self._round(trial, pool)
        return trial

    def _round(self, trial: Trial, pool: ThreadPoolExecutor) -> Trial:
        trajectory, present = trial
        state = apply(trajectory.rule, present.state, self._outcome(trial, pool))
        return Trial(trajectory, Present(present.round + 1, state, b""))

    def _outcome(self, trial: Trial, pool: ThreadPoolExecutor) -> Outcome:
        trajectory, present = trial
        groups = choose_groups(trajectory, present.round)
        sums = [self._sum(trial, pool.map(partial(self._vector, trial), group)) for group in groups]
        self._count(trajectory, [client for group in groups for client in group])
        return close_round(trajectory, present, sums)

    def _count(self, trajectory: Trajectory, clients: Iterable[int]) -> None:
        sizes = [(self.task.tiers[client], len(self.task.shares[client])) for client in clients]
        self._spent.rounds += 1
        self._spent.forwards += sum(forwards_of(trajectory, k, samples) for k, samples in sizes)

    def _vector(self, trial: Trial, client: int) -> RingVector:
        return self._worker(trial.trajectory, client).vector(trial.present.round, trial.present.state.weights)

    def _worker(self, trajectory: Trajectory, client: int) -> Worker:
        task = self.task
        return Worker(
            client, task.tiers[client], trajectory, task.source.train, task.shares[client], self._runtimes.borrow
        )

    @staticmethod
    def _sum(trial: Trial, vectors: Iterable[RingVector]) -> Sum | None:
        received = list(vectors)
        try:
            return trial.trajectory.ring.decode(add(received), len(received))
        except MessageError:  # no client's loss is finite
            return None

    def losses(self, trial: Trial) -> F64:
        """The loss on each piece of the held-out samples, at the averaged weights; infinite where it is not finite."""
        weights = trial.smooth_weights

        def loss(batch: Batch) -> float:
            with self._runtimes.borrow() as runtime, np.errstate(all="ignore"):
                return float(runtime.on(batch)(weights))

        with ThreadPoolExecutor(trial.trajectory.threads) as pool:
            found = np.array(list(pool.map(loss, self._judges)))
        self._spent.forwards += len(found)
        return np.where(np.isfinite(found), found, np.inf)

    def unit_step(self, sigma: float) -> float:
        """The root mean square of the optimizer's first step at rate 1, over the weights."""
        if (
            self.plan.federation.level == "epoch"
        ):  # clients step by themselves; small steps are proportional to the rate
            trial = self.advance(self.begin(sigma, SMALL_RATE), 1)
            return rms(trial.present.state.weights.astype(np.float64) - self.initial) / SMALL_RATE
        trial = self.begin(sigma, 1.0)
        with ThreadPoolExecutor(trial.trajectory.threads) as pool:
            outcome = self._outcome(trial, pool)
        if outcome.kind == "skipped":
            return math.nan
        rule, state = trial.trajectory.rule, trial.present.state
        _, step = rule.optimizer.update(state.optimizer, rule.gradient(outcome), state.weights)
        return rms(step.astype(np.float64))

    def window(self, trial: Trial) -> Window:
        """Which σ measures derivatives at a trial's weights, on one client's batch."""
        plan, weights = self.plan, trial.present.state.weights
        batch = self.task.source.train.batch(self.task.shares[0][: plan.federation.batch or None])
        k = plan.probe.k
        supports = [trial.trajectory.supports[i * k // DIRECTIONS] for i in range(DIRECTIONS)]
        directions = Directions(bytes(32), distribution(plan.probe))
        scheme = SCHEMES[plan.probe.scheme]
        self._spent.forwards += len(STEPS) * (DIRECTIONS + 1 if plan.probe.scheme == "forward" else 2 * DIRECTIONS)
        with self._runtimes.borrow() as runtime:
            return find_window(runtime.on(batch), weights, scheme, directions, supports)

    def signal(self, trial: Trial) -> float | None:
        """The share of the variance of a round's scalars that is the gradient of all samples, not the choice of the
        round's samples: clients probe the same directions, so what their scalars have in common is signal. None if
        clients probe others, or if there is one client."""
        trajectory, present = trial
        (clients, *others) = choose_groups(trajectory, present.round)
        if self.plan.outcome_kind != "scalars" or others or len(clients) < 2 or self.plan.federation.tiers:
            return None
        if self.plan.privacy.on:  # a single client's vector is mostly noise
            return None
        with ThreadPoolExecutor(trajectory.threads) as pool:
            vectors = list(pool.map(partial(self._vector, trial), clients))
        self._count(trajectory, clients)
        try:
            sums = [trajectory.ring.decode(vector, 1) for vector in vectors]
        except MessageError:  # a loss is not finite
            return None
        scalars = np.stack([found.totals / (found.weight * trajectory.ring.scale) for found in sums])
        weights = np.array([found.weight for found in sums], dtype=np.float64)
        return shared_variance(scalars, weights / weights.sum())


def shared_variance(scalars: F64, weights: F64) -> float:
    """The share of the weighted mean's variance that its rows have in common, from 0 to 1. A row a client, a column a
    direction."""
    count = len(scalars)
    common = (np.sum(scalars, axis=0) ** 2 - np.sum(scalars**2, axis=0)) / (count * (count - 1))
    whole = np.mean((weights @ scalars) ** 2)
    return float(np.clip(np.mean(common) / whole, 0, 1)) if whole > 0 else 0.0


def with_settings(plan: Plan, sigma: float, rate: float) -> Plan:
    """The plan with another σ and another rate."""
    return msgspec.structs.replace(
        plan,
        probe=msgspec.structs.replace(plan.probe, sigma=sigma),
        update=msgspec.structs.replace(plan.update, rate=rate),
    )


def split_off(shares: list[I64], seed: int) -> tuple[list[I64], I64]:
    """What each client keeps of its samples, and those that are held out. A client keeps at least one."""
    total = sum(len(share) for share in shares)
    wanted = min(HELD_OUT, MOST_HELD_OUT / total)
    kept, out = [], []
    for number, share in enumerate(shares):
        order = share[permutation(seed.to_bytes(8, "big") + number.to_bytes(24, "big"), len(share))]
        count = min(int(len(share) * wanted + (number % 7) / 7), len(share) - 1)
        out.append(order[:count])
        kept.append(np.sort(order[count:]))
    return kept, np.concatenate(out)
