"""The half of a client that computes: samples in, forward passes, one vector out. It sends and receives nothing."""

import math
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import count, islice
from typing import NamedTuple

import numpy as np

from baffle.core.arrays import F32, F64, I64
from baffle.core.directions import Directions
from baffle.core.ports import Batch, GradientRuntime, Runtime
from baffle.core.probe import SCHEMES
from baffle.core.rebuild import gradient_from_scalars
from baffle.core.ring import Ring, RingVector
from baffle.core.seeds import batch_indices, permutation
from baffle.data.sources import Dataset
from baffle.errors import RefusalError
from baffle.plan import Plan
from baffle.privacy.skellam import Randomness
from baffle.schedule import key_number_of
from baffle.trajectory import Trajectory, distribution, optimizer

BorrowRuntime = Callable[[], AbstractContextManager[Runtime]]
"""Lends a runtime while a vector is computed, so that a process needs one per thread instead of one per client."""


class Work(NamedTuple):
    """What a client computed, before it becomes integers."""

    values: F64
    loss: float
    clipped: int = 0


@dataclass(frozen=True)
class Worker:
    """One client's samples (`indices` into a data set) and what it computes on them.

    `number` is the client's number, which determines its batches and its own directions. The client evaluates the first
    `k` directions of a round.
    """

    number: int
    k: int
    trajectory: Trajectory
    data: Dataset
    indices: I64
    borrow: BorrowRuntime
    random: Randomness = os.urandom
    """Where the noise of a private run comes from: nobody may be able to repeat it."""

    def vector(self, round_number: int, weights: F32) -> RingVector:
        """What this client contributes to a round at these weights, as integers. Whatever its losses are, it takes all
        steps and gives a vector: one that is not finite becomes the ring's `nothing`. In a private run each call draws
        other noise, so whoever sends what it gives must call it once for a question."""
        with self.borrow() as runtime, np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            work = self._work(round_number, weights, runtime)
        return self.encoded(work)

    def encoded(self, work: Work) -> RingVector:
        """What was computed, as integers, with this client's weight."""
        weight = self.trajectory.weight_of(len(self.indices))
        vector = self.trajectory.ring.encode(work.values, self.trajectory.length, weight, work.loss, work.clipped)
        private = self.trajectory.private
        return private.noised(vector, self.random) if private else vector

    def _work(self, number: int, weights: F32, runtime: Runtime) -> Work:
        plan = self.trajectory.plan
        if plan.federation.level == "epoch":
            return self._train_locally(number, weights, runtime)
        batch = self.batch_of_round(number)
        if plan.outcome_kind == "vector":
            key = self.trajectory.seeds(number).key("local", number, self.number, 0)
            work, gradient = self._estimate(weights, batch, key, runtime)
            return work._replace(values=gradient.astype(np.float64))
        probe = SCHEMES[plan.probe.scheme]
        supports = self.trajectory.supports[: self.k]
        directions = self.trajectory.directions(key_number_of(self.trajectory, number, self.number))
        block = self.trajectory.block
        probed = probe(runtime.on(batch), weights, directions, supports, plan.probe.sigma, block)
        return Work(probed.scalars, probed.base)

    def _train_locally(self, round_number: int, weights: F32, runtime: Runtime) -> Work:
        """Epoch level: several steps with this client's own keys, and an optimizer that starts fresh every round."""
        plan, seeds = self.trajectory.plan, self.trajectory.seeds(round_number)
        step = optimizer(plan.update)
        here, state, losses, clipped = weights, step.init(weights), list[float](), 0
        steps = local_steps(plan, len(self.indices))
        for number, indices in enumerate(islice(self._local_batches(round_number), steps)):
            key = seeds.key("local", round_number, self.number, number)
            batch = self._augmented(indices, round_number, number)
            work, gradient = self._estimate(here, batch, key, runtime)
            state, change = step.update(state, gradient, here)
            here = here + change
            losses.append(work.loss)
            clipped += work.clipped
        return Work(weights.astype(np.float64) - here, float(np.mean(losses)), clipped)

    def _local_batches(self, round_number: int) -> Iterator[I64]:
        """Lap after lap through this client's samples, each lap in another order. A lap's last batch may be smaller."""
        n, size = len(self.indices), self.trajectory.plan.federation.batch or len(self.indices)
        for lap in count():
            key = self.trajectory.seeds(round_number).key("batches", round_number, self.number, lap)
            order = permutation(key, n)
            yield from (order[start : start + size] for start in range(0, n, size))

    def _estimate(self, weights: F32, batch: Batch, key: bytes, runtime: Runtime) -> tuple[Work, F32]:
        """The gradient on a batch, estimated by this client alone. Its scalars pass through a ring for one client, so
        that the same bits come out on every machine. If one of them is not finite, neither is the loss that is
        returned, and the work goes on with zeros, so that it takes no less time."""
        plan, trajectory = self.trajectory.plan, self.trajectory
        if plan.estimator == "backprop":
            loss, gradient = _gradient(runtime, batch, weights, int.from_bytes(key[:8], "big") >> 1)
            return Work(np.empty(0), loss), gradient
        directions = Directions(key, distribution(plan.probe))
        probed = SCHEMES[plan.probe.scheme](
            runtime.on(batch), weights, directions, trajectory.supports, plan.probe.sigma, trajectory.block
        )
        finite = math.isfinite(probed.base) and bool(np.isfinite(probed.scalars).all())
        scalars, loss = (probed.scalars, probed.base) if finite else (np.zeros_like(probed.scalars), 0.0)
        alone = Ring(clients=1, n_max=1, clip=plan.ring.d_max)
        total = alone.decode(alone.encode(scalars, len(scalars), 1, loss), 1)
        gradient = gradient_from_scalars(
            total.totals, 1, directions, trajectory.supports, trajectory.n, alone, block=trajectory.block
        )
        return Work(scalars, loss if finite else math.nan, total.clipped), gradient

    def batch_of_round(self, round_number: int) -> Batch:
        """The samples that this client probes on in a round, at batch level."""
        n, size = len(self.indices), self.trajectory.plan.federation.batch
        if not 0 < size < n:
            return self._augmented(np.arange(n), round_number, 0)
        seeds = self.trajectory.seeds(round_number)
        chosen = batch_indices(lambda lap: seeds.key("batches", lap, self.number), n, size, round_number)
        return self._augmented(chosen, round_number, 0)

    def _augmented(self, chosen: I64, round_number: int, step: int) -> Batch:
        """The chosen samples of this client, augmented as the plan's keys determine for this step of the round."""
        plan, seeds = self.trajectory.plan, self.trajectory.seeds(round_number)
        key = seeds.key("augment", round_number, self.number, step) if plan.task.augment else None
        return self.data.batch(self.indices[chosen], key)


def _gradient(runtime: Runtime, batch: Batch, weights: F32, seed: int) -> tuple[float, F32]:
    if not isinstance(runtime, GradientRuntime):
        raise RefusalError("the plan asks for backpropagation, but this client can only run inference")
    return runtime.gradient_on(batch, seed)(weights)


def local_steps(plan: Plan, samples: int) -> int:
    """How many steps one client takes in one round at epoch level."""
    federation = plan.federation
    return federation.steps or federation.epochs * -(-samples // (federation.batch or samples))


def forwards_of(trajectory: Trajectory, k: int, samples: int) -> int:
    """How many forward passes one client runs in one round (a backpropagation counts as one forward pass)."""
    plan = trajectory.plan
    per_step = {"forward": k + 1, "central": 2 * k}[plan.probe.scheme] if plan.estimator == "probe" else 1
    return per_step if plan.federation.level == "batch" else per_step * local_steps(plan, samples)
