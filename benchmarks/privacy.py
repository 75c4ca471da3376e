"""What privacy costs: accuracy against ε, by forward passes and by backpropagation under the same noise.

    BAFFLE_DATA=... python benchmarks/privacy.py            # a table
    BAFFLE_DATA=... python benchmarks/privacy.py --json     # ... and write results/privacy.json

Softmax regression on the digits, 100 clients of 14 samples each, and on MNIST in 14 × 14 pixels, whose 539 writers are
the clients. ε is that of the whole run at δ = 10⁻⁵, for a client that takes part in every round, without amplification.
Forward passes are tried with one step in a round and with ten: on the digits three rounds of one step and four of ten
instead of forty, for the writers two and one instead of twelve. Nobody drops out, and a sum needs nine clients in ten
(`secure.floor`). Sums are plain here, because masks change no bit.
The clipping norm and the rate are chosen on a fifth of the training samples that is held out: on the digits those
for ε = 8 serve ε = 4 and those for ε = 2 serve ε = 1; for the writers those for ε = 2 serve all. Then each ε is run
with three seeds and judged on the test samples, which decide nothing. Noise comes from the operating system, so that
figures differ from run to run. A row that is in the file is not computed again: a long benchmark can be continued.
"""

import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from tuning import SEEDS, Table, options

from baffle.plan import Plan, load
from baffle.privacy.skellam import draw
from baffle.simulation import simulate

RESULTS = Path(__file__).parents[1] / "results" / "privacy.json"

EPSILONS = (0, 8, 2, 1, 4)
"""0: no privacy. The order is that in which rows are computed."""

SEED_OF_CHOICES = 100
DELTA = 1e-5
ESTIMATORS = {"probe": "probe", "ten steps": "probe", "backprop": "backprop"}
"""Ways, and the estimator of each. Rounds of ten steps follow a few of one step each."""

EXTRA: list[str] = []
"""Settings for all plans, to shorten the benchmark."""


@dataclass(frozen=True)
class Experiment:
    """A task, and what is tried: clipping norms for each way, then rates. The middle rate serves the clipping norms,
    which are about a sixth to a half of the median length at the initial weights, √K times as long for K scalars as for
    a gradient, and √10 times as long for those of ten steps. `chosen_at`: ε → the ε that its clipping norm and its rate
    are chosen at."""

    data: str
    data_to_choose_on: str
    settings: tuple[str, ...]
    ten_steps: tuple[str, ...]
    clips: Mapping[str, tuple[float, ...]]
    rates: tuple[float, float, float]
    chosen_at: Mapping[float, float]


EXPERIMENTS = {
    "digits": Experiment(
        "digits",
        "privacy_data:digits_to_choose_on",
        ("federation.clients=100", "federation.batch=0", "secure.floor=90", "probe.k=100", "rounds=40"),
        ("federation.local_steps=10", "federation.warm_up=3", "federation.batch=15", "rounds=7"),
        {"probe": (4.0, 8.0, 16.0), "ten steps": (12.0, 24.0, 48.0), "backprop": (0.4, 0.8, 1.6)},
        (0.03, 0.06, 0.12),
        {0: 0, 8: 8, 4: 8, 2: 2, 1: 2},
    ),
    "writers": Experiment(
        "privacy_data:writers",
        "privacy_data:writers_to_choose_on",
        (
            *("federation.clients=539", "federation.partition=writer", "federation.batch=16", "secure.floor=485"),
            *("probe.k=300", "rounds=12"),
        ),
        ("federation.local_steps=10", "federation.warm_up=2", "rounds=3"),
        {"probe": (7.0, 14.0, 28.0), "ten steps": (22.0, 44.0, 88.0), "backprop": (0.4, 0.8, 1.6)},
        (0.05, 0.1, 0.2),
        {0: 0, 8: 2, 4: 2, 2: 2, 1: 2},
    ),
}


def plan_of(name: str, way: str, epsilon: float, clip: float, rate: float, seed: int, *, choosing: bool) -> Plan:
    experiment = EXPERIMENTS[name]
    private = [f"privacy.epsilon={epsilon}", f"privacy.delta={DELTA}", f"privacy.clip={clip}"] if epsilon else []
    return load(
        "digits",
        [
            *(f'task.data="{experiment.data_to_choose_on if choosing else experiment.data}"', f"seed={seed}"),
            *("task.model={name='softmax'}", "probe.supports=units", "run.runtime=torch", "run.evaluate_every=1000"),
            *(
                "federation.weighting=uniform",
                "secure.mode=off",
                f'estimator="{ESTIMATORS[way]}"',
                f"update.rate={rate}",
            ),
            *experiment.settings,
            *(experiment.ten_steps if way == "ten steps" else ()),
            *private,
            *EXTRA,
        ],
    )


