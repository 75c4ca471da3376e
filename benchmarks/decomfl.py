"""BAFFLE against DeComFL's published logs: the same net and images, at equal forward passes and at equal scalars.

    BAFFLE_DATA=... python benchmarks/decomfl.py --out results/decomfl.json    # half an hour; goes on where it was
    BAFFLE_DATA=... python benchmarks/decomfl.py --only 'dense/*' --out FILE   # trials and runs by their names

**Their side.** results/decomfl_logs.json has test accuracies that DeComFL's repository publishes, each with the name of
its file, which says the settings: K = 20 central differences a step, so 40 passes and 20 scalars, and momentum at
0.001. The logs do not tell how many clients a round had, nor how many samples. The code's defaults at that time were 3
of 5 clients and 256 samples of each.

**Our side.** Their net, 28,938 weights, on MNIST of 28 × 28 pixels; Adam and the average of the weights,
and their momentum without an average. A pass has 256 samples, as one of theirs, and there is one client where they
have three, so a step sees a third of their samples. Passes and scalars are those of one client. A direction of one unit
counts as a whole pass, although it costs a part of one. Scalars of an exact head count, one for each of its 15,690
weights.

**Settings.** Each way's rate is the best of a search on a fifth of the training images that no client gets: by the
accuracy after 8,000 passes, with a seed that is not measured. Then three seeds on the test images.

**Scalars** are dot products of a round's directions with a gradient (`run.derivatives = "gradient"`), which probes give
up to rounding and curvature, in a fraction of the time. `checks` plays the first rounds of a seed both ways.
"""

import argparse
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from kept import Kept
from torch import nn
from training import training

from baffle import Dataset, Source
from baffle.core.arrays import F32
from baffle.data.handwriting import MNIST, mnist
from baffle.data.sources import data_folder
from baffle.plan import Plan, load
from baffle.runtime.torch.loss import one_thread_each
from baffle.task.load import load_task

SAMPLES, TRIAL_SEED, SEEDS = 256, 1000, (0, 1, 2)
COMMON = (
    *('task.model={name="custom", factory="decomfl:net"}', "task.data=decomfl:images", "federation.clients=1"),
    *("federation.level=batch", f"federation.batch={SAMPLES}", "secure.mode=off", "rounds=1000000", "run.workers=1"),
    *("run.runtime=torch", "probe.sigma=1e-3", "probe.distribution=rademacher", "update.ema=0.98"),
)
WAYS: dict[str, tuple[str, ...]] = {
    "dense, momentum": (
        *("probe.k=20", "probe.scheme=central", "probe.distribution=gaussian", "update.optimizer=momentum"),
        *("update.weight_decay=1e-5", "update.ema=0"),
    ),
    "dense": ("probe.k=20", "probe.scheme=central"),
    "units": ("probe.k=79", "probe.supports=units"),
    "dense, exact head": ("probe.k=39", "probe.head=exact"),
    "units, exact head": ("probe.k=79", "probe.supports=units", "probe.head=exact"),
}
"""The first is their own way: with the settings of their logs. A round of it takes as many passes and scalars as a step
of theirs; one of units takes twice as many passes, because each unit needs a direction."""
FIRST_RATES, MOST_TRIALS = {"dense, momentum": 0.001}, 6
FIRST_RATE = 0.002
MARKS = (4_000, 40_000)  # passes of a client: 100 and 1,000 rounds of theirs
SCALARS = (2_000, 20_000)  # as many scalars as these rounds of theirs send
CURVE = (1_000, 2_000, 8_000, 16_000, 24_000, 32_000)  # passes after which a run is tested, beside marks
TRIED, CHECKED = 8_000, 2_000  # passes of a trial, and of a check


