"""How far honest runs move their weights: what the defaults of `most_step` and `most_distance` rest on.

    python benchmarks/steps.py                    # about fifteen minutes on two cores
    python benchmarks/steps.py "digits"           # the rows whose names begin with this
    python benchmarks/steps.py --json             # the same, as JSON

The plans that come with BAFFLE, all on the digits, with SGD and Adam, and at ten times their rates. A step is the root
mean square over all weights of what one round changes, the distance that of the difference to the weights that the run
began with. The largest values of a run are printed.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from baffle.core.state import distance
from baffle.journal.replay import at_snapshot, follow, lineage_of
from baffle.journal.store import Journal
from baffle.plan import load
from baffle.simulation import simulate

DIGITS = ("task.data=digits", "run.evaluate_every=50")
SHORT = (*DIGITS, "federation.clients=5", "federation.participation=1.0")
RUNS: dict[str, tuple[str, ...]] = {
    "digits": ("digits",),
    "digits, rate 0.1": ("digits", "update.rate=0.1"),
    "digits, rate 1": ("digits", "update.rate=1.0"),
    "digits, sgd 0.1": ("digits", "update.optimizer=sgd", "update.rate=0.1"),
    "digits, sgd 1": ("digits", "update.optimizer=sgd", "update.rate=1.0"),
    "digits, adam by layers": ("digits", "update.moments=layers"),
    "digits, private": (
        "digits",
        "federation.weighting=uniform",
        "privacy.noise=1.0",
        "privacy.clip=1.0",
        "secure.mode=on",
    ),
    "digits-crowd": ("digits-crowd",),
    "digits-crowd, rate 0.2": ("digits-crowd", "update.rate=0.2"),
    "dlzo-mnist": ("dlzo-mnist", *SHORT, "rounds=300"),
    "dlzo-mnist, rate 0.01": ("dlzo-mnist", *SHORT, "rounds=300", "update.rate=0.01"),
    "fedzo-mnist": ("fedzo-mnist", *SHORT, "rounds=300"),
    "fedzo-mnist, rate 0.01": ("fedzo-mnist", *SHORT, "rounds=300", "update.rate=0.01"),
    "paper-mnist-lenet": ("paper-mnist-lenet", *SHORT, "probe.k=20"),
    "authors-mnist-lenet": ("authors-mnist-lenet", *SHORT, "probe.k=20"),
    "fedavg-mnist-lenet": ("fedavg-mnist-lenet", *SHORT),
    "fedavg-mnist-lenet, rate 0.1": ("fedavg-mnist-lenet", *SHORT, "update.rate=0.1"),
    "fedsgd-mnist-lenet": ("fedsgd-mnist-lenet", *SHORT, "rounds=300"),
}


def moves(folder: Path) -> Iterator[tuple[float, float]]:
    """For each round of a run: how far it moved the weights, and how far they are then from the first ones."""
    plan = load(str(folder / "plan.toml"))
    with Journal.open(folder / "journal.sqlite") as journal:
        lineage = lineage_of(journal, plan)
        present = at_snapshot(journal, lineage, 0)
        first = present.state.weights
        for entry in journal.entries(0):
            before, present = present.state.weights, follow(lineage, present, entry)
            yield distance(before, present.state.weights), distance(first, present.state.weights)


def measured(name: str, *settings: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        simulate(load(name, settings), Path(folder) / "run")
        steps, distances = zip(*moves(Path(folder) / "run"), strict=True)
    return {"step": max(steps), "distance": max(distances), "rounds": len(steps)}


def cost(weights: int = 1_000_000) -> float:
    """CPU seconds to measure one step of so many weights."""
    a, b = np.zeros(weights, np.float32), np.ones(weights, np.float32)
    start = time.process_time()
    for _ in range(100):
        distance(a, b)
    return (time.process_time() - start) / 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("begins", nargs="?", default="")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    found: dict[str, object] = {"ms for a million weights": round(1000 * cost(), 2)}
    for name, plan in RUNS.items():
        if name.startswith(asked.begins):
            found[name] = run = measured(*plan)
            print(f"{name:30} {run['step']:9.4f} {run['distance']:9.4f}  {run['rounds']} rounds", file=sys.stderr)
    print(json.dumps(found, indent=1) if asked.json else f"a million weights: {found['ms for a million weights']} ms")


if __name__ == "__main__":
    main()
