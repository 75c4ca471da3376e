"""What a sum of ten clients tells about the labels of a round, with and without an exact head and noise.

    python benchmarks/class_counts.py            # a table
    python benchmarks/class_counts.py --json     # ... and write results/class_counts.json

Ten clients of 8 digits each answer a round of the default plan, at the initial weights and at those after 150 rounds.
The server knows the seed, the weights, the clipping and the noise, and 150 test digits. It measures what each of these
would send alone, and fits the number of samples of each class to the sum that it receives: to the K scalars, or with an
exact head to the numbers of the head's bias. The error is that of a class's number among the 80 samples of the round.
`chance` guesses 8 of each. Private vectors are clipped to the median length of those of 8 known samples, and ε = 8 is
spent on all 150 rounds.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from baffle.client.worker import Worker
from baffle.core.arrays import F32, F64, I64
from baffle.core.ring import RingVector, add
from baffle.data.sources import Dataset
from baffle.journal.replay import catch_up, lineage_of
from baffle.journal.store import Journal
from baffle.plan import load
from baffle.plan.privacy import head_factor
from baffle.simulation import simulate
from baffle.task.load import Runtimes, Task, load_task
from baffle.trajectory import trajectory_of

RESULTS = Path(__file__).parents[1] / "results" / "class_counts.json"
CLIENTS, SAMPLES, CLASSES, KNOWN, ROUNDS, EPSILON = 10, 8, 10, 150, 10, 8
TOTAL = CLIENTS * SAMPLES
RIDGE = 1e-3  # of the mean variance, since few known samples do not vary in every way


def task_of(head: str, *settings: str) -> Task:
    few = ("federation.weighting=uniform", f"secure.floor={CLIENTS - 1}", f"probe.head={head}", "run.workers=1")
    return load_task(load("digits", [*few, *settings]))


def trained_weights() -> F32:
    with tempfile.TemporaryDirectory() as folder:
        simulate(load("digits", ["probe.head=exact"]), Path(folder) / "run")
        with Journal.open(Path(folder) / "run" / "journal.sqlite") as journal:
            return catch_up(journal, lineage_of(journal, journal.plan())).state.weights


def vectors(task: Task, weights: F32, data: Dataset, clients: list[I64], number: int) -> list[RingVector]:
    """What clients with these samples send in a round."""
    trajectory, borrow = trajectory_of(task.plan, len(weights)), Runtimes(task, 1).borrow
    return [Worker(0, task.plan.probe.k, trajectory, data, own, borrow).vector(number, weights) for own in clients]


def read(task: Task, sums: list[RingVector], clients: int) -> list[tuple[F64, F64]]:
    """The mean scalars and the mean head of each sum over so many clients."""
    trajectory = trajectory_of(task.plan, len(task.initial_weights()))
    decoded = [trajectory.ring.decode(total, clients) for total in sums]
    return [trajectory.means(found.totals, found.weight) for found in decoded]


def fitted(mean: F64, known: F64, labels: I64, noise: float) -> F64:
    """The number of samples of each class that suits a mean over all samples of a round best. `known` has a row for
    each known sample, `noise` is the variance of the noise in the mean."""
    ways = np.stack([known[labels == c].mean(axis=0) for c in range(CLASSES)])
    apart = known - ways[labels]
    covariance = apart.T @ apart / len(known) / TOTAL
    covariance += (noise + RIDGE * np.trace(covariance) / len(mean)) * np.eye(len(mean))
    weighed = np.linalg.solve(covariance, ways.T)
    usual = 1 / CLASSES
    prior = usual * (1 - usual) / TOTAL * (np.eye(CLASSES) - usual + 1e-6)  # of shares that add up to 1
    inverse = np.linalg.inv(prior)
    shares = usual + np.linalg.solve(ways @ weighed + inverse, weighed.T @ (mean - ways.sum(axis=0) * usual))
    counts: F64 = np.clip(shares * TOTAL, 0, None)
    return counts


def errors(head: str, epsilon: int, weights: F32) -> dict[str, float]:
    """How far the server is from the numbers of the classes, and how many of them it knows exactly."""
    clean = task_of(head)
    train, test, exact = clean.source.train, clean.source.test, head == "exact"
    labels, ones = test.labels[:KNOWN], [np.array([each]) for each in range(KNOWN)]
    task, noise = clean, 0.0
    if epsilon:
        groups = [np.arange(at, at + SAMPLES) for at in range(0, KNOWN - SAMPLES, SAMPLES)]
        seen = read(clean, vectors(clean, weights, test, groups, 0), 1)
        factor = head_factor(clean.plan, len(weights)) if exact else 1.0
        clip = np.median([np.linalg.norm(np.concatenate([scalars, factor * own])) for scalars, own in seen])
        task = task_of(head, f"privacy.clip={clip:.4g}", f"privacy.epsilon={epsilon}")
        private = trajectory_of(task.plan, len(weights)).private
        assert private is not None
        scale = (private.head_scale if exact else private.scale) * CLIENTS
        noise = CLIENTS * float(private.share) / scale**2
    found = list[F64]()
    known = np.empty((0, 0))
    for number in range(ROUNDS):
        chosen = np.random.default_rng(number).permutation(len(train))[:TOTAL]
        [(scalars, own)] = read(
            task, [add(vectors(task, weights, train, list(chosen.reshape(CLIENTS, -1)), number))], CLIENTS
        )
        if not exact or not number:  # a head is the same in every round
            alone = read(clean, vectors(clean, weights, test, ones, number), 1)
            known = np.stack([one[-CLASSES:] if exact else values for values, one in alone])
        counts = fitted(own[-CLASSES:] if exact else scalars, known, labels, noise)
        found.append(counts - np.bincount(train.labels[chosen], minlength=CLASSES))
    return {
        "mean_error": round(float(np.mean(np.abs(found))), 3),
        "exactly_known": round(float(np.mean(np.abs(found) < 0.5)), 3),
    }


def chance() -> dict[str, float]:
    train = task_of("probed").source.train
    chosen = [np.random.default_rng(number).permutation(len(train))[:TOTAL] for number in range(ROUNDS)]
    apart = np.abs([np.bincount(train.labels[own], minlength=CLASSES) - TOTAL / CLASSES for own in chosen])
    return {"mean_error": round(float(np.mean(apart)), 3), "exactly_known": round(float(np.mean(apart < 0.5)), 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help=f"write {RESULTS.name}")
    arguments = parser.parse_args()
    states = {"initial": task_of("probed").initial_weights(), "trained": trained_weights()}
    rows: list[dict[str, Any]] = [{"weights": "any", "head": "chance", "epsilon": 0, **chance()}]
    for state, weights in states.items():
        for head in ("probed", "exact"):
            for epsilon in (0, EPSILON):
                rows.append({"weights": state, "head": head, "epsilon": epsilon, **errors(head, epsilon, weights)})
                print(rows[-1], flush=True)
    if arguments.json:
        RESULTS.write_text(json.dumps({"rounds": ROUNDS, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
