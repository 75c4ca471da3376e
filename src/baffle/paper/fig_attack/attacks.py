"""What a server sees in a round (each client's scalars, secure sums of them, or masked vectors), and its attacks."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from baffle.aggregation.client.session import ClientSession
from baffle.aggregation.client_policy import ClientPolicy
from baffle.aggregation.messages import Hello, MaskedRequest, Turn, decode_request
from baffle.client.worker import Worker
from baffle.core.arrays import F32, F64, I64
from baffle.core.directions import Directions
from baffle.core.messages import CatchUp, Contribution, Message, RoundRequest, encode
from baffle.core.ports import Batch
from baffle.core.ring import EXTRAS, RingVector
from baffle.federation import secure_sums
from baffle.paper.fig_attack import inference
from baffle.paper.fig_attack.inference import Public, auc, labels_by_samples, membership
from baffle.paper.gradients import exact_scalars, gradient_runtime, measured_task
from baffle.paper.target import Scale
from baffle.task.load import Runtimes, Task
from baffle.trajectory import Trajectory, trajectory_of

Group = tuple[list[int], F64]  # the clients of a sum, and their mean scalars


@dataclass(frozen=True)
class Overheard:
    """One round of real clients. Each has its own batch; weights and directions are the same for all."""

    trajectory: Trajectory
    request: RoundRequest
    batches: Sequence[I64]
    vectors: Mapping[int, RingVector]  # each client's contribution, before masks

    def singly(self) -> list[Group]:
        """What the server reads without the secure sum: every client alone."""
        return [([client], self.read(vector)) for client, vector in self.vectors.items()]

    def summed(self, size: int) -> tuple[list[Group], dict[int, RingVector]]:
        """What the server reads with secure sums over groups of this size, and the masked vectors that it receives."""
        clients = list(self.vectors)
        groups = [clients[start : start + size] for start in range(0, len(clients) - size + 1, size)]
        policy = ClientPolicy(floor=min(3, size), groups_of=lambda _: groups)
        server, sessions = secure_sums(self.trajectory, clients, lambda _run: policy)
        tap = Tap(sessions, self.vectors)
        sums = server.collect([dict.fromkeys(group, self.request) for group in groups], tap).sums
        collected = [(group, total) for group, total in zip(groups, sums, strict=True) if total]
        return [(group, self._scalars(total.totals, total.weight)) for group, total in collected], tap.masked

    def read(self, vector: RingVector) -> F64:
        """The scalars of a vector, decoded as one client's plain contribution."""
        weight = self.trajectory.weight_of(len(self.batches[0]))
        return self._scalars(vector[:-EXTRAS].view(np.int32), weight)

    def _scalars(self, totals: NDArray[np.int32], weight: int) -> F64:
        return totals / (self.trajectory.ring.scale * weight)


def overhear(task: Task, weights: F32, batches: Sequence[I64], number: int) -> Overheard:
    """Let one client for each batch answer the request of a round."""
    trajectory = trajectory_of(task.plan, len(weights))
    sent = weights.astype("<f4").tobytes()
    catch_up = CatchUp("weights", 0, (sent,))
    request = RoundRequest(number, trajectory.digest, bytes(32), sha256(sent).digest(), catch_up)
    runtimes, k, train = Runtimes(task, 1), task.plan.probe.k, task.source.train
    vectors = {
        client: Worker(client, k, trajectory, train, batch, runtimes.borrow).vector(number, weights)
        for client, batch in enumerate(batches)
    }
    return Overheard(trajectory, request, batches, vectors)


@dataclass(frozen=True)
class Tap:
    """A transport to clients whose vectors are already computed. It keeps the masked vectors that they send."""

    sessions: Mapping[int, ClientSession]
    vectors: Mapping[int, RingVector]
    masked: dict[int, RingVector] = field(default_factory=dict)

    def exchange(self, requests: Mapping[int, bytes]) -> Mapping[int, bytes]:
        return {client: encode(self._reply(client, data)) for client, data in requests.items()}

    def _reply(self, client: int, data: bytes) -> Message:
        session, request = self.sessions[client], decode_request(data)
        if isinstance(request, Hello):
            return session.advertise(request.slot)
        if isinstance(request, MaskedRequest):
            self.masked[client] = session.mask(request, lambda: self.vectors[client])
            return Contribution(request.request.round, self.masked[client].astype("<u4").tobytes())
        assert isinstance(request, Turn)  # a secure sum that trusts its server asks for nothing else
        return session.turn(request)


