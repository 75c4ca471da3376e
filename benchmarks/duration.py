"""What `baffle plan` says about the time of a run, against what the run takes.

    BAFFLE_DATA=... python benchmarks/duration.py            # a table
    BAFFLE_DATA=... python benchmarks/duration.py --json     # ... and write results/duration.json

Both are CPU seconds of one thread (`run.workers = 1`), so that they can be compared on a machine with other work to do.
A run counts from the end of its first round, without loading data and the check of σ before it.
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from baffle.journal.folder import RunFolder
from baffle.measuring.duration import measure_duration
from baffle.plan import load
from baffle.server.round import Played
from baffle.simulation import begin
from baffle.task.load import load_task

RESULTS = Path(__file__).parents[1] / "results" / "duration.json"

LENET = ["task.data=mnist", "federation.clients=5"]
PLANS = {
    "digits, the default": ("digits", []),
    "digits on PyTorch": ("digits", ["run.runtime=torch"]),
    "digits, units": ("digits", ["probe.supports=units", "probe.k=200"]),
    "MNIST, the same LeNet": ("digits", [*LENET, "rounds=40"]),
    "MNIST, FedZO": ("fedzo-mnist", ["rounds=20"]),
}


def compare(name: str, extra: list[str]) -> dict[str, Any]:
    source, settings = PLANS[name]
    task = load_task(load(source, [*settings, *extra, "run.workers=1"]))
    predicted = measure_duration(task, time.process_time).total
    moments = list[float]()

    def note(_: Played) -> bool:
        moments.append(time.process_time())
        return False

    with tempfile.TemporaryDirectory() as folder:
        begin(RunFolder.new(Path(folder) / "run"), task, stop=note)
    rounds = task.plan.rounds
    taken = (time.process_time() - moments[0]) * rounds / (rounds - 1)
    return {
        "rounds": rounds,
        "predicted": round(predicted, 2),
        "taken": round(taken, 2),
        "off": round(predicted / taken - 1, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plans", nargs="*", default=list(PLANS), help=f"of {', '.join(PLANS)} (default: all)")
    parser.add_argument("--set", action="append", default=[], dest="settings", help="a setting for all plans")
    parser.add_argument("--json", action="store_true", help=f"write {RESULTS.name}")
    parser.add_argument("--out", type=Path, help="write results here instead")
    args = parser.parse_args()
    load, rows = round(os.getloadavg()[0], 1), {}
    for name in args.plans:
        rows[name] = compare(name, args.settings)
        print(f"{name:24} {json.dumps(rows[name])}", flush=True)
    if file := args.out or (RESULTS if args.json else None):
        found = {"load_before": load, "rows": rows}
        file.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
