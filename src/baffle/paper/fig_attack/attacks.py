"""Attacks on one client: by a server that reads its scalars, a secure sum of them, or a masked vector."""

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
from baffle.paper.fig_attack.overheard import Overheard, overhear
from baffle.paper.fig_attack.separation import auc
from baffle.paper.measured_task import subject
from baffle.paper.scalars import exact_scalars
from baffle.paper.target import Scale
from baffle.task.load import Task

MODELS: Mapping[str, tuple[str, ...]] = {
    "softmax": ("task.model={name='softmax'}",),
    "LeNet": (),
}


def attacked(case: Case, size: Size, scale: Scale, data: Path | None, after: F32) -> Iterator[Score]:
    """All attacks of a case, round by round: fresh batches, fresh directions."""
    settings = (
        *MODELS[case.model],
        *(f"federation.clients={size.clients}", "federation.batch=0", f"ring.n_max={case.batch}"),
        *(f"probe.k={max(case.ks)}", f"probe.sigma={SIGMA}", "probe.distribution=gaussian", "probe.micro_batch=64"),
    )
    task = subject(scale, data, *settings)
    weights = after if case.trained else task.initial_weights()
    for number in range(size.rounds):
        order = np.random.default_rng(number).permutation(len(task.source.train))
        chosen = order[: size.clients * case.batch].reshape(size.clients, case.batch)
        heard = overhear(task, weights, list(chosen), number)
        # As many strangers as clients: samples of the training set that nobody has used.
        strangers = order[-size.clients :]
        yield from Server(task, weights, heard, size, case).attack(strangers)


@dataclass(frozen=True)
class Server:
    """Someone who knows the plan, the seed and the weights, has public samples, and reads what arrives."""

    task: Task
    weights: F32
    heard: Overheard
    size: Size
    case: Case

    def attack(self, strangers: I64) -> Iterator[Score]:
        train, test = self.task.source.train, self.task.source.test
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
                held = [self._present(members) for members, _ in cut]
                for attack, guesses in (
                    (LABELS_BIAS, [labels_by_bias(scalars, biases[:k]) for _, scalars in cut]),
                    (LABELS, [labels_by_samples(scalars, few) for _, scalars in cut]),
                ):
                    there = [np.broadcast_to(g, h.shape)[h] for g, h in zip(guesses, held, strict=True)]
                    absent = [np.broadcast_to(g, h.shape)[~h] for g, h in zip(guesses, held, strict=True)]
                    yield score(attack=attack, value=auc(np.concatenate(there), np.concatenate(absent)), chance=0.5)
                samples = max(1, seen) * self.case.batch
                inside = [membership(s, own[:k, m], samples, others) for m, s in cut]
                outside = [membership(s, foreign[:k], samples, others) for _, s in cut]
                yield score(attack=MEMBER, value=auc(np.concatenate(inside), np.concatenate(outside)), chance=0.5)
                if (self.case.model, self.case.batch) == ("softmax", 1):
                    yield from self._inputs(cut, few, public, strangers, score)

    def _views(self) -> Iterator[tuple[int, list[tuple[list[int], F64]]]]:
        yield 1, self.heard.singly()
        masked: dict[int, RingVector] = {}
        for count in self.size.sums:
            sums, masked = self.heard.summed(count)
            yield count, sums
        yield 0, [([client], self.heard.read(vector)) for client, vector in masked.items()]

    def _present(self, members: Sequence[int]) -> NDArray[np.bool_]:
        """Which labels each client of a sum has, a row each."""
        every, labels = np.arange(self.task.source.classes), self.task.source.train.labels
        return np.array([np.isin(every, labels[self.heard.batches[client]]) for client in members])

    def _inputs(
        self,
        groups: Sequence[tuple[list[int], F64]],
        public: Public,
        samples: Batch,
        strangers: I64,
        score: Callable[..., Score],
    ) -> Iterator[Score]:
        """Reconstruct one input from each of a few sums; it counts for the client whom it is most like."""
        classes, k = public.classes, len(public.measured)
        pixels = samples.x[0].size
        # Weights come row by row and then the biases; as (K, classes, pixels + 1) they are easier to contract.
        z, weights = (_with_biases(flat, classes) for flat in (self._drawn(0)[:k], self.weights[None]))
        flat = samples.x.reshape(len(samples.x), -1).astype(np.float64)
        mean, informed = flat.mean(0), prior_of(flat)
        for attack, prior in ((INPUT, informed), (INPUT_BLIND, no_prior(pixels))):
            values, chances = list[float](), list[float]()
            for members, scalars in groups[: self.size.targets]:
                # The others of the sum are expected to be like public samples; how they differ is noise.
                alone = scalars * len(members) - (len(members) - 1) * public.measured.mean(1)
                noise = (len(members) - 1) * float(np.mean(np.var(public.measured, axis=1))) + 1e-6 * float(
                    np.mean(alone**2)
                )
                labels = np.argsort(-labels_by_samples(scalars, public))[:2]
                x, _ = reconstruct(alone, z, weights[0], prior, [int(one) for one in labels], noise)
                for who, into in ((self._first_samples(members), values), (strangers[: len(members)], chances)):
                    inputs = self.task.source.train.batch(who).x.reshape(len(who), -1).astype(np.float64)
                    into.append(max(likeness(x, one, mean) for one in inputs))
            yield score(attack=attack, value=float(np.mean(values)), chance=float(np.mean(chances)))

    def _first_samples(self, members: Sequence[int]) -> I64:
        return np.array([self.heard.batches[client][0] for client in members])

    def _drawn(self, start: int) -> F32:
        """What every direction does to the weights from `start` on."""
        trajectory = self.heard.trajectory
        directions = trajectory.directions(self.heard.request.key)
        drawn = directions.draw(range(max(self.case.ks)), start, trajectory.n)
        return drawn.astype(np.float32) * np.float32(directions.distribution.unit)

    def _measured(self, batch: Batch) -> F64:
        """What every sample alone would cause."""
        runtime = self.task.runtime()
        singles = (Batch(batch.x[i : i + 1], batch.y[i : i + 1]) for i in range(len(batch.y)))
        gradients = np.stack([runtime.gradient_on(one)(self.weights)[1] for one in singles]).astype(np.float64)
        directions = self.heard.trajectory.directions(self.heard.request.key)
        return exact_scalars(directions, max(self.case.ks), gradients)


def _with_biases(flat: F32, classes: int) -> F32:
    rows, biases = flat[:, :-classes].reshape(len(flat), classes, -1), flat[:, -classes:]
    return np.concatenate([rows, biases[:, :, None]], axis=2)
