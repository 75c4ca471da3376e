"""What attacks on a sum get, without noise and at ε = 8 and 2.

    BAFFLE_DATA=... python benchmarks/privacy_attacks.py            # a table
    BAFFLE_DATA=... python benchmarks/privacy_attacks.py --json     # ... and write results/privacy_attacks.json

The attacks are those of `baffle paper fig-attack`, on MNIST, in the case that is worst for clients: one sample each,
16 of them in a secure sum, all taking part with the real client's code. The server knows the seed, the weights, 300
public samples, how vectors are clipped and how much noise is in the sum; its attacks make use of all that. Clients are
clipped to the median length of what public samples cause.

Two views. `sum`: one sum over all 16. `difference`: two runs over the same round, of which one lacks a client; the
server subtracts one sum from the other, and without noise it holds the client's own vector, exactly. ε is spent on one
round as a whole, or on a hundred rounds of which one is attacked. `bound` is what no attack whatever can exceed that
tells two vectors of one client apart, even if it knows all others: Φ(√2 / noise), the AUC of the best test between
Gaussians 2·Δ₂ apart. A row that is in the file is not computed again.
"""

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
from tuning import Table

from baffle.core.arrays import F32, F64, I64
from baffle.core.ports import Batch
from baffle.paper.fig_attack.attacks import SIGMA, Overheard, overhear
from baffle.paper.fig_attack.inference import (
    Public,
    auc,
    crowd,
    labels_by_samples,
    likeness,
    membership,
    prior_of,
    reconstruct,
)
from baffle.paper.gradients import exact_scalars, gradient_runtime, measured_task, trained
from baffle.paper.target import Scale
from baffle.privacy.accounting import noise_for
from baffle.runtime.torch.loss import one_thread_each
from baffle.task.load import Task

RESULTS = Path(__file__).parents[1] / "results" / "privacy_attacks.json"

CLIENTS = 16
DELTA = 1e-5
STEPS = 150
BUDGETS = ((0, 0), (8, 100), (2, 100), (8, 1), (2, 1))
"""ε, and over how many rounds it is spent; (0, 0): no privacy."""

MODELS = {"softmax": ("task.model={name='softmax'}", "probe.k=256"), "LeNet, trained": ("probe.k=64",)}


@dataclass(frozen=True)
class Size:
    scale: Scale = "short"
    rounds: int = 10
    targets: int = 2  # clients that are missing from a second run, in a round
    public: int = 300


class Server:
    """A server that knows all but the clients' samples and noise. `clip` bounds a vector; 0: nothing does."""

    def __init__(self, model: str, noise: float, size: Size) -> None:
        self._model, self._noise, self._size = model, noise, size
        self._task = self._load()
        weights = self._task.initial_weights()
        self._weights: F32 = trained(self._task, STEPS) if model.endswith("trained") else weights
        test = self._task.source.test
        self._public = test.batch(np.arange(min(size.public, len(test))))
        self._clip = 0.0

    def _load(self, *settings: str) -> Task:
        fixed = (
            *(f"federation.clients={CLIENTS}", "federation.batch=0", "federation.weighting=uniform", "ring.n_max=1"),
            *(f"probe.sigma={SIGMA}", "probe.distribution=gaussian", "probe.micro_batch=64"),
            *MODELS[self._model],
        )
        return measured_task(self._size.scale, None, *fixed, *settings)

    def attack(self) -> dict[str, Any]:
        """The mean of each attack's score over rounds, for both views, and its standard error."""
        with one_thread_each():
            rounds = [self._round(number) for number in range(self._size.rounds)]
        found: dict[str, Any] = {"noise": self._noise, "bound": 1.0}
        if self._noise:
            found["bound"] = round(NormalDist().cdf(math.sqrt(2) / self._noise), 3)
        for view, scores in rounds[0].items():
            by_name = {name: [one[view][name] for one in rounds] for name in scores}
            found[view] = {name: _mean(values) for name, values in by_name.items()}
            errors = {name: float(np.std(values)) / math.sqrt(len(values)) for name, values in by_name.items()}
            found[f"{view}, standard errors"] = {name: round(error, 3) for name, error in errors.items()}
        return found

    def _round(self, number: int) -> dict[str, dict[str, float]]:
        order = np.random.default_rng(number).permutation(len(self._task.source.train))
        samples, strangers = order[:CLIENTS], order[-CLIENTS:]
        task = self._private_task(number, samples)
        hear = partial(overhear, task, self._weights, [np.array([sample]) for sample in samples], number)
        first = hear()
        [(_, whole)], _ = first.summed(CLIENTS)
        in_sum = _Seen(self, first, whole, samples, strangers, CLIENTS, self._noise_in(1) / CLIENTS)
        alone = []
        for target in range(self._size.targets):
            second = hear()
            others = {client: vector for client, vector in second.vectors.items() if client != target}
            [(_, rest)], _ = replace(second, vectors=others).summed(CLIENTS - 1)
            difference = whole * CLIENTS - rest * (CLIENTS - 1)
            one = _Seen(self, first, difference, samples[[target]], strangers, 1, self._noise_in(2))
            alone.append(one.scores())
        return {"sum": in_sum.scores(), "difference": {name: _mean([one[name] for one in alone]) for name in alone[0]}}

    def _private_task(self, number: int, samples: I64) -> Task:
        """The task with the noise and the clipping norm, which public samples decide."""
        if not self._noise:
            return self._task
        if not self._clip:
            heard = overhear(self._task, self._weights, [np.array([sample]) for sample in samples], number)
            self._clip = float(np.median(np.linalg.norm(self.measured(heard, self._public), axis=0)))
        private = (f"privacy.noise={self._noise}", f"privacy.clip={self._clip}", f"secure.floor={CLIENTS - 1}")
        return self._load(*private)

    def _noise_in(self, sums: int) -> float:
        """The variance of a scalar's noise in so many sums; each has one share more than the least."""
        return sums * (self._noise * self._clip) ** 2 * CLIENTS / (CLIENTS - 1)

    @property
    def is_softmax(self) -> bool:
        """Whether inputs can be solved for."""
        return self._model == "softmax"

    @property
    def public(self) -> Batch:
        return self._public

    @property
    def task(self) -> Task:
        return self._task

    @property
    def weights(self) -> F32:
        return self._weights

    def measured(self, heard: Overheard, batch: Batch) -> F64:
        """The clipped scalars that each sample would cause alone, one column for each sample."""
        runtime = gradient_runtime(self._task)
        gradients = [runtime.gradient_on(single)(self._weights)[1] for single in batch.pieces(1)]
        trajectory = heard.trajectory
        directions = trajectory.directions(trajectory.key_number(heard.request.round, 0))
        found = exact_scalars(directions, self._task.plan.probe.k, np.stack(gradients).astype(np.float64))
        norms = np.linalg.norm(found, axis=0)
        return found * np.minimum(1, self._clip / norms) if self._clip else found


