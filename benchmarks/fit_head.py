"""What an exact head does for `baffle.fit` with its own settings, on samples that are neither trained on nor tested.

    python benchmarks/fit_head.py            # a table
    python benchmarks/fit_head.py --json     # ... and write results/fit_head.json

Small nets of benchmarks/nets.py, five clients, 200 rounds as `fit` has them, each with two seeds.
"""

import argparse
import json
import tempfile
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


def accuracy_of(net: str, head: str, seed: int) -> float:
    make, data, classes = NETS[net]
    source = data()
    train, held_out = (part.batch(np.arange(len(part))) for part in (source.train, source.test))
    torch.manual_seed(seed)
    plan: dict[str, Any] = {"probe.head": head, "seed": seed, "federation.clients": CLIENTS, "run.workers": 1}
    plan["run.evaluate_every"] = 1000
    with tempfile.TemporaryDirectory() as folder:
        given = (train.x, train.y), (held_out.x, held_out.y)
        return float(baffle.fit(make(classes), *given, plan=plan, out=f"{folder}/run", progress=False)["test_accuracy"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help=f"write {RESULTS.name}")
    parser.add_argument("--net", action="append", choices=NETS, help="only this one; may be repeated")
    arguments = parser.parse_args()
    rows = []
    for net in arguments.net or NETS:
        for head in ("probed", "exact"):
            rows.append({"net": net, "head": head, "accuracies": [round(accuracy_of(net, head, s), 4) for s in SEEDS]})
            print(rows[-1], flush=True)
            if arguments.json:
                RESULTS.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
