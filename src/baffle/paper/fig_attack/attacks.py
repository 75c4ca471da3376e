"""The attacks: by a server that reads one client's scalars, a secure sum of several clients', or a masked vector."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from baffle.core.arrays import F32, F64, I64
from baffle.core.ports import Batch
from baffle.core.ring import RingVector
from baffle.paper.fig_attack.cases import INPUT, INPUT_BLIND, LABELS, LABELS_BIAS, MEMBER, SIGMA, Case, Score, Size
from baffle.paper.fig_attack.inference import (
    Public,
    crowd,
    labels_by_bias,
    labels_by_samples,
    likeness,
    membership,
    no_prior,
    prior_of,
    reconstruct,
)
from baffle.paper.fig_attack.overheard import Group, Overheard, overhear
from baffle.paper.fig_attack.separation import auc
from baffle.paper.measured_task import gradient_runtime, measured_task
from baffle.paper.scalars import exact_scalars
from baffle.paper.target import Scale
from baffle.task.load import Task

MODELS: Mapping[str, tuple[str, ...]] = {
    "softmax": ("task.model={name='softmax'}",),
    "LeNet": (),
}


def attacked(case: Case, size: Size, scale: Scale, data: Path | None, trained: F32) -> Iterator[Score]:
    """All attacks of a case, with fresh batches and fresh directions in every round."""
    settings = (
        *MODELS[case.model],
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
        train = self.task.source.train
        test = self.task.source.test
        public = test.batch(np.arange(min(self.size.public, len(test))))
        known = Public(self._measured(public), public.y, self.task.source.classes)
        biases = self._drawn(self.heard.trajectory.n - known.classes).astype(np.float64)
        own = self._measured(train.batch(np.array([batch[0] for batch in self.heard.batches])))
        foreign = self._measured(train.batch(strangers))
        views = list(self._views())
        for k in self.case.ks:
            few = known.first(k)
            others = crowd(few)
            for seen, groups in views:
                cut = [(members, scalars[:k]) for members, scalars in groups]
                score = partial(Score, self.case, k=k, seen=seen)
                present = [self._present(members) for members, _ in cut]
                for attack, guesses in (
                    (LABELS_BIAS, [labels_by_bias(scalars, biases[:k]) for _, scalars in cut]),
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
        """What the server sees, by the number of clients in a sum; 0: masked vectors, read as if they were not."""
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
        self,
        groups: Sequence[Group],
        public: Public,
        samples: Batch,
        strangers: I64,
        score: Callable[..., Score],
    ) -> Iterator[Score]:
        """Reconstruct one input from each of a few sums, and compare it with the client that it resembles most."""
        classes = public.classes
        k = len(public.measured)
        pixels = samples.x[0].size
        # Weights come row by row, then the biases. In the form (K, classes, pixels + 1) they are easier to contract.
        z, weights = (_with_biases(flat, classes) for flat in (self._drawn(0)[:k], self.weights[None]))
        flat = samples.x.reshape(len(samples.x), -1).astype(np.float64)
        mean = flat.mean(0)
        for attack, prior in ((INPUT, prior_of(flat)), (INPUT_BLIND, no_prior(pixels))):
            values = list[float]()
            chances = list[float]()
            for members, scalars in groups[: self.size.targets]:
                # The other clients of the sum are taken to be like public samples, and their scatter to be noise.
                alone = scalars * len(members) - (len(members) - 1) * public.measured.mean(1)
                noise = (len(members) - 1) * float(np.mean(np.var(public.measured, axis=1))) + 1e-6 * float(
                    np.mean(alone**2)
                )
                labels = np.argsort(-labels_by_samples(scalars, public))[:2]
                x, _ = reconstruct(alone, z, weights[0], prior, [int(label) for label in labels], noise)
                values.append(self._best_likeness(x, self._first_samples(members), mean))
                chances.append(self._best_likeness(x, strangers[: len(members)], mean))
            yield score(attack=attack, value=float(np.mean(values)), chance=float(np.mean(chances)))

    def _best_likeness(self, x: F64, indices: I64, mean: F64) -> float:
        inputs = self.task.source.train.batch(indices).x.reshape(len(indices), -1).astype(np.float64)
        return max(likeness(x, candidate, mean) for candidate in inputs)

    def _first_samples(self, members: Sequence[int]) -> I64:
        return np.array([self.heard.batches[client][0] for client in members])

    def _drawn(self, start: int) -> F32:
        """Every direction's values at the weights from `start` on."""
        trajectory = self.heard.trajectory
        directions = trajectory.directions(trajectory.key_number(self.heard.request.round, 0))
        drawn = directions.draw(range(max(self.case.ks)), start, trajectory.n)
        return drawn.astype(np.float32) * np.float32(directions.distribution.unit)

    def _measured(self, batch: Batch) -> F64:
        """The scalars that each sample would cause alone, one column for each sample."""
        runtime = gradient_runtime(self.task)
        singles = batch.pieces(1)
        gradients = np.stack([runtime.gradient_on(single)(self.weights)[1] for single in singles]).astype(np.float64)
        trajectory = self.heard.trajectory
        directions = trajectory.directions(trajectory.key_number(self.heard.request.round, 0))
        return exact_scalars(directions, max(self.case.ks), gradients)


def _label_auc(guesses: Sequence[F64], present: Sequence[NDArray[np.bool_]]) -> float:
    """How often a label that a client has is guessed above one that it has not."""
    inside = [np.broadcast_to(guess, has.shape)[has] for guess, has in zip(guesses, present, strict=True)]
    outside = [np.broadcast_to(guess, has.shape)[~has] for guess, has in zip(guesses, present, strict=True)]
    return auc(np.concatenate(inside), np.concatenate(outside))


def _with_biases(flat: F32, classes: int) -> F32:
    """Flat weights or directions of softmax regression as (count, classes, pixels + 1), with the biases last."""
    rows = flat[:, :-classes].reshape(len(flat), classes, -1)
    biases = flat[:, -classes:]
    return np.concatenate([rows, biases[:, :, None]], axis=2)