def run(plan: Plan) -> dict[str, Any]:
    began = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        summary = simulate(plan, Path(folder) / "run")
    found = {
        "accuracy": round(float(summary["test_accuracy"]), 4),
        "cpu_seconds": round(time.process_time() - began, 1),
    }
    if plan.privacy.on:
        found |= {"epsilon": summary["epsilon"], "noise": summary["noise"], "clip": plan.privacy.clip}
    return found | {"rate": plan.update.rate}


def choose(table: Table, name: str, estimator: str, epsilon: float) -> tuple[float, float]:
    """The clipping norm at the middle rate, then the rate, that are best on the samples held out."""
    experiment = EXPERIMENTS[name]
    clips = experiment.clips[estimator] if epsilon else (0.0,)
    middle = experiment.rates[1]

    def accuracy(clip: float, rate: float) -> float:
        plan = plan_of(name, estimator, epsilon, clip, rate, SEED_OF_CHOICES, choosing=True)
        label = f"{name}, {estimator}, ε {epsilon:g}, choosing: clip {clip:g}, rate {rate:g}"
        return float(table.row(label, partial(run, plan))["accuracy"])

    clip = max(clips, key=lambda clip: accuracy(clip, middle))
    return clip, max(experiment.rates, key=lambda rate: accuracy(clip, rate))


def time_noise() -> dict[str, float]:
    """Milliseconds for 10,000 numbers, the least of 20 turns, by the logarithm of the variance."""
    found = {}
    for bits in (0, 10, 20, 30, 40, 50):
        draw(1, 2.0**bits)  # makes the table
        seconds = []
        for _ in range(20):
            began = time.perf_counter()
            draw(10_000, 2.0**bits)
            seconds.append(time.perf_counter() - began)
        found[f"2^{bits}"] = round(1000 * min(seconds), 2)
    return found


def fill(table: Table, names: Sequence[str], estimators: Sequence[str], seeds: Sequence[int]) -> None:
    table.row("noise, ms for 10,000 numbers", time_noise)
    for name in names:
        for estimator in estimators:
            for epsilon in EPSILONS:
                clip, rate = choose(table, name, estimator, EXPERIMENTS[name].chosen_at[epsilon])
                for seed in seeds:
                    plan = plan_of(name, estimator, epsilon, clip, rate, seed, choosing=False)
                    table.row(f"{name}, {estimator}, ε {epsilon:g}, seed {seed}", partial(run, plan))


def summary(rows: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each task, estimator and ε that all seeds have been through."""
    found = []
    for name in EXPERIMENTS:
        for estimator in ESTIMATORS:
            for epsilon in (0, 8, 4, 2, 1):
                runs = [rows.get(f"{name}, {estimator}, ε {epsilon:g}, seed {seed}") for seed in SEEDS]
                done = [run for run in runs if run]
                if len(done) == len(SEEDS):
                    accuracies = [run["accuracy"] for run in done]
                    keep = {key: done[0].get(key) for key in ("noise", "clip", "rate")}
                    found.append(
                        {"task": name, "estimator": estimator, "target": epsilon, "median": median(accuracies)}
                        | {"accuracies": accuracies}
                        | keep
                    )
    return found


def main() -> None:
    parser = options(__doc__, RESULTS)
    parser.add_argument("tasks", nargs="*", default=list(EXPERIMENTS), help=f"of {', '.join(EXPERIMENTS)}")
    parser.add_argument("--estimators", nargs="*", default=list(ESTIMATORS), choices=ESTIMATORS)
    arguments = parser.parse_args()
    EXTRA.extend(arguments.settings)
    sys.path.insert(0, str(Path(__file__).parent))  # for the plans' own data
    table = Table(arguments.out or (RESULTS if arguments.json else None))
    fill(table, arguments.tasks, arguments.estimators, range(arguments.seeds))
    for row in summary(table.rows):
        print("{task:8} {estimator:9} ε {target}  median {median:.1%}  {accuracies}".format(**row))


if __name__ == "__main__":
    main()
