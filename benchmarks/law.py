"""Whole runs whose scalars are drawn from their law, against runs that probe.

python benchmarks/law.py short --runs runs/law --out results/law-short.json   # five seeds each way, three rows: minutes
python benchmarks/law.py full --runs runs/law --out results/law-full.json     # five drawn runs of table 1: hours

Finished runs under --runs are used as they are, and stopped ones resumed. Short runs come in pairs: the same seed gives
both ways the same initial weights, shares and batches, which move the accuracy more than directions do.
"""

import argparse
import json
from collections.abc import Sequence
from itertools import product
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from baffle.plan import Plan, load
from baffle.simulation import resume, simulate

SEEDS = 5
T = 2.776  # the 97.5 % point of Student's distribution with SEEDS − 1 degrees of freedom
SIGNS = list(product((-1, 1), repeat=SEEDS))
PAGE = Path(__file__).resolve().parents[1] / "results" / "paper" / "table1-full.json"
ROW = "LeNet, MNIST: K = 100"  # of table 1: it was probed at full length

SHORT = (
    *('task.model={name="lenet", channels=[4, 8], head="flatten"}', "rounds=40", "federation.batch=16", "probe.k=40"),
    *("probe.distribution=gaussian", "probe.sigma=1e-3", "update.rate=0.02", "update.ema=0.9", "secure.mode=off"),
    *("run.evaluate_every=40", "run.runtime=torch", "run.workers=1"),
)
ROWS = {"dense": (), "layers": ("probe.supports=layers",), "relu": ("task.model.activation=relu",)}


def run(plan: Plan, runs: Path) -> dict[str, Any]:
    """The summary of a plan's run under this folder, which is played or resumed if need be."""
    folder = runs / f"{plan.name}-{plan.digest().hex()[:12]}"
    if not (folder / "plan.toml").exists():
        summary = simulate(plan, folder)
    elif not (folder / "summary.json").exists():
        summary = resume(folder)
    else:
        summary = json.loads((folder / "summary.json").read_text())
    print(f"{folder.name}: {plan.scalars}, {summary['test_accuracy']:.2%} in {summary['seconds']:.0f} s", flush=True)
    return {name: summary[name] for name in ("test_accuracy", "train_loss", "seconds", "weights_sha256")}


def chance(gaps: Sequence[float]) -> float:
    """How often a mean at least as far from zero comes out if every pair's sign is open: at best 2 in 2^SEEDS."""
    means = [abs(fmean(sign * gap for sign, gap in zip(signs, gaps, strict=True))) for signs in SIGNS]
    return sum(mean >= abs(fmean(gaps)) - 1e-12 for mean in means) / len(means)


def interval(gaps: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of the mean of the pairs' differences, drawn less probed."""
    reach = T * stdev(gaps) / sqrt(len(gaps))
    return fmean(gaps) - reach, fmean(gaps) + reach


def short(runs: Path) -> dict[str, Any]:
    rows = []
    for name, settings in ROWS.items():
        found = dict[str, list[dict[str, Any]]]()
        for estimator in ("probe", "law"):
            plans = [
                load("digits", (*SHORT, *settings, f"estimator={estimator}", f"seed={seed}", f"name=law-{name}"))
                for seed in range(SEEDS)
            ]
            found[estimator] = [run(plan, runs) for plan in plans]
        row: dict[str, Any] = {"row": name, "probed": found["probe"], "drawn": found["law"]}
        for measure in ("test_accuracy", "train_loss"):
            probed, drawn = ([each[measure] for each in found[way]] for way in ("probe", "law"))
            gaps = [there - here for here, there in zip(probed, drawn, strict=True)]
            row[measure] = {"means": [fmean(probed), fmean(drawn)], "interval": interval(gaps), "p": chance(gaps)}
        rows.append(row)
    return {"rows": rows}


def full(runs: Path) -> dict[str, Any]:
    page = json.loads(PAGE.read_text())
    probed = page["runs"][ROW]["summary"]["test_accuracy"]
    plans = [
        load("paper-mnist-lenet", ("estimator=law", f"seed={seed}", "run.workers=1")) for seed in range(1, SEEDS + 1)
    ]
    drawn = [run(plan, runs) for plan in plans]
    accuracies = [each["test_accuracy"] for each in drawn]
    reach = T * stdev(accuracies) * sqrt(1 + 1 / SEEDS)
    low, high = fmean(accuracies) - reach, fmean(accuracies) + reach
    return {"row": ROW, "probed": probed, "drawn": drawn, "predicted": [low, high], "inside": low <= probed <= high}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["short", "full"])
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    result = {"short": short, "full": full}[args.part](args.runs)
    text = json.dumps(result, indent=1)
    if args.out:
        args.out.write_text(text + "\n")
    else:
        print(text)


if __name__ == "__main__":
    main()
