"""Rounds until the paper's LeNet knows MNIST with K = 100, with a probed and with an exact last layer.

    BAFFLE_DATA=... python benchmarks/head_rounds.py           # about three minutes of CPU time
    BAFFLE_DATA=... python benchmarks/head_rounds.py --json    # ... and write results/head_rounds.json; rows are kept

One client with all training images but every thirtieth, 64 of them a round, Adam at 0.01. Estimates are drawn from
their law (`estimator = "law"`): so a round costs one gradient instead of a hundred passes. The accuracy is that of the
weights themselves, without an average, on 1,000 of the images left out. Nothing was tuned. A run ends at 85 %, or
after 500 rounds.
"""

import argparse
import json
import sys
from contextlib import closing
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from time_to_accuracy import held_out
from training import training

from baffle.plan import load
from baffle.runtime.torch.loss import one_thread_each
from baffle.task.load import load_task

FILE = Path(__file__).parents[1] / "results" / "head_rounds.json"
K, GOAL, MOST, EVERY, SEEDS = 100, 0.85, 1500, 50, (0, 1)
TESTED = 1000
COMMON = (
    *("federation.level=batch", "federation.clients=1", "federation.batch=64", "secure.mode=off", "rounds=1000000"),
    *("run.runtime=torch", "estimator=law", "probe.distribution=gaussian", f"probe.k={K}", "run.workers=1"),
    *("update.rate=0.01", "update.clip=0", "update.ema=0", "update.weight_decay=0"),
)


def curve_of(head: str, seed: int, most: int) -> list[tuple[int, float]]:
    """Rounds and accuracies."""
    task = load_task(load("paper-mnist-lenet", [*COMMON, f"probe.head={head}", f"seed={seed}"]), source=held_out())
    test, curve = task.source.test.batch(np.arange(TESTED)), list[tuple[int, float]]()
    with closing(training(task)) as rounds:
        for progress in rounds:
            if progress.rounds % EVERY == 0:
                curve.append((progress.rounds, progress.accuracy(test)))
                if progress.rounds >= most or curve[-1][1] >= GOAL:
                    break
    return curve


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="write results/head_rounds.json")
    parser.add_argument("--out", type=Path, help="write there")
    parser.add_argument("--rounds", type=int, default=MOST, help="at most, for a first look")
    args = parser.parse_args()
    out = args.out or (FILE if args.json else None)
    found: dict[str, Any] = json.loads(out.read_text()) if out and out.exists() else {}
    with one_thread_each():
        for seed, head in product(SEEDS, ("exact", "probed")):
            if (name := f"{head}/{seed}") not in found:
                found[name] = curve_of(head, seed, args.rounds)
                print(name, found[name], file=sys.stderr, flush=True)
                if out:
                    out.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
