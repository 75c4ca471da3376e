"""The computing half of a client: samples in, forward passes, one vector out. It sends and receives nothing.

Simulated clients can be stacked: the samples of all clients of a round go through the model together. At batch level
with shared seeds, all clients probe the same moved weights. So a sample's loss does not depend on whose batch it is in,
up to rounding, and each client gets the mean over its own samples.
"""

import math
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import count, islice
from typing import NamedTuple

import numpy as np

from baffle.core.arrays import F32, F64, I64
from baffle.core.directions import Directions, Support
from baffle.core.head import Head, HeadPass
from baffle.core.local_steps import Walk, scaled
from baffle.core.ports import Batch, GradientRuntime, HeadRuntime, Runtime, SampleRuntime, joined
from baffle.core.probe import SCHEMES, StructuredLoss, counted, scalars_of
from baffle.core.rebuild import gradient_from_scalars
from baffle.core.ring import EXTRAS, NO_HEAD, Ring, RingVector, Totals
from baffle.core.samples import pieces
from baffle.core.seeds import batch_indices, permutation
from baffle.core.state import distance
from baffle.core.update import State
from baffle.data.sources import Dataset
from baffle.errors import RefusalError
from baffle.plan import Derivatives, Plan
from baffle.plan.arithmetic import distribution, share_of
from baffle.privacy.skellam import Randomness
from baffle.schedule import choose_groups, key_number_of
from baffle.trajectory import Trajectory, head_of, optimizer

BorrowRuntime = Callable[[], AbstractContextManager[Runtime]]
"""Lends a runtime while a vector is computed, so that a process needs one per thread instead of one per client."""


class Work(NamedTuple):
    """What a client computed, before it becomes integers."""

    values: F64
    loss: float
    clipped: int = 0
    head: F64 = NO_HEAD

    def is_finite(self) -> bool:
        return math.isfinite(self.loss) and all(bool(np.isfinite(part).all()) for part in (self.values, self.head))

    def blank(self) -> "Work":
        """As many zeros."""
        return Work(np.zeros_like(self.values), 0.0, 0, np.zeros_like(self.head))


