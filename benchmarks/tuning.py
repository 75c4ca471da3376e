"""What `baffle tune` makes of plans whose σ or rate is wrong by a factor of 100, against plans that were tuned by hand.

    BAFFLE_DATA=... python benchmarks/tuning.py            # a table
    BAFFLE_DATA=... python benchmarks/tuning.py --json     # ... and write results/tuning.json

Digits is the plan that comes with BAFFLE. MNIST and USPS are the same plan with a smaller LeNet, five clients and 100
rounds; their rate was chosen by hand on held-out training samples, over whole runs (the rows `by hand`). Each start is
tuned and then run, with three seeds. The rows `rates and rounds` show how the best rate falls with the rounds. A row
that is in the file is not computed again, so that a long benchmark can be continued. Test samples are used for the
accuracies that are reported, and for no choice.
"""

import argparse
import json
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from baffle.plan import Plan, load
from baffle.simulation import simulate
from baffle.tune.race import Leg, best_rate
from baffle.tune.trial import Ground, Spent, from_folder
from baffle.tune.tuning import tune

RESULTS = Path(__file__).parents[1] / "results" / "tuning.json"

SMALLER = ["task.model.channels=[4,8]", "federation.clients=5", "rounds=100"]
PLANS = {
    "digits": [],
    "mnist": ["task.data=mnist", *SMALLER],
    "usps": ["task.data=usps", *SMALLER],
}
"""Changes to the digits plan. The rates are those that were best by hand."""

RATES_BY_HAND = (0.005, 0.01, 0.02, 0.04)
PARTS = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)
STARTS = {
    "σ × 100": ("probe.sigma", 100.0),
    "σ / 100": ("probe.sigma", 0.01),
    "rate × 100": ("update.rate", 100.0),
    "rate / 100": ("update.rate", 0.01),
}
SEEDS = (0, 1, 2)
EXTRA: list[str] = []
"""Settings for all plans, to shorten the benchmark."""


def plan_of(name: str, seed: int, *settings: str) -> Plan:
    return load("digits", [*PLANS[name], *EXTRA, f"seed={seed}", "run.evaluate_every=1000", *settings])


def off(plan: Plan, start: str) -> str:
    """The setting that makes a plan wrong."""
    key, factor = STARTS[start]
    right = plan.probe.sigma if key == "probe.sigma" else plan.update.rate
    return f"{key}={right * factor!r}"


def run(plan: Plan) -> dict[str, Any]:
    began = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        summary = simulate(plan, Path(folder) / "run")
    return {
        "accuracy": float(summary["test_accuracy"]),
        "forwards": summary["forwards"],
        "cpu_seconds": round(time.process_time() - began, 1),
    }


def by_hand(name: str) -> dict[str, float]:
    """The loss on held-out training samples after a whole run, for each rate."""
    losses = curves(name, RATES_BY_HAND, (1.0,))["losses"]
    return {rate: row[-1] for rate, row in losses.items()}


def curves(name: str, rates: tuple[float, ...], parts: tuple[float, ...]) -> dict[str, Any]:
    """The loss on held-out training samples after parts of a run, for each rate, and which rate is best after each."""
    plan = plan_of(name, 0)
    ground = Ground(plan, from_folder(), Spent())
    marks = [round(part * plan.rounds) for part in parts]
    losses: dict[str, list[float]] = {}
    with ground.task.model.one_thread_each():
        for rate in rates:
            trial, row = ground.begin(plan.probe.sigma, rate), list[float]()
            for mark in marks:
                trial = ground.advance(trial, mark - trial.present.round)
                row.append(round(float(ground.losses(trial).mean()), 4))
            losses[f"{rate:g}"] = row
    legs = [Leg(mark, {float(rate): row[i] for rate, row in losses.items()}) for i, mark in enumerate(marks)]
    return {"rounds": marks, "losses": losses, "best": [round(best_rate(leg), 4) for leg in legs]}


def tuned(plan: Plan) -> dict[str, Any]:
    began = time.process_time()
    advice = tune(plan)
    return {
        "settings": {reason.key: reason.after for reason in advice.reasons},
        "trial_rounds": advice.trial_rounds,
        "forwards": advice.forwards,
        "share": round(advice.share, 3),
        "cpu_seconds": round(time.process_time() - began, 1),
    }