def net() -> nn.Module:
    """Two convolutions and a linear layer."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(1568, 10)),
    )


def images(data: Path | None) -> Source:
    """MNIST as it is, not enlarged."""
    whole = mnist(data)

    def prepare(samples: Any) -> F32:
        scaled: F32 = (samples[:, None].astype(np.float32) / 255 - MNIST.mean[0]) / MNIST.deviation[0]
        return scaled.astype(np.float32)

    def part(of: Dataset) -> Dataset:
        return Dataset(of.samples, of.labels, prepare)

    return Source(lambda: part(whole.train), lambda: part(whole.test), classes=10, scale=MNIST, shape=(1, 28, 28))


@cache
def source() -> Source:
    return images(data_folder(None))


def plan_of(way: str, rate: float, seed: int, *settings: str) -> Plan:
    return load("paper-mnist-lenet", [*COMMON, *WAYS[way], f"update.rate={rate}", f"seed={seed}", *settings])


def price(plan: Plan) -> tuple[int, int]:
    """Passes and scalars of a client in a round. With central differences an exact head takes a pass of its own."""
    central, exact = plan.probe.scheme == "central", plan.probe.head == "exact"
    passes = 2 * plan.probe.k + exact if central else plan.probe.k + 1
    return passes, plan.probe.k + plan.head_size


def played(plan: Plan, marks: Sequence[int]) -> dict[str, Any]:
    """A run to the last of these marks: the accuracies, each with the passes and the scalars of a client until then."""
    task = load_task(plan, source=source())
    passes, scalars = price(task.plan)
    due = dict.fromkeys(max(1, round(mark / passes)) for mark in sorted(marks))
    test, curve = task.source.test.batch(np.arange(len(task.source.test))), list[tuple[int, int, float]]()
    with closing(training(task)) as rounds:
        for progress in rounds:
            if progress.rounds in due:
                curve.append((progress.rounds * passes, progress.rounds * scalars, progress.accuracy(test)))
            if len(curve) == len(due):
                break
    return {
        "rate": plan.update.rate,
        "weights": len(task.initial_weights()),
        "cpu_seconds": round(progress.seconds, 1),
    } | {
        "passes_a_round": passes,
        "scalars_a_round": scalars,
        "curve": curve,
    }


def tried(way: str, rate: float) -> dict[str, Any]:
    plan = plan_of(way, rate, TRIAL_SEED, "task.validation=true", "run.derivatives=gradient")
    return played(plan, [TRIED])


def measured(way: str, rate: float, seed: int) -> dict[str, Any]:
    passes, scalars = price(load_task(plan_of(way, rate, seed), source=source()).plan)
    at_scalars = (mark * passes // scalars for mark in SCALARS if mark >= scalars)
    marks = {*MARKS, *CURVE, *(mark for mark in at_scalars if mark <= MARKS[-1])}
    return played(plan_of(way, rate, seed, "run.derivatives=gradient"), sorted(marks))


def checked(way: str, rate: float) -> dict[str, Any]:
    """The same rounds with scalars by a gradient and by real passes."""
    return {how: played(plan_of(way, rate, 0, f"run.derivatives={how}"), [CHECKED]) for how in ("gradient", "probes")}


def next_rate(way: str, trials: dict[float, float]) -> float | None:
    """The rate to try next: the first, half of it and twice it, then beyond the end that is best; None: enough."""
    first = FIRST_RATES.get(way, FIRST_RATE)
    for rate in (first, first / 2, first * 2):
        if rate not in trials:
            return rate
    best = max(trials, key=lambda rate: trials[rate])
    beyond = best / 2 if best == min(trials) else best * 2 if best == max(trials) else None
    return beyond if len(trials) < MOST_TRIALS else None


def search(kept: Kept, way: str) -> Iterator[float]:
    """Rates to try for a way, one after the other, as long as each is tried."""
    while (rate := next_rate(way, kept.trials(way))) is not None:
        yield rate
        if rate not in kept.trials(way):
            return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", metavar="PATTERN", help="trials, runs and checks, as 'units/*'")
    parser.add_argument("--out", type=Path, help="write results here, and continue from those that are already there")
    args = parser.parse_args()
    results = Kept(args.out, args.only or ["*"], ("trials", "runs", "checks"))
    with one_thread_each():
        for way in WAYS:
            for rate in search(results, way):
                results.note("trials", f"{way}/{rate:g}", partial(tried, way, rate))
        for seed in SEEDS:
            for way in WAYS:
                if (trials := results.trials(way)) and next_rate(way, trials) is None:
                    best = max(trials, key=lambda rate: trials[rate])
                    results.note("runs", f"{way}/{seed}", partial(measured, way, best, seed))
                    if seed == SEEDS[0]:
                        results.note("checks", way, partial(checked, way, best))


if __name__ == "__main__":
    main()