SIGMA = 1e-4  # the paper's
LABELS_BIAS = "labels, from the biases"
LABELS = "labels, with public samples"
MEMBER = "membership"
INPUT = "input, with public samples"
INPUT_BLIND = "input, with no prior"


class Case(NamedTuple):
    """One model, untrained or trained, with one batch size. A client sends each of the numbers of scalars in `ks`."""

    model: str
    trained: bool
    batch: int
    ks: tuple[int, ...]

    @property
    def title(self) -> str:
        return f"{self.model}, {'trained' if self.trained else 'untrained'}"


class Size(NamedTuple):
    """The size of the target at one scale."""

    cases: list[Case]
    clients: int
    sums: tuple[int, ...]  # how many clients are in a secure sum
    rounds: int
    public: int  # samples that the server knows
    targets: int  # inputs to reconstruct in a round
    differences: int  # ΔL of each kind of input
    steps: int  # of training


class Score(NamedTuple):
    """The score of an attack in one round. `seen` is the number of clients in the sum, or 0 for a masked vector."""

    case: Case
    attack: str
    k: int
    seen: int
    value: float
    chance: float


def attacked(case: Case, size: Size, scale: Scale, data: Path | None, trained: F32) -> Iterator[Score]:
    """All attacks of a case, with fresh batches and fresh directions in every round."""
    settings = (
        *(["task.model={name='softmax'}"] if case.model == "softmax" else []),
        *(f"federation.clients={size.clients}", "federation.batch=0", f"ring.n_max={case.batch}"),
        *(f"probe.k={max(case.ks)}", f"probe.sigma={SIGMA}", "probe.distribution=gaussian", "probe.micro_batch=64"),
    )
    task = measured_task(scale, data, *settings)
    weights = trained if case.trained else task.initial_weights()
    for number in range(size.rounds):
        order = np.random.default_rng(number).permutation(len(task.source.train))
        chosen = order[: size.clients * case.batch].reshape(size.clients, case.batch)
        heard = overhear(task, weights, list(chosen), number)
        # As many strangers as clients: samples of the training set that no client has used.
        strangers = order[-size.clients :]
        yield from Server(task, weights, heard, size, case).attack(strangers)