class Table:
    """Rows by name, kept in a file as soon as they are known."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.rows: dict[str, Any] = json.loads(path.read_text()) if path and path.exists() else {}

    def row(self, name: str, compute: Any) -> Any:
        if name not in self.rows:
            self.rows[name] = compute()
            print(f"{name:60} {json.dumps(self.rows[name], ensure_ascii=False)}", flush=True)
            if self._path:
                self._path.write_text(json.dumps(self.rows, indent=1, ensure_ascii=False) + "\n")
        return self.rows[name]


def fill(table: Table, names: list[str], seeds: tuple[int, ...], starts: list[str]) -> None:
    for name in names:
        if name != "digits":
            table.row(f"{name}, by hand", partial(by_hand, name))
    for start in starts:
        for name in names:
            for seed in seeds:
                _start(table, name, seed, start)
    for name in names:
        table.row(f"{name}, rates and rounds", partial(curves, name, (*RATES_BY_HAND, 0.08), PARTS))


def _start(table: Table, name: str, seed: int, start: str) -> None:
    plan = plan_of(name, seed)
    table.row(f"{name}, seed {seed}, reference", lambda: run(plan))
    wrong = plan_of(name, seed, off(plan, start))
    advice = table.row(f"{name}, seed {seed}, {start}, tuning", lambda: tuned(wrong))
    settings = [f"{key}={value!r}" for key, value in advice["settings"].items()]
    table.row(f"{name}, seed {seed}, run with {' '.join(settings)}", lambda: run(plan_of(name, seed, *settings)))


def accuracy_of(rows: dict[str, Any], name: str, seed: int, start: str) -> float:
    """The accuracy of the run that a start was tuned to."""
    settings = [f"{key}={value!r}" for key, value in rows[f"{name}, seed {seed}, {start}, tuning"]["settings"].items()]
    return float(rows[f"{name}, seed {seed}, run with {' '.join(settings)}"]["accuracy"])


def summary(rows: dict[str, Any], seeds: tuple[int, ...] = SEEDS) -> list[dict[str, Any]]:
    """A row for each plan and start that all seeds have been through: medians over the seeds."""
    found = []
    for name in PLANS:
        for start in STARTS:
            tunings = [rows.get(f"{name}, seed {seed}, {start}, tuning") for seed in seeds]
            if not all(tunings):
                continue
            reference = median(rows[f"{name}, seed {seed}, reference"]["accuracy"] for seed in seeds)
            after = median(accuracy_of(rows, name, seed, start) for seed in seeds)
            share = median(tuning["share"] for tuning in tunings if tuning)
            rates = [tuning["settings"]["update.rate"] for tuning in tunings if tuning]
            sigmas = [tuning["settings"]["probe.sigma"] for tuning in tunings if tuning]
            found.append(
                {"plan": name, "start": start, "reference": reference, "tuned": after, "share": share}
                | {"rates": rates, "sigmas": sigmas}
            )
    return found


def options(description: str | None, results: Path) -> argparse.ArgumentParser:
    """The options of a benchmark that trains with several seeds and keeps its rows in a table."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=len(SEEDS))
    parser.add_argument("--set", action="append", default=[], dest="settings", help="a setting for all plans")
    parser.add_argument("--json", action="store_true", help=f"write {results.name}")
    parser.add_argument("--out", type=Path, help="write results here instead")
    return parser


def main() -> None:
    parser = options(__doc__, RESULTS)
    parser.add_argument("plans", nargs="*", default=list(PLANS), help=f"of {', '.join(PLANS)} (default: all)")
    parser.add_argument("--starts", type=int, default=len(STARTS), help="how many of the starts (default: all)")
    arguments = parser.parse_args()
    EXTRA.extend(arguments.settings)
    seeds = tuple(range(arguments.seeds))
    table = Table(arguments.out or (RESULTS if arguments.json else None))
    fill(table, arguments.plans, seeds, list(STARTS)[: arguments.starts])
    for row in summary(table.rows, seeds):
        print("{plan:8} {start:12} reference {reference:.2%}  tuned {tuned:.2%}  trials {share:.0%}".format(**row))


if __name__ == "__main__":
    main()