@dataclass(frozen=True)
class Worker:
    """One client's samples (`indices` into a data set) and what it computes on them.

    `number` is the client's number, which determines its batches and its own directions. The client evaluates the first
    `k` directions of a round. `batch` is how many samples it uses at once, if not as many as the plan says; with 0
    it takes all steps, and then sends zeros.
    """

    number: int
    k: int
    trajectory: Trajectory
    data: Dataset
    indices: I64
    borrow: BorrowRuntime
    random: Randomness = os.urandom
    """The source of the noise of a private run. It must be unpredictable."""
    batch: int | None = None
    passed: Callable[[int], None] = lambda _passes: None
    """Called with the number of passes that this client has just made: 1, or many that were made at once."""
    derivatives: Derivatives = "probes"
    """How it gets scalars: by forward passes, or by one backward pass, which gives the same up to rounding and
    curvature. It changes no plan, and a sum does not show it."""
    passes: Counter[Derivatives] = field(default_factory=Counter, compare=False)
    """How many passes it has made, for its own log."""
    most_step: float = math.inf
    """How far the steps of a round may lead this client from the round's weights, as a root mean square. A server that
    invents outcomes can make second moments so small that a client's own step is huge."""

    def vector(self, round_number: int, weights: F32, optimizer: State = ()) -> RingVector:
        """This client's contribution to a round at these weights, as integers. A round of several steps also needs the
        optimizer's state. All steps are taken and a vector is returned even if losses are not finite; such a vector
        becomes the ring's `nothing`. In a private run each call draws new noise, so call it once for each request."""
        with self.borrow() as runtime, np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            if self.trajectory.plan.outcome_kind == "scalars":
                return self._noised(self._walked(round_number, weights, optimizer, runtime))
            work = self._work(round_number, weights, runtime)
        return self.encoded(work.blank() if self.batch == 0 else work)

    def _made(self, passes: int) -> None:
        """Count passes that were just made."""
        self.passes[self.derivatives] += passes
        self.passed(passes)

    @property
    def _batch_size(self) -> int:
        """How many samples it uses at once; 0: all."""
        return self.batch or self.trajectory.plan.federation.batch

    @property
    def _weight(self) -> int:
        return self.trajectory.weight_of(len(self.indices))

    def encoded(self, work: Work) -> RingVector:
        """Computed values as integers, with this client's weight."""
        return self._noised(self._encoded(work))

    def _encoded(self, work: Work) -> RingVector:
        """The vector of one step, without noise."""
        length = self.trajectory.length // self.trajectory.plan.federation.local_steps
        return self.trajectory.ring.encode(work.values, length, self._weight, work.loss, work.clipped, work.head)

    def _noised(self, vector: RingVector) -> RingVector:
        private = self.trajectory.private
        return private.noised(vector, self.random) if private else vector

    def _walked(self, number: int, weights: F32, optimizer: State, runtime: Runtime) -> RingVector:
        """The scalars of all steps of a round. After each step but the last, this client moves as the run would if the
        step's vector were the sum over all clients."""
        trajectory, ring, length = self.trajectory, self.trajectory.ring, self.trajectory.length
        steps, key = trajectory.steps_in(number), key_number_of(trajectory, number, self.number)
        if steps > 1 and len(optimizer) != len(trajectory.rule.optimizer.init(weights[:0])):
            raise RefusalError("a round of several steps needs the optimizer's state, which this client does not hold")
        walk = Walk(trajectory.rule.optimizer, optimizer, weights, steps, trajectory.rule.share(number))
        vectors, finite = list[RingVector](), True
        for step in range(steps):
            batch, directions = self.batch_of_round(number, step), trajectory.directions(key, step)
            work = self._probed(runtime, batch, walk.weights, directions, trajectory.supports[: self.k])
            finite = finite and work.is_finite()
            vectors.append(self._encoded(work if work.is_finite() and self.batch != 0 else work.blank()))
            if step + 1 < steps:
                own = Totals(vectors[-1][:-EXTRAS].view(np.int32), self._weight)
                walk.step(trajectory.estimate(own, key, step))
                if not (math.isinf(self.most_step) or distance(weights, walk.weights) <= self.most_step):
                    finite, walk.weights = False, weights
        if finite or self.batch == 0:
            return ring.joined(vectors, length)
        return ring.nothing(length, self._weight)

    def _work(self, number: int, weights: F32, runtime: Runtime) -> Work:
        plan = self.trajectory.plan
        if plan.federation.level == "epoch":
            return self._train_locally(number, weights, runtime)
        key = self.trajectory.seeds(number).key("local", number, self.number, 0)
        work, gradient = self._estimate(weights, self.batch_of_round(number), key, runtime)
        return work._replace(values=gradient.astype(np.float64), head=NO_HEAD)

    def _probed(
        self, runtime: Runtime, batch: Batch, weights: F32, directions: Directions, supports: Sequence[Support]
    ) -> Work:
        """Scalars along directions and, if the plan wants it exact, the gradient of the model's head. With forward
        differences, the pass that it takes is the one at the unmoved weights."""
        if self.derivatives == "gradient":
            return self._differentiated(runtime, batch, weights, directions, supports)
        plan, loss, base, head = self.trajectory.plan, counted(runtime.on(batch), self._made), None, NO_HEAD
        if plan.probe.head == "exact":
            seen = _looking_into(runtime).head_on(batch, loss)(weights)
            base, head = seen.loss, _looking_into(runtime).head.gradient(seen)
            if not supports:
                return Work(NO_HEAD, base, 0, head)
        probe = SCHEMES[plan.probe.scheme]
        probed = probe(loss, weights, directions, supports, plan.probe.sigma, self.trajectory.block, base)
        if isinstance(loss, StructuredLoss):
            self._made(probed.forwards)
        return Work(probed.scalars, probed.base, 0, head)

    def _differentiated(
        self, runtime: Runtime, batch: Batch, weights: F32, directions: Directions, supports: Sequence[Support]
    ) -> Work:
        """The same by one backward pass: a dot product for each direction."""
        if not isinstance(runtime, GradientRuntime):
            raise RefusalError("derivatives by a backward pass need PyTorch; use probes")
        loss, gradient = runtime.gradient_on(batch, None)(weights)
        self._made(1)
        head = head_of(self.trajectory.plan)
        parts = [gradient[own].astype(np.float64) for own, _ in head.parts()] if head else []
        scalars = scalars_of(gradient, directions, supports, self.trajectory.block)
        return Work(scalars, loss, 0, np.concatenate([NO_HEAD, *parts]))

    def _train_locally(self, round_number: int, weights: F32, runtime: Runtime) -> Work:
        """Epoch level: several steps with this client's own keys, and an optimizer that starts fresh every round."""
        plan, seeds = self.trajectory.plan, self.trajectory.seeds(round_number)
        step, share = optimizer(plan.update), share_of(plan.update)(round_number)
        here, state, losses, clipped = weights, step.init(weights), list[float](), 0
        steps = local_steps(plan, len(self.indices))
        for number, indices in enumerate(islice(self._local_batches(round_number), steps)):
            key = seeds.key("local", round_number, self.number, number)
            batch = self._augmented(indices, round_number, number)
            work, gradient = self._estimate(here, batch, key, runtime)
            state, change = step.update(state, gradient, here)
            here = here + scaled(change, share)
            losses.append(work.loss)
            clipped += work.clipped
        return Work(weights.astype(np.float64) - here, float(np.mean(losses)), clipped)

    def _local_batches(self, round_number: int) -> Iterator[I64]:
        """Lap after lap through this client's samples, each lap in another order. A lap's last batch may be smaller."""
        n, size = len(self.indices), self._batch_size or len(self.indices)
        for lap in count():
            key = self.trajectory.seeds(round_number).key("batches", round_number, self.number, lap)
            order = permutation(key, n)
            yield from (order[start : start + size] for start in range(0, n, size))

    def _estimate(self, weights: F32, batch: Batch, key: bytes, runtime: Runtime) -> tuple[Work, F32]:
        """The gradient on a batch, estimated by this client alone. Its scalars pass through a ring for one client, so
        that the result has the same bits on every machine. If a scalar is not finite, the returned loss is not either,
        and the work continues with zeros, so that it takes as long as usual."""
        plan, trajectory = self.trajectory.plan, self.trajectory
        directions = Directions(key, distribution(plan.probe))
        if plan.estimator != "probe":
            if not isinstance(runtime, GradientRuntime):
                raise RefusalError("the plan asks for backpropagation, but this client can only run inference")
            seed = None if plan.estimator == "law" else int.from_bytes(key[:8], "big") >> 1
            loss, gradient = runtime.gradient_on(batch, seed)(weights)
            self._made(1)
            if plan.estimator == "law" and not plan.draws_for_all:
                gradient = trajectory.drawn(gradient, directions)
            return Work(np.empty(0), loss), gradient
        work = self._probed(runtime, batch, weights, directions, trajectory.supports)
        finite = work.is_finite()
        if not finite:
            work = work.blank()
        scalars, head = work.values, head_of(plan)
        alone = Ring(1, 1, plan.ring.d_max, head=len(work.head), head_clip=plan.ring.head_max)
        total = alone.decode(alone.encode(scalars, len(scalars) + len(work.head), 1, work.loss, 0, work.head), 1)
        gradient = gradient_from_scalars(
            total.totals[: len(scalars)],
            1,
            directions,
            trajectory.supports,
            trajectory.n,
            alone,
            block=trajectory.block,
        )
        for own, numbers in head.parts() if head else []:
            gradient[own] = total.totals[len(scalars) :][numbers] / alone.head_scale
        return work._replace(loss=work.loss if finite else math.nan, clipped=total.clipped), gradient

    def batch_of_round(self, round_number: int, step: int = 0) -> Batch:
        """The samples that this client probes on in a step of a round, at batch level."""
        n, size = len(self.indices), self._batch_size
        if not 0 < size < n:
            return self._augmented(np.arange(n), round_number, step)
        seeds, turn = self.trajectory.seeds(round_number), self.trajectory.steps_before(round_number) + step
        chosen = batch_indices(lambda lap: seeds.key("batches", lap, self.number), n, size, turn)
        return self._augmented(chosen, round_number, step)

    def _augmented(self, chosen: I64, round_number: int, step: int) -> Batch:
        """The chosen samples of this client, augmented as the plan's keys determine for this step of the round."""
        plan, seeds = self.trajectory.plan, self.trajectory.seeds(round_number)
        key = seeds.key("augment", round_number, self.number, step) if plan.task.augment else None
        return self.data.batch(self.indices[chosen], key)


