"""Short trial runs on a plan's own training data: no journal, no secure sum, no test sample.

A part of every client's samples is held out, and trials are judged by the loss on these. Trials on one ground share
their keys, whatever their σ and rate are: the same batches and the same directions make small differences show.
"""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from baffle.client.worker import forwards_of
from baffle.core.arrays import F64, I64, rms
from baffle.core.messages import Outcome
from baffle.core.ports import Batch
from baffle.core.probe import SCHEMES
from baffle.core.ring import RingVector, Sum, add
from baffle.core.seeds import permutation
from baffle.core.state import Present, apply
from baffle.data.partition import share_out
from baffle.errors import MessageError
from baffle.federation import workers_of
from baffle.measuring.precision import Window, few_directions, find_window, steps_of
from baffle.measuring.privacy import with_clip
from baffle.plan import Plan
from baffle.schedule import choose_groups
from baffle.server.round import close_round
from baffle.task.features import Backbones
from baffle.task.load import Runtimes, Task, load_task
from baffle.task.server_task import with_settings
from baffle.trajectory import Trajectory, optimizer, trajectory_of

HELD_OUT, MOST_HELD_OUT = 0.2, 512  # the share of the training samples that judge trials, and the most of them

PIECES = 16  # of the held-out samples: the scatter between them tells how sure a comparison of two trials is
DIRECTIONS = 16  # how many directions are probed to find a window
SMALL_RATE = 1e-3  # at epoch level the optimizer's step is measured at this rate

TRIAL_WARM_UP = 3  # rounds of one step, before those of several

REFERENCE_SIGMA, REFERENCE_RATE = 1e-3, 0.01
"""Keys of trials follow from the plan with these, so that advice does not depend on the σ and the rate that the plan
comes with."""


class Trial(NamedTuple):
    """A trial run and its present state."""

    trajectory: Trajectory
    present: Present


@dataclass
class Spent:
    """What trials have cost so far, over all grounds."""

    forwards: int = 0
    rounds: int = 0


Loader = Callable[[Plan, Callable[[list[I64]], list[I64]]], Task]
"""Loads a plan's task. Each client's samples pass through a function, which returns those that trials train on."""


def from_folder(data: str | Path | None = None) -> Loader:
    """Loads what a plan names. Tasks share the features of a frozen backbone."""
    backbones = Backbones()
    return lambda plan, keep: load_task(plan, data, backbones, lambda of, source: keep(share_out(of, source)))


