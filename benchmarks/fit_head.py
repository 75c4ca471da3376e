"""What other settings would do for `baffle.fit`, on samples that are neither trained on nor tested: a probed last
layer, an exact one, and several steps in a round at the same number of forward passes.

    python benchmarks/fit_head.py            # a table
    python benchmarks/fit_head.py --json     # ... and write results/fit_head.json; rows in it are kept

Small nets of benchmarks/nets.py, five clients, 200 rounds as `fit` has them, each with two seeds. None of these nets is
among those that any_net.py compares with backpropagation.
"""

import argparse
import json
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from nets import eight_layers, four_layers, images_held_out, six_layers, tokens_held_out, transformer

import baffle

RESULTS = Path(__file__).parents[1] / "results" / "fit_head.json"
CLIENTS, SEEDS = 5, (0, 1)
NETS = {
    "four layers": (four_layers, images_held_out, 10),
    "transformer": (transformer, tokens_held_out, 4),
    "eight layers": (eight_layers, images_held_out, 10),
    "six layers": (six_layers, images_held_out, 10),
}


WAYS: dict[str, dict[str, Any]] = {
    "probed": {"probe.head": "probed"},
    "exact": {},
    "exact, 4 steps of K = 20": {"federation.local_steps": 4, "probe.k": 20},
}
"""What is changed in the settings of `fit`."""


def accuracy_of(net: str, way: str, seed: int) -> float:
    make, data, classes = NETS[net]
    source = data()
    train, held_out = (part.batch(np.arange(len(part))) for part in (source.train, source.test))
    torch.manual_seed(seed)
    plan = WAYS[way] | {"seed": seed, "federation.clients": CLIENTS, "run.workers": 1, "run.evaluate_every": 1000}
    with tempfile.TemporaryDirectory() as folder:
        given = (train.x, train.y), (held_out.x, held_out.y)
        return float(baffle.fit(make(classes), *given, plan=plan, out=f"{folder}/run", progress=False)["test_accuracy"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help=f"write {RESULTS.name}")
    parser.add_argument("--net", action="append", choices=NETS, help="only this one; may be repeated")
    parser.add_argument("--way", action="append", choices=WAYS, help="only this one; may be repeated")
    arguments = parser.parse_args()
    rows = json.loads(RESULTS.read_text()) if arguments.json and RESULTS.exists() else []
    for way, net in product(arguments.way or WAYS, arguments.net or NETS):
        if not any((row["net"], row["way"]) == (net, way) for row in rows):
            rows.append({"net": net, "way": way, "accuracies": [round(accuracy_of(net, way, s), 4) for s in SEEDS]})
            print(rows[-1], flush=True)
            if arguments.json:
                RESULTS.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
