"""What a client does in a round: its weights, its data, forward passes, one reply."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import count, islice
from typing import NamedTuple

import numpy as np

from baffle.aggregation.client.session import ClientSession
from baffle.aggregation.messages import Agree, Hello, MaskedRequest, Request, Turn, decode_request
from baffle.client.replica import Replica
from baffle.core.arrays import F32, F64, I64
from baffle.core.directions import DISTRIBUTIONS, Directions
from baffle.core.messages import Abstention, Contribution, Message, RoundRequest, encode
from baffle.core.ports import Batch, GradientRuntime, Runtime
from baffle.core.probe import SCHEMES
from baffle.core.rebuild import gradient_from_scalars
from baffle.core.ring import ELEMENT, EXTRAS, Ring, RingVector
from baffle.core.seeds import batch_indices, permutation
from baffle.data.sources import Dataset
from baffle.errors import BaffleError, RefusalError
from baffle.plan import Plan
from baffle.trajectory import Trajectory, optimizer, trajectory_of

BorrowRuntime = Callable[[], AbstractContextManager[Runtime]]
"""Lends a runtime for the time of one reply, so that there are as many as threads and not as many as clients."""


class Work(NamedTuple):
    """The result of a client's work, before it becomes integers."""

    values: F64
    loss: float
    clipped: int = 0


@dataclass(frozen=True)
class Client:
    """One participant: its number, how many directions it can afford, its samples (indices into a data set), and its
    side of the secure sum, without which its values are seen by the server."""

    number: int
    k: int
    trajectory: Trajectory
    data: Dataset
    indices: I64
    replica: Replica
    borrow: BorrowRuntime
    session: ClientSession | None = None

    def answer(self, data: bytes) -> bytes:
        """Request in, reply out. Whatever keeps this client from contributing is said in the reply."""
        number = 0
        try:
            asked = decode_request(data)
            number = asked.request.round if isinstance(asked, MaskedRequest) else getattr(asked, "round", 0)
            return encode(self._answer(asked))
        except BaffleError as fault:
            return encode(Abstention(number, str(fault)))

    def _answer(self, asked: Request) -> Message:
        session = self.session
        match asked:
            case RoundRequest() if session is None:
                return _contribution(asked, self._vector(asked))
            case MaskedRequest() if session is not None:
                return _contribution(asked.request, session.mask(asked, lambda: self._vector(asked.request)))
            case Hello() if session is not None:
                return session.advertise(asked.slot)
            case Agree() if session is not None:
                return session.agree(asked)
            case Turn() if session is not None:
                return session.turn(asked)
            case _:
                mode = "on" if session else "off"
                raise RefusalError(f"a {type(asked).__name__}, but this client's secure.mode is {mode}")

    def _vector(self, request: RoundRequest) -> RingVector:
        """This client's contribution, as integers."""
        weights = self.replica.weights_for(request)
        with self.borrow() as runtime:
            work = self._work(request, weights, runtime)
        weight = self.trajectory.weight_of(len(self.indices))
        return self.trajectory.ring.encode(work.values, self.trajectory.length, weight, work.loss, work.clipped)

    def _work(self, request: RoundRequest, weights: F32, runtime: Runtime) -> Work:
        plan = self.trajectory.plan
        if plan.federation.level == "epoch":
            return self._train_locally(request.round, weights, runtime)
        batch = self._batch_of_round(request.round)
        if plan.outcome_kind == "vector":
            key = self.trajectory.seeds.key("local", request.round, self.number, 0)
            work, gradient = self._estimate(weights, batch, key, runtime)
            return work._replace(values=gradient.astype(np.float64))
        probe = SCHEMES[plan.probe.scheme]
        supports = self.trajectory.supports[: self.k]
        directions, block = self.trajectory.directions(request.key), self.trajectory.block
        probed = probe(runtime.on(batch), weights, directions, supports, plan.probe.sigma, block)
        return Work(probed.scalars, probed.base)

    def _train_locally(self, round_number: int, weights: F32, runtime: Runtime) -> Work:
        """Epoch level: the same probe with this client's own keys, and an optimizer that starts fresh every round."""
        plan, seeds = self.trajectory.plan, self.trajectory.seeds
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
        """Lap after lap through this client's samples, each in its own order, its last batch what is left."""
        n, size = len(self.indices), self.trajectory.plan.federation.batch or len(self.indices)
        for lap in count():
            order = permutation(self.trajectory.seeds.key("batches", round_number, self.number, lap), n)
            yield from (order[start : start + size] for start in range(0, n, size))

    def _estimate(self, weights: F32, batch: Batch, key: bytes, runtime: Runtime) -> tuple[Work, F32]:
        """The gradient on a batch, by this client alone. The scalars pass through a ring of one, so they rebuild
        exactly."""
        plan, trajectory = self.trajectory.plan, self.trajectory
        if plan.estimator == "backprop":
            loss, gradient = _gradient(runtime, batch, weights)
            return Work(np.empty(0), loss), gradient
        directions = Directions(key, DISTRIBUTIONS[plan.probe.distribution])
        probed = SCHEMES[plan.probe.scheme](
            runtime.on(batch), weights, directions, trajectory.supports, plan.probe.sigma, trajectory.block
        )
        alone = Ring(clients=1, n_max=1, clip=plan.ring.d_max)
        total = alone.decode(alone.encode(probed.scalars, len(probed.scalars), 1, probed.base), 1)
        gradient = gradient_from_scalars(
            total.totals, 1, directions, trajectory.supports, trajectory.n, alone, block=trajectory.block
        )
        return Work(probed.scalars, probed.base, total.clipped), gradient

    def _batch_of_round(self, round_number: int) -> Batch:
        n, size = len(self.indices), self.trajectory.plan.federation.batch
        if not 0 < size < n:
            return self._augmented(np.arange(n), round_number, 0)
        seeds = self.trajectory.seeds
        chosen = batch_indices(lambda lap: seeds.key("batches", lap, self.number), n, size, round_number)
        return self._augmented(chosen, round_number, 0)

    def _augmented(self, chosen: I64, round_number: int, step: int) -> Batch:
        """Some of this client's samples, as they look at one step of a round."""
        plan, seeds = self.trajectory.plan, self.trajectory.seeds
        key = seeds.key("augment", round_number, self.number, step) if plan.task.augment else None
        return self.data.batch(self.indices[chosen], key)


