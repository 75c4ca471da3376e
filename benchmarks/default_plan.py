"""Which settings the plans on digits should have, chosen on samples that are neither trained on nor tested.

    python benchmarks/default_plan.py                                  # the settings that were compared
    python benchmarks/default_plan.py --json                           # ... and write results/default_plan.json
    python benchmarks/default_plan.py --plan digits-crowd --json       # ... results/digits_crowd.json
    python benchmarks/default_plan.py --only probe.k=80,federation.batch=8,update.rate=0.01

A fifth of the digits' training samples is held out for validation; clients train on the rest. Test samples play no
part. Each row is a plan with some settings changed, run with several seeds: the median and the least accuracy
at the end, and the CPU seconds of a run.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from baffle import Dataset, Source
from baffle.core.seeds import permutation
from baffle.data.handwriting import digits
from baffle.plan import load
from baffle.simulation import simulate

RESULTS = Path(__file__).parents[1] / "results"
FILES = {"digits": RESULTS / "default_plan.json", "digits-crowd": RESULTS / "digits_crowd.json"}

DEFAULT = [
    f"probe.k={k},federation.batch={batch},update.rate={rate},rounds={rounds}"
    for k, batch, rounds, rates in (
        (20, 32, 200, (0.007, 0.01)),
        (40, 16, 200, (0.01,)),
        (60, 8, 200, (0.01,)),
        (80, 8, 150, (0.007, 0.01, 0.014, 0.02)),
        (120, 8, 100, (0.014, 0.02)),
    )
    for rate in rates
]
"""About the same number of rows each. Fewer than 8 samples are less than a client's default policy allows."""
DEFAULT.append("probe.head=exact,probe.k=80,federation.batch=8,update.rate=0.01,rounds=150")  # the best of them

CROWD = [
    f"probe.k={k},federation.participation={participation},federation.batch={batch},update.rate={rate},rounds={rounds}"
    for k, participation, batch, rounds, rates in (
        (40, 0.25, 0, 120, (0.01, 0.02)),
        (80, 0.1, 0, 150, (0.01, 0.014, 0.02, 0.03)),
        (160, 0.1, 3, 125, (0.014, 0.02, 0.03)),
        (160, 0.05, 0, 150, (0.014, 0.02, 0.03)),
    )
    for rate in rates
]
"""About the same number of rows each: more clients a round, or more directions."""

CANDIDATES = {"digits": DEFAULT, "digits-crowd": CROWD}


def validation(data: Path | None) -> Source:
    """The digits' training samples, a fifth of which takes the place of the test samples."""
    whole = digits(data).train
    order = permutation(bytes([1]) * 32, len(whole))
    held_out, rest = np.split(order, [len(order) // 5])

    def part(chosen: np.ndarray) -> Dataset:
        return Dataset(whole.samples[chosen], whole.labels[chosen], whole.prepare)

    source = digits(data)
    return Source(lambda: part(rest), lambda: part(held_out), classes=10, scale=source.scale, shape=source.shape)


def measured(name: str, settings: str, seeds: int) -> dict[str, Any]:
    accuracies, seconds = [], []
    for seed in range(seeds):
        plan = load(name, [*settings.split(","), 'task.data="default_plan:validation"', f"seed={seed}"])
        began = time.process_time()
        with tempfile.TemporaryDirectory() as folder:
            summary = simulate(plan, Path(folder) / "run")
        seconds.append(time.process_time() - began)
        accuracies.append(float(summary["test_accuracy"]))
    return {
        "settings": settings,
        "median": round(median(accuracies), 4),
        "least": round(min(accuracies), 4),
        "cpu_seconds": round(median(seconds), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", choices=CANDIDATES, default="digits")
    parser.add_argument("--only", action="append", metavar="SETTINGS", help="settings to try, separated by commas")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="write a file in results/")
    arguments = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))
    rows = []
    for settings in arguments.only or CANDIDATES[arguments.plan]:
        rows.append(measured(arguments.plan, settings, arguments.seeds))
        print(
            "{settings:70} median {median:.4f}  least {least:.4f}  {cpu_seconds:5.1f} s of CPU".format(**rows[-1]),
            flush=True,
        )
    if arguments.json:
        FILES[arguments.plan].write_text(json.dumps({"seeds": arguments.seeds, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