class Ground:
    """A plan's model and its clients, without the samples that are held out. `asked` is the plan as it was given."""

    def __init__(self, plan: Plan, load: Loader, spent: Spent) -> None:
        self.asked, self.spent, self._load = plan, spent, load
        held_out: list[I64] = []

        def keep(shares: list[I64]) -> list[I64]:
            kept, out = split_off(shares, plan.seed)
            held_out.append(out)
            return kept

        task = load(_with_step(_warmed_up_soon(plan), REFERENCE_SIGMA, REFERENCE_RATE), keep)
        self.task: Task
        self.task, self.why_clip = with_clip(task)
        self.plan, self.initial = self.task.plan, self.task.initial_weights()
        self.trajectory = trajectory_of(self.plan, len(self.initial))
        self._runtimes = Runtimes(self.task, self.trajectory.threads)
        pieces = np.array_split(held_out[0], min(PIECES, len(held_out[0])))
        self._judges = [self.task.source.train.batch(piece) for piece in pieces]

    def of(self, plan: Plan, *, counted: bool = True) -> "Ground":
        """The ground of another plan with the same data. What its trials cost may be left uncounted."""
        return Ground(plan, self._load, self.spent if counted else Spent())

    @property
    def forwards_a_round(self) -> int:
        """Forward passes of all clients in one round, in the mean over rounds."""
        sizes = zip(self.task.tiers, self.task.shares, strict=True)
        each = [forwards_of(self.trajectory, k, len(share)) for k, share in sizes]
        return round(self.plan.per_round * float(np.mean(each)))

    def begin(self, sigma: float, rate: float) -> Trial:
        """A trial at the initial weights."""
        plan, rule = _with_step(self.plan, sigma, rate), self.trajectory.rule
        if plan.federation.level == "batch":
            rule = replace(rule, optimizer=optimizer(plan.update))
        return Trial(replace(self.trajectory, plan=plan, rule=rule), Present(0, rule.start(self.initial), b""))

    def advance(self, trial: Trial, rounds: int) -> Trial:
        """The trial after more rounds. A round in which no loss is finite changes nothing."""
        for _ in range(rounds):
            trajectory, present = trial
            state = apply(trajectory.rule, present.state, self._outcome(trial))
            trial = Trial(trajectory, Present(present.round + 1, state, b""))
        return trial

    def _outcome(self, trial: Trial) -> Outcome:
        trajectory, present = trial
        sums = list[Sum | None]()
        for group in choose_groups(trajectory, present.round):
            vectors = self._vectors(trial, group)
            try:
                sums.append(trajectory.ring.decode(add(vectors), len(vectors)))
            except MessageError:  # no client's loss is finite
                sums.append(None)
        self.spent.rounds += 1
        return close_round(trajectory, present, sums)

    def _vectors(self, trial: Trial, clients: Sequence[int]) -> list[RingVector]:
        """What these clients contribute to the trial's present round."""
        trajectory, present = trial
        all_workers = workers_of(self.task, trajectory, self._runtimes.borrow)
        workers = [all_workers[client] for client in clients]
        self.spent.forwards += sum(forwards_of(trajectory, worker.k, len(worker.indices)) for worker in workers)
        with ThreadPoolExecutor(trajectory.threads) as pool:
            return list(
                pool.map(
                    lambda worker: worker.vector(present.round, present.state.weights, present.state.optimizer), workers
                )
            )

    def losses(self, trial: Trial) -> F64:
        """The loss on each piece of the held-out samples, at the averaged weights; infinite where it is not finite."""
        weights = trial.trajectory.rule.smooth_weights(trial.present.state)

        def loss(batch: Batch) -> float:
            with self._runtimes.borrow() as runtime, np.errstate(all="ignore"):
                return float(runtime.on(batch)(weights))

        with ThreadPoolExecutor(trial.trajectory.threads) as pool:
            found = np.array(list(pool.map(loss, self._judges)))
        self.spent.forwards += len(found)
        return np.where(np.isfinite(found), found, np.inf)

    def unit_step(self, sigma: float) -> float:
        """The root mean square of the optimizer's first step at rate 1, over the weights."""
        if self.plan.federation.level == "epoch":  # clients take the steps; small ones are proportional to the rate
            trial = self.advance(self.begin(sigma, SMALL_RATE), 1)
            return rms(trial.present.state.weights.astype(np.float64) - self.initial) / SMALL_RATE
        trial = self.begin(sigma, 1.0)
        outcome = self._outcome(trial)
        if outcome.kind == "skipped":
            return math.nan
        rule, state = trial.trajectory.rule, trial.present.state
        _, step = rule.optimizer.update(state.optimizer, rule.gradient(outcome), state.weights)
        return rms(step)

    def window(self, trial: Trial) -> Window:
        """Which σ measures derivatives at a trial's weights, on one client's batch."""
        scheme, few = SCHEMES[self.plan.probe.scheme], few_directions(trial.trajectory, DIRECTIONS)
        steps = steps_of(self.task)
        self.spent.forwards += len(steps) * scheme.forwards(DIRECTIONS)
        with self._runtimes.borrow() as runtime:
            loss = runtime.on(self.task.first_batch())
            return find_window(loss, trial.present.state.weights, scheme, *few, steps, rounded=self.task.model.rounds)

    def signal(self, trial: Trial) -> float | None:
        """The share of the variance of a round's scalars that is the gradient of all samples, not the choice of the
        round's samples: clients probe the same directions, so what their scalars have in common is signal. None if
        clients probe others, or if there is one client."""
        trajectory, present = trial
        (clients, *others) = choose_groups(trajectory, present.round)
        if self.plan.outcome_kind != "scalars" or others or len(clients) < 2 or self.plan.federation.tiers:
            return None
        if not trajectory.supports:  # an exact head is all of the model
            return None
        if self.plan.privacy.on:  # a single client's vector is mostly noise
            return None
        self.spent.rounds += 1
        try:
            sums = [trajectory.ring.decode(vector, 1) for vector in self._vectors(trial, clients)]
        except MessageError:  # a loss is not finite
            return None
        scalars = np.stack([trajectory.means(trajectory.of_step(found.totals, 0), found.weight)[0] for found in sums])
        weights = np.array([found.weight for found in sums], dtype=np.float64)
        return shared_variance(scalars, weights / weights.sum())


def shared_variance(scalars: F64, weights: F64) -> float:
    """The share of the weighted mean's variance that its rows have in common, from 0 to 1. A row a client, a column a
    direction."""
    count = len(scalars)
    common = (np.sum(scalars, axis=0) ** 2 - np.sum(scalars**2, axis=0)) / (count * (count - 1))
    whole = np.mean((weights @ scalars) ** 2)
    return float(np.clip(np.mean(common) / whole, 0, 1)) if whole > 0 else 0.0


def _warmed_up_soon(plan: Plan) -> Plan:
    """The plan with few rounds of one step, so that short trials have rounds of several."""
    if plan.federation.local_steps == 1:
        return plan
    return with_settings(plan, federation={"warm_up": min(plan.federation.warm_up, TRIAL_WARM_UP)})


def _with_step(plan: Plan, sigma: float, rate: float) -> Plan:
    """The plan of a trial, which is too short for a schedule of the rate."""
    constant = {"schedule": "constant", "schedule_rounds": 0, "schedule_source": ""}
    return with_settings(plan, probe={"sigma": sigma}, update={"rate": rate, **constant})


def split_off(shares: list[I64], seed: int) -> tuple[list[I64], I64]:
    """The samples that each client keeps, at least one, and those that are held out."""
    total = sum(len(share) for share in shares)
    wanted = min(HELD_OUT, MOST_HELD_OUT / total)
    kept, out = [], []
    for number, share in enumerate(shares):
        order = share[permutation(seed.to_bytes(8, "big") + number.to_bytes(24, "big"), len(share))]
        count = min(int(len(share) * wanted + (number % 7) / 7), len(share) - 1)
        out.append(order[:count])
        kept.append(np.sort(order[count:]))
    return kept, np.concatenate(out)
