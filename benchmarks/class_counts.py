"""What a sum of ten clients tells about the labels of a round, with and without an exact head and noise.

    python benchmarks/class_counts.py            # a table
    python benchmarks/class_counts.py --json     # ... and write results/class_counts.json

Ten clients of 8 digits each answer a round of the default plan's model, at the initial weights and after 150 rounds. The
server knows the seed, the weights, the clipping and the noise, and a fifth of the digits besides. It measures what each
of these would send alone, and fits the numbers of the ten classes to the sum that it receives. Vectors of a private run
have the median length of such a vector as their clipping norm, and ε = 8 is spent on 150 rounds. `chance` guesses that
all classes are alike. Samples of the round are drawn at random, so their classes are, too.
"""

import argparse
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tuning import Table

from baffle.client.worker import Worker
from baffle.core.arrays import F32, F64, I64
from baffle.core.ring import add
from baffle.journal.replay import catch_up, lineage_of
from baffle.journal.store import Journal
from baffle.plan import Plan, load
from baffle.privacy.accounting import noise_for
from baffle.runtime.model import slopes_of
from baffle.simulation import simulate
from baffle.task.load import Runtimes, Task, load_task
from baffle.trajectory import trajectory_of

RESULTS = Path(__file__).parents[1] / "results" / "class_counts.json"
CLIENTS, SAMPLES, CLASSES, ROUNDS, DELTA, EPSILON, TRAINED = 10, 8, 10, 20, 1e-5, 8, 150
HEADS, PRIVACY = ("probed", "exact"), (0, EPSILON)


def plan_of(head: str, *settings: str) -> Plan:
    few = ("federation.weighting=uniform", f"federation.batch={SAMPLES}", f"probe.head={head}")
    return load("digits", [*few, *settings])


def trained_weights(folder: Path) -> F32:
    """The weights of the default plan's model after its rounds, with an exact head."""
    if not (folder / "summary.json").exists():
        simulate(plan_of("exact"), folder)
    with Journal.open(folder / "journal.sqlite") as journal:
        return catch_up(journal, lineage_of(journal, journal.plan())).state.weights


def sent(task: Task, weights: F32, samples: list[I64], number: int, *, alone: bool = False) -> F64:
    """What clients with these samples send in a round, as means: of their sum, or a row of each alone."""
    trajectory = trajectory_of(task.plan, len(weights))
    borrow = Runtimes(task, 1).borrow
    workers = [Worker(0, task.plan.probe.k, trajectory, task.source.train, own, borrow) for own in samples]
    vectors = [worker.vector(number, weights) for worker in workers]
    sums = [trajectory.ring.decode(vector, 1) for vector in vectors] if alone else [
        trajectory.ring.decode(add(vectors), len(vectors))
    ]
    return np.stack([np.concatenate(trajectory.means(found.totals, found.weight)) for found in sums])


@dataclass(frozen=True)
class Attack:
    """Fits the numbers of the classes to a mean vector, by the vectors of known samples."""

    known: F64  # a row for each sample
    labels: I64
    noise: F64  # the variance of the noise in each number of the mean

    def counts(self, mean: F64) -> F64:
        total = CLIENTS * SAMPLES
        by_class = np.stack([self.known[self.labels == c].mean(axis=0) for c in range(CLASSES)])
        spread = np.mean([self.known[self.labels == c].var(axis=0) for c in range(CLASSES)], axis=0)
        scale = 1 / np.sqrt(spread / total + self.noise + 1e-20)
        prior = (1 / CLASSES) * (1 - 1 / CLASSES) / total  # the variance of a class's share
        ways, apart = by_class * scale, (mean - by_class.mean(axis=0)) * scale
        solved = np.linalg.solve(ways @ ways.T + np.eye(CLASSES) / prior, ways @ apart)
        shares = 1 / CLASSES + solved - solved.mean()
        found: F64 = np.clip(shares * total, 0, None)
        return found
