"""A linear head on sentence features of the TREC questions: forward passes against backpropagation.

    python benchmarks/sentences.py            # a table
    python benchmarks/sentences.py --json     # ... and write results/sentences.json

$BAFFLE_DATA/text/trec-minilm.npz holds the features. The rate of each estimator is chosen on a tenth of the training
questions that is held out, with a seed of its own; then the head is trained on all of them, with five seeds. Both
estimators run in the same loop: ten clients, 600 rounds, 64 questions a client and round; K = 50.
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import nn

import baffle

RESULTS = Path(__file__).parents[1] / "results" / "sentences.json"
RATES = (0.005, 0.01, 0.02)
SEEDS = 5
ROUNDS, K, BATCH = 600, 50, 64

Data = tuple[np.ndarray, np.ndarray]


def trained(train: Data, test: Data, estimator: str, rate: float, seed: int) -> dict[str, Any]:
    """One run: its accuracy and its CPU seconds."""
    torch.manual_seed(seed)
    plan = {
        "seed": seed,
        "rounds": ROUNDS,
        "estimator": estimator,
        "federation.batch": BATCH,
        "probe.k": K,
        "update.rate": rate,
        "run.evaluate_every": ROUNDS,
    }
    began = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        head = nn.Linear(train[0].shape[1], int(train[1].max()) + 1)
        run = baffle.fit(head, train, test, plan=plan, out=Path(folder) / "run", progress=False)
        accuracy = float(run["test_accuracy"])
    return {"accuracy": accuracy, "cpu_seconds": round(time.process_time() - began, 1)}


def measured(train: Data, test: Data, estimator: str) -> dict[str, Any]:
    order = np.random.default_rng(0).permutation(len(train[1]))
    held_out, rest = np.split(order, [len(order) // 10])
    parts = [(train[0][rows], train[1][rows]) for rows in (rest, held_out)]
    tried = {rate: trained(parts[0], parts[1], estimator, rate, 100)["accuracy"] for rate in RATES}
    rate = max(tried, key=lambda rate: tried[rate])
    runs = [trained(train, test, estimator, rate, seed) for seed in range(SEEDS)]
    return {
        "estimator": estimator,
        "held_out": {str(rate): accuracy for rate, accuracy in tried.items()},
        "rate": rate,
        "accuracies": [run["accuracy"] for run in runs],
        "median": median(run["accuracy"] for run in runs),
        "cpu_seconds": median(run["cpu_seconds"] for run in runs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help=f"write {RESULTS.name}")
    arguments = parser.parse_args()
    arrays = np.load(Path(os.environ["BAFFLE_DATA"]) / "text" / "trec-minilm.npz")
    train, test = ((arrays[f"x_{part}"].astype(np.float32), arrays[f"y_{part}"]) for part in ("train", "test"))
    rows = []
    for estimator in ("probe", "backprop"):
        rows.append(measured(train, test, estimator))
        print(
            "{estimator:9} rate {rate}: median {median:.1%} of {accuracies}, {cpu_seconds} s of CPU".format(**rows[-1])
        )
    if arguments.json:
        RESULTS.write_text(json.dumps({"rounds": ROUNDS, "k": K, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
