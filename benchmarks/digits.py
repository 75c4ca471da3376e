"""The default run with several seeds: accuracy, time, and the share of it that bookkeeping takes.

    python benchmarks/digits.py            # seeds 0 to 4, a table
    python benchmarks/digits.py --json     # the same as one JSON object

Each run is a new process, as if a person had started it, and `wall` counts from its start. Runs are not kept.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


def run_with(seed: int, folder: Path, settings: list[str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "baffle.cli.main", "run", "--json", "--out", str(folder / str(seed))]
    for setting in [f"seed={seed}", *settings]:
        command += ["--set", setting]
    began = time.perf_counter()
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    summary = json.loads(done.stdout)
    return {
        "seed": seed,
        "test_accuracy": summary["test_accuracy"],
        "wall_seconds": round(time.perf_counter() - began, 1),
        "bookkeeping_share": round(summary["bookkeeping_seconds"] / summary["seconds"], 4),
        "uplink_bytes_per_client_round": summary["uplink_bytes_per_client_round"],
        "weights_sha256": summary["weights_sha256"],
        "plan_digest": summary["plan_digest"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = []
        for seed in range(args.seeds):
            runs.append(run_with(seed, Path(folder), args.settings))
            if not args.json:
                run = runs[-1]
                print(
                    f"seed {seed}  accuracy {run['test_accuracy']:.2%}  wall {run['wall_seconds']:.1f} s  "
                    f"bookkeeping {run['bookkeeping_share']:.2%}",
                    flush=True,
                )
    accuracies = [run["test_accuracy"] for run in runs]
    result = {"median_accuracy": statistics.median(accuracies), "least_accuracy": min(accuracies), "runs": runs}
    print(
        json.dumps(result, indent=2)
        if args.json
        else f"median {result['median_accuracy']:.2%}, least {min(accuracies):.2%}"
    )


if __name__ == "__main__":
    main()