@dataclass(frozen=True)
class _Seen:
    """The mean scalars of `count` clients, and the noise in them: its variance for each scalar of the mean, times the
    clients."""

    server: Server
    heard: Overheard
    scalars: F64
    samples: I64
    strangers: I64
    count: int
    noise: float

    def scores(self) -> dict[str, float]:
        server, train = self.server, self.server.task.source.train
        known = Public(server.measured(self.heard, server.public), server.public.y, server.task.source.classes)
        others = crowd(known, self.noise)
        own, foreign = (server.measured(self.heard, train.batch(at)) for at in (self.samples, self.strangers))
        inside, outside = (membership(self.scalars, held, self.count, others) for held in (own, foreign))
        shares = labels_by_samples(self.scalars, known, self.noise)
        has = train.labels[self.samples][:, None] == np.arange(known.classes)  # a row for each client
        guesses = np.broadcast_to(shares, has.shape)
        scores = {"membership": auc(inside, outside), "labels": auc(guesses[has], guesses[~has])}
        return scores | (self._input(known, shares) if server.is_softmax else {})

    def _input(self, known: Public, shares: F64) -> dict[str, float]:
        """The likeness of a reconstruction with the sample that it resembles most, and with equally many strangers."""
        server, samples = self.server, self.server.public.x
        flat = samples.reshape(len(samples), -1).astype(np.float64)
        alone = self.scalars * self.count - (self.count - 1) * known.measured.mean(1)
        unexplained = (self.count - 1) * float(np.mean(np.var(known.measured, axis=1)))
        noise = unexplained + self.count * self.noise + 1e-6 * float(np.mean(alone**2))
        z, weights = (_with_biases(rows, known.classes) for rows in (self._directions(), server.weights[None]))
        labels = [int(label) for label in np.argsort(-shares)[:2]]
        x, _ = reconstruct(alone, z, weights[0], prior_of(flat), labels, noise)
        groups = {"input": self.samples, "input, by chance": self.strangers[: len(self.samples)]}
        inputs = {name: server.task.source.train.batch(at).x.reshape(len(at), -1) for name, at in groups.items()}
        return {name: max(likeness(x, own, flat.mean(0)) for own in rows) for name, rows in inputs.items()}

    def _directions(self) -> F32:
        trajectory = self.heard.trajectory
        directions = trajectory.directions(trajectory.key_number(self.heard.request.round, 0))
        drawn = directions.draw(range(len(self.scalars)), 0, trajectory.n)
        return drawn.astype(np.float32) * np.float32(directions.distribution.unit)


def _with_biases(flat: F32, classes: int) -> F32:
    rows = flat[:, :-classes].reshape(len(flat), classes, -1)
    return np.concatenate([rows, flat[:, -classes:, None]], axis=2)


def _mean(values: Sequence[float]) -> float:
    return round(float(np.mean(values)), 3)


def fill(table: Table, models: Sequence[str], size: Size) -> None:
    for model in models:
        for epsilon, rounds in BUDGETS:
            noise = noise_for(epsilon, DELTA, rounds, delta_2=2**18, dimension=256) if epsilon else 0.0
            table.row(label(model, epsilon, rounds), partial(attacked, model, noise, size))


def attacked(model: str, noise: float, size: Size) -> dict[str, Any]:
    return Server(model, noise, size).attack()


def label(model: str, epsilon: float, rounds: int) -> str:
    return f"{model}, ε {epsilon:g} over {rounds} rounds" if epsilon else f"{model}, no noise"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(MODELS), help=f"of {', '.join(MODELS)}")
    parser.add_argument("--quick", action="store_true", help="on the digits, one round, two targets")
    parser.add_argument("--json", action="store_true", help=f"write {RESULTS.name}")
    parser.add_argument("--out", type=Path, help="write results here instead")
    arguments = parser.parse_args()
    size = Size("smoke", 1, 2, 60) if arguments.quick else Size()
    fill(Table(arguments.out or (RESULTS if arguments.json else None)), arguments.models, size)


if __name__ == "__main__":
    main()