@dataclass(frozen=True)
class Server:
    """A server that knows the plan, the seed and the weights, has public samples, and reads what it receives."""

    task: Task
    weights: F32
    heard: Overheard
    size: Size
    case: Case

    def attack(self, strangers: I64) -> Iterator[Score]:
        """The score of every attack, for each K and each view of the round."""
        train, test = self.task.source.train, self.task.source.test
        public = test.batch(np.arange(min(self.size.public, len(test))))
        known = Public(self._measured(public), public.y, self.task.source.classes)
        biases = self._drawn(self.heard.trajectory.n - known.classes).astype(np.float64)
        own = self._measured(train.batch(np.array([batch[0] for batch in self.heard.batches])))
        foreign = self._measured(train.batch(strangers))
        views = list(self._views())
        for k in self.case.ks:
            few = known.first(k)
            others = inference.crowd(few)
            for seen, groups in views:
                cut = [(members, scalars[:k]) for members, scalars in groups]
                score = partial(Score, self.case, k=k, seen=seen)
                present = [self._present(members) for members, _ in cut]
                for attack, guesses in (
                    (LABELS_BIAS, [inference.labels_by_bias(scalars, biases[:k]) for _, scalars in cut]),
                    (LABELS, [labels_by_samples(scalars, few) for _, scalars in cut]),
                ):
                    yield score(attack=attack, value=_label_auc(guesses, present), chance=0.5)
                samples = max(1, seen) * self.case.batch
                inside = [membership(s, own[:k, m], samples, others) for m, s in cut]
                outside = [membership(s, foreign[:k], samples, others) for _, s in cut]
                yield score(attack=MEMBER, value=auc(np.concatenate(inside), np.concatenate(outside)), chance=0.5)
                if (self.case.model, self.case.batch) == ("softmax", 1):
                    yield from self._inputs(cut, few, public, strangers, score)

    def _views(self) -> Iterator[tuple[int, list[Group]]]:
        """The server's views, by the number of clients in a sum. 0: masked vectors, decoded as if they were plain."""
        yield 1, self.heard.singly()
        masked: dict[int, RingVector] = {}
        for count in self.size.sums:
            sums, masked = self.heard.summed(count)
            yield count, sums
        yield 0, [([client], self.heard.read(vector)) for client, vector in masked.items()]

    def _present(self, members: Sequence[int]) -> NDArray[np.bool_]:
        """Which labels each client of a sum has, one row for each client."""
        every = np.arange(self.task.source.classes)
        labels = self.task.source.train.labels
        return np.array([np.isin(every, labels[self.heard.batches[client]]) for client in members])

    def _inputs(
        self, groups: Sequence[Group], public: Public, samples: Batch, strangers: I64, score: Callable[..., Score]
    ) -> Iterator[Score]:
        """Reconstruct one input from each of a few sums, and compare it with the client that it resembles most."""
        # Weights come row by row, then the biases. In the form (K, classes, pixels + 1) they are easier to contract.
        drawn = self._drawn(0)[: len(public.measured)]
        z, weights = (_with_biases(flat, public.classes) for flat in (drawn, self.weights[None]))
        flat = samples.x.reshape(len(samples.x), -1).astype(np.float64)
        mean = flat.mean(0)
        for attack, prior in ((INPUT, inference.prior_of(flat)), (INPUT_BLIND, inference.no_prior(flat.shape[1]))):
            values, chances = list[float](), list[float]()
            for members, scalars in groups[: self.size.targets]:
                # The other clients of the sum are taken to be like public samples, and their scatter to be noise.
                alone = scalars * len(members) - (len(members) - 1) * public.measured.mean(1)
                scatter = (len(members) - 1) * float(np.mean(np.var(public.measured, axis=1)))
                noise = scatter + 1e-6 * float(np.mean(alone**2))
                labels = np.argsort(-labels_by_samples(scalars, public))[:2]
                x, _ = inference.reconstruct(alone, z, weights[0], prior, [int(label) for label in labels], noise)
                firsts = np.array([self.heard.batches[client][0] for client in members])
                values.append(self._best_likeness(x, firsts, mean))
                chances.append(self._best_likeness(x, strangers[: len(members)], mean))
            yield score(attack=attack, value=float(np.mean(values)), chance=float(np.mean(chances)))

    def _best_likeness(self, x: F64, indices: I64, mean: F64) -> float:
        inputs = self.task.source.train.batch(indices).x.reshape(len(indices), -1).astype(np.float64)
        return max(inference.likeness(x, candidate, mean) for candidate in inputs)

    def _drawn(self, start: int) -> F32:
        """Every direction's values at the weights from `start` on."""
        directions = self._directions()
        drawn = directions.draw(range(max(self.case.ks)), start, self.heard.trajectory.n)
        return drawn.astype(np.float32) * np.float32(directions.distribution.unit)

    def _measured(self, batch: Batch) -> F64:
        """The scalars that each sample would cause alone, one column for each sample."""
        runtime = gradient_runtime(self.task)
        gradients = [runtime.gradient_on(single)(self.weights)[1] for single in batch.pieces(1)]
        return exact_scalars(self._directions(), max(self.case.ks), np.stack(gradients).astype(np.float64))

    def _directions(self) -> Directions:
        trajectory = self.heard.trajectory
        return trajectory.directions(trajectory.key_number(self.heard.request.round, 0))


def _label_auc(guesses: Sequence[F64], present: Sequence[NDArray[np.bool_]]) -> float:
    """How often a label of a client scores above a label that the client lacks."""
    inside = [np.broadcast_to(guess, has.shape)[has] for guess, has in zip(guesses, present, strict=True)]
    outside = [np.broadcast_to(guess, has.shape)[~has] for guess, has in zip(guesses, present, strict=True)]
    return auc(np.concatenate(inside), np.concatenate(outside))


def _with_biases(flat: F32, classes: int) -> F32:
    """Flat weights or directions of softmax regression as (count, classes, pixels + 1), with the biases last."""
    rows, biases = flat[:, :-classes].reshape(len(flat), classes, -1), flat[:, -classes:]
    return np.concatenate([rows, biases[:, :, None]], axis=2)