def _looking_into(runtime: Runtime) -> HeadRuntime:
    if not isinstance(runtime, HeadRuntime):
        raise RefusalError('this runtime cannot look into a model\'s last layer; set probe.head = "probed"')
    return runtime


def local_steps(plan: Plan, samples: int) -> int:
    """How many steps one client takes in one round, after those with which a run warms up."""
    federation = plan.federation
    if federation.level == "batch":
        return federation.local_steps
    return federation.steps or federation.epochs * -(-samples // (federation.batch or samples))


def forwards_of(trajectory: Trajectory, k: int, samples: int) -> int:
    """How many forward passes one client runs in one round, after those with which a run warms up (one with a backward
    pass counts as one)."""
    plan, per_step = trajectory.plan, 1
    if plan.estimator == "probe" and plan.run.derivatives == "probes":
        exact = plan.probe.head == "exact"
        k = min(k, len(trajectory.supports))  # none if an exact head is all of the model
        per_step = SCHEMES[plan.probe.scheme].forwards(k) + (exact and plan.probe.scheme == "central")
    return per_step * local_steps(plan, samples)


Compute = Callable[[int, F32, State], RingVector]  # round, weights, optimizer's state → what a client contributes
IsAway = Callable[[int, int], bool]  # round and client → whether the client is not asked


@dataclass
class Stack:
    """The workers of all clients. The first request for a vector of a round computes those of all its clients.

    Clients with the same directions form one batch, which is cut into the plan's micro-batches. Threads share these, so
    no bit depends on the number of threads.
    """

    trajectory: Trajectory
    workers: Mapping[int, Worker]
    borrow: BorrowRuntime
    is_away: IsAway = lambda _round, _client: False
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _round: int = -1
    _vectors: Mapping[int, RingVector] = field(default_factory=dict)

    def vector(self, client: int, round_number: int, weights: F32, _optimizer: State = ()) -> RingVector:
        """What a client contributes to a round."""
        with self._lock:
            if self._round != round_number:
                self._vectors = self.vectors(round_number, weights)
                self._round = round_number
            return self._vectors[client]

    def vectors(self, round_number: int, weights: F32) -> dict[int, RingVector]:
        """What each client of a round contributes to it."""
        alike = dict[tuple[int, int], list[int]]()  # clients by the key and the number of their directions
        for group, clients in enumerate(choose_groups(self.trajectory, round_number)):
            key = self.trajectory.key_number(round_number, group)
            for client in clients:
                if not self.is_away(round_number, client):
                    alike.setdefault((key, self.workers[client].k), []).append(client)
        found = dict[int, RingVector]()
        for (key, k), clients in alike.items():
            found |= self._probed(sorted(clients), key, k, round_number, weights)
        return found

    def _probed(self, clients: Sequence[int], key: int, k: int, number: int, weights: F32) -> dict[int, RingVector]:
        """The vectors of clients that probe the same directions."""
        batches = [self.workers[client].batch_of_round(number) for client in clients]
        scalars, losses, seen = self._scalars(joined(batches), key, k, weights)
        stops = np.cumsum([len(batch.y) for batch in batches])
        rows = [slice(stop - len(batch.y), stop) for stop, batch in zip(stops, batches, strict=True)]
        found = dict[int, RingVector]()
        for client, own in zip(clients, rows, strict=True):
            head = NO_HEAD if seen is None else seen[0].gradient(seen[1].take(own))
            work = Work(scalars[:, own].mean(axis=1), float(losses[own].mean()), 0, head)
            found[client] = self.workers[client].encoded(work)
            self.workers[client].passed(forwards_of(self.trajectory, k, len(batches[0].y)))
        return found

    def _scalars(self, batch: Batch, key: int, k: int, weights: F32) -> tuple[F64, F64, tuple[Head, HeadPass] | None]:
        """A row of scalars for each direction, with a column for each sample; each sample's loss; and an exact head
        with what a pass knows about it."""
        trajectory, probe = self.trajectory, self.trajectory.plan.probe
        directions, supports = trajectory.directions(key), trajectory.supports[:k]

        def work(rows: slice) -> tuple[F64, F64, tuple[Head, HeadPass] | None]:
            with self.borrow() as runtime, np.errstate(over="ignore", divide="ignore", invalid="ignore"):
                if not isinstance(runtime, SampleRuntime):
                    raise RefusalError("this runtime gives the mean loss of a batch alone; leave probe.stacked out")
                here, seen = batch.take(rows), None
                losses = runtime.samples_on(here)
                if probe.head == "exact":
                    looking = _looking_into(runtime)
                    seen = looking.head, looking.head_on(here, runtime.on(here))(weights)
                if not supports:
                    return np.empty((0, len(here.y))), losses(weights), seen
                probed = SCHEMES[probe.scheme](losses, weights, directions, supports, probe.sigma, trajectory.block)
                return probed.scalars, probed.base, seen

        micro_batches = -(-len(batch.y) // probe.micro_batch)
        each = -(-micro_batches // trajectory.threads) * probe.micro_batch
        with ThreadPoolExecutor(trajectory.threads, thread_name_prefix="stack") as pool:
            parts = list(pool.map(work, pieces(len(batch.y), each)))
        scalars, losses, seen = zip(*parts, strict=True)
        return np.concatenate(scalars, axis=1), np.concatenate(losses), _joined_heads(seen)


def _joined_heads(seen: Sequence[tuple[Head, HeadPass] | None]) -> tuple[Head, HeadPass] | None:
    known = [each for each in seen if each]
    if not known:
        return None
    slopes, inputs = (np.concatenate([getattr(one, name) for _, one in known]) for name in ("slopes", "inputs"))
    return known[0][0], HeadPass(math.nan, slopes, inputs)