def idle_client(plan: Plan, n: int) -> Client:
    """A client that can keep up a secure sum of `n` weights, with nothing to compute with."""

    def borrow() -> AbstractContextManager[Runtime]:
        raise RefusalError("this client has no runtime")

    trajectory, none = trajectory_of(plan, n), np.empty(0, np.int64)
    samples = Dataset(none, none, lambda stored: stored.astype(np.float32))
    return Client(0, plan.probe.k, trajectory, samples, none, Replica(trajectory), borrow)


def _gradient(runtime: Runtime, batch: Batch, weights: F32) -> tuple[float, F32]:
    if not isinstance(runtime, GradientRuntime):
        raise RefusalError("backpropagation, but this client can only run inference")
    return runtime.gradient_on(batch)(weights)


def _contribution(request: RoundRequest, vector: RingVector) -> Contribution:
    return Contribution(request.round, vector.astype(ELEMENT, copy=False).tobytes())


def local_steps(plan: Plan, samples: int) -> int:
    """Steps of one client in one round at epoch level."""
    federation = plan.federation
    return federation.steps or federation.epochs * -(-samples // (federation.batch or samples))


def forwards_of(trajectory: Trajectory, k: int, samples: int) -> int:
    """Forward passes of one client in one round (a backpropagation counts as one forward)."""
    plan = trajectory.plan
    each = {"forward": k + 1, "central": 2 * k}[plan.probe.scheme] if plan.estimator == "probe" else 1
    return each if plan.federation.level == "batch" else each * local_steps(plan, samples)


def contribution_bytes(trajectory: Trajectory) -> int:
    """The size of a reply: 4 bytes a value, and a constant."""
    return len(encode(Contribution(0, bytes(ELEMENT.itemsize * (trajectory.length + EXTRAS)))))
