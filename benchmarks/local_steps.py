"""Several steps in a round against one, at equal forward passes: accuracy, rounds and bytes.

    python benchmarks/local_steps.py           # about four minutes of CPU time
    python benchmarks/local_steps.py --json    # ... and write results/local_steps.json; rows in it are kept

The digits' plan with K = 40 for 90 steps of every client, on samples that are neither trained on nor tested (a fifth of
the digits' training samples, see default_plan.py). The first ten rounds have one step each, the others P. Clients have
an even share of all classes, or one by a Dirichlet distribution with α = 0.3. Accuracies are those of the averaged
weights.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

from baffle.plan import load
from baffle.simulation import simulate

FILE = Path(__file__).parents[1] / "results" / "local_steps.json"
WARM_UP, MARKS, SEEDS = 10, (30, 50, 90), (0, 1)  # rounds of one step; after how many steps to look; seeds
STEPS: dict[tuple[str, str], tuple[int, ...]] = {
    ("iid", "exact"): (1, 5, 10, 20),
    ("dirichlet", "exact"): (1, 5, 10, 20),
    ("iid", "probed"): (1, 10),
}
PARTITIONS = {"iid": (), "dirichlet": ("federation.partition=dirichlet", "federation.alpha=0.3")}


def rounds_of(steps: int, of_round: int) -> int:
    return WARM_UP + (steps - WARM_UP) // of_round


def played(head: str, steps: int, partition: str, seed: int) -> dict[str, Any]:
    """One run: its accuracies at the marks, and the bytes up of a client."""
    settings = [
        'task.data="default_plan:validation"',
        f"probe.head={head}",
        "probe.k=40",
        f"federation.local_steps={steps}",
        f"federation.warm_up={WARM_UP}",
        f"rounds={rounds_of(MARKS[-1], steps)}",
        f"run.evaluate_every={10 if steps == 1 else 1}",
        f"seed={seed}",
        "run.workers=1",
        'secure.mode="off"',  # changes no weight
    ]
    with tempfile.TemporaryDirectory() as folder:
        summary = simulate(load("digits", [*settings, *PARTITIONS[partition]]), Path(folder) / "run")
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return {
        "accuracies": [records[rounds_of(mark, steps) - 1]["test_accuracy"] for mark in MARKS],
        "forwards": summary["forwards"],
        "uplink_bytes": sum(record["uplink_bytes"] for record in records) // 10,
        "clipped": summary["clipped"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="write results/local_steps.json")
    arguments = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))
    known = json.loads(FILE.read_text())["rows"] if arguments.json and FILE.exists() else []
    rows = []
    for (partition, head), all_steps in STEPS.items():
        for steps in all_steps:
            about = {"partition": partition, "head": head, "steps": steps, "rounds": rounds_of(MARKS[-1], steps)}
            found = next((row for row in known if about.items() <= row.items()), None)
            runs = found["runs"] if found else [played(head, steps, partition, seed) for seed in SEEDS]
            rows.append(about | {"runs": runs})
            each = ", ".join(" ".join(f"{accuracy:.1%}" for accuracy in run["accuracies"]) for run in runs)
            mean = fmean(run["accuracies"][-1] for run in runs)
            print(f"{partition:10} {head:7} P = {steps:2} {about['rounds']:4} rounds {mean:.1%} ({each})", flush=True)
            if arguments.json:
                FILE.write_text(json.dumps({"marks": MARKS, "warm_up": WARM_UP, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
