"""CPU seconds and scalars until a model knows digits, for each way to train it, all tuned with the same budget.

    BAFFLE_DATA=... python benchmarks/time_to_accuracy.py --out results/time_to_accuracy.json
    BAFFLE_DATA=... python benchmarks/time_to_accuracy.py --only 'lenet/units/*' --out results/time_to_accuracy.json

**Modes.** Outer directions, which share forward passes; units, which touch one output of a layer; directions of one
layer each; dense directions of ±1; all of these with an exact head; the authors' way, gaussian directions of each
client's own on a batch of 32; and backpropagation. All run on PyTorch on one thread, with plain sums, Adam, gradients
clipped to 0.3 and the same moving average of the weights.

**Clients.** All clients with the same directions measure what one client with all their samples would. So these modes
have one client, and none of them pays for a federation. The authors' way has ten, as theirs: with one it would be dense
directions. Each of the ten takes a pass without a direction, too. With N clients, the other modes send N times as many
scalars together, and repeat N times what does not depend on the samples.

**Tuning.** Each mode has six trials for each model: two sizes (K and the samples of a client), whose rounds take a
similar time where a mode allows it, at three rates. Trials take the same CPU seconds, with a seed that is not measured.
The best accuracy at their end on 2,000 held-out training images of MNIST decides.

**Measurement.** Three seeds on MNIST, and on USPS with the settings found on MNIST. The clock counts the CPU time of
rounds, client and server together, but not that of measuring the accuracy, which is that of the averaged weights on the
first 2,000 test images. It is measured whenever the clock has gone on by a sixteenth. A run ends when it has reached
95 %, or at its limit, or at a third of its limit if it has not reached 80 % by then. Scalars are those of all clients
together; for backpropagation, entries of gradients. Clients with directions of their own send gradients, too, which can
be summed; counted are the scalars behind them. The numbers of an exact head count as scalars.

Results are written after every trial and run, and what is in the file is not run again.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from training import training

from baffle.data.sources import Source, data_folder, load as load_source
from baffle.plan import Plan, load
from baffle.runtime.torch.loss import one_thread_each
from baffle.task.load import load_task

COMMON = (
    *("federation.level=batch", "federation.clients=1", "secure.mode=off", "rounds=1000000", "run.runtime=torch"),
    *("probe.sigma=1e-3", "probe.distribution=rademacher", "update.clip=0.3", "update.ema=0.95", "run.workers=1"),
)
MODELS = {
    "lenet": (),
    "mlp": ('task.model={name="custom", factory="nets:mlp"}',),
    "transformer": ('task.model={name="custom", factory="nets:seeing"}',),
}
_EXACT = "probe.head=exact"
MODES = {
    "outer": ("probe.distribution=outer",),
    "outer, exact head": ("probe.distribution=outer", _EXACT),
    "units": ("probe.supports=units",),
    "units, exact head": ("probe.supports=units", _EXACT),
    "layers": ("probe.supports=layers",),
    "layers, exact head": ("probe.supports=layers", _EXACT),
    "dense": (),
    "dense, exact head": (_EXACT,),
    "authors": (
        *("federation.clients=10", "federation.seeds=own", "probe.distribution=gaussian", "probe.sigma=1e-4"),
        "update.weight_decay=5e-4",
    ),
    "backpropagation": ("estimator=backprop",),
}
_DIRECTIONS = {
    "lenet": {"outer": ((200, 8), (400, 2)), "units": ((1600, 8), (3200, 16)), "dense": ((100, 8), (200, 2))},
    "mlp": {"outer": ((200, 32), (800, 8)), "units": ((1600, 32), (3200, 64)), "dense": ((100, 32), (100, 128))},
    "transformer": {"outer": ((200, 2), (100, 8)), "dense": ((100, 8), (100, 32))},
}
_OTHERS = {"authors": ((20, 32), (5, 32)), "backpropagation": ((1, 16), (1, 64))}


def sizes(model: str, mode: str) -> tuple[tuple[int, int], ...]:
    """K and the samples of a client. The authors' own K is 100, of which a round of LeNet takes six seconds. An exact
    head changes neither, and directions of one layer each have what dense ones have. None, if the model has no such
    directions."""
    kind = mode.removesuffix(", exact head").replace("layers", "dense")
    return ({**_DIRECTIONS[model], **_OTHERS}).get(kind, ())


RATES = {"lenet": (0.01, 0.02, 0.04), "mlp": (0.0025, 0.005, 0.01), "transformer": (0.001, 0.003, 0.009)}
SETS, SEEDS, TUNING_SEED = ("mnist", "usps"), (0, 1, 2), 100
GOALS = (0.85, 0.90, 0.95)
TRIAL_SECONDS = {"lenet": 20.0, "mlp": 8.0, "transformer": 8.0}
LIMITS = {"lenet": 120.0, "mlp": 60.0, "transformer": 60.0}
PROMISING, LOOK = 0.80, 1 / 3
"""A run that is below this accuracy after this part of its limit ends there."""

TESTED, EVERY = 2000, 30
"""How many images are tested, and which of MNIST's training images are held out: every thirtieth."""


@dataclass(frozen=True)
class Setting:
    """A row of a mode's tuning."""

    k: int
    batch: int
    rate: float

    def __str__(self) -> str:
        return f"{self.k}x{self.batch}/{self.rate:g}"


def settings_of(model: str, mode: str) -> list[Setting]:
    return [Setting(k, batch, rate) for k, batch in sizes(model, mode) for rate in RATES[model]]


def plan_of(model: str, mode: str, setting: Setting, data: str, seed: int) -> Plan:
    sizes = (f"probe.k={setting.k}", f"federation.batch={setting.batch}", f"update.rate={setting.rate}")
    own = (f"task.data={data}", f"seed={seed}", *sizes)
    return load("paper-mnist-lenet", [*COMMON, *MODELS[model], *MODES[mode], *own])


@cache
def whole(data: str) -> Source:
    return load_source(data, data_folder(None))


@cache
def held_out() -> Source:
    """MNIST, tested on a part of its training images."""
    source = whole("mnist")
    numbers = np.arange(len(source.train))
    kept, held = (source.train.rows(numbers[chosen]) for chosen in (numbers % EVERY > 0, numbers % EVERY == 0))
    return Source(kept, held, source.classes, scale=source.scale, shape=source.shape)


def tried(model: str, mode: str, setting: Setting, seconds: float) -> dict[str, Any]:
    """A trial: the accuracy on held-out images after so many CPU seconds."""
    source = held_out()
    task = load_task(plan_of(model, mode, setting, "mnist", TUNING_SEED), source=source)
    with closing(training(task)) as rounds:
        end = next(progress for progress in rounds if progress.seconds >= seconds)
        judged = end.accuracy(source.test.batch(np.arange(TESTED)))
    return {"accuracy": judged, "rounds": end.rounds, "cpu_seconds": round(end.seconds, 1)}


def measured(model: str, mode: str, setting: Setting, data: str, seed: int, limit: float) -> dict[str, Any]:
    """A run: what each goal took."""
    task = load_task(plan_of(model, mode, setting, data, seed), source=whole(data))
    test, plan, weights = task.source.test.batch(np.arange(TESTED)), task.plan, len(task.initial_weights())
    sent = plan.federation.clients * (plan.probe.k + plan.head_size if plan.estimator == "probe" else weights)
    curve, reached, due = list[tuple[float, float]](), dict[str, dict[str, float]](), 0.0
    with closing(training(task)) as rounds:
        for progress in rounds:
            seconds = progress.seconds
            if seconds < min(due, limit):
                continue
            due = max(seconds + limit / 1024, seconds * 17 / 16)
            curve.append((round(seconds, 2), progress.accuracy(test)))
            best = max(found for _, found in curve)
            row = {"rounds": progress.rounds, "cpu_seconds": round(seconds, 2), "scalars": progress.rounds * sent}
            for goal in GOALS:
                if curve[-1][1] >= goal:
                    reached.setdefault(f"{goal:.0%}", row)
            if seconds >= limit * (1 if best >= PROMISING else LOOK) or len(reached) == len(GOALS):
                break
    about = {"setting": str(setting), "n_weights": weights, "clients": plan.federation.clients, **row}
    about |= {"code": code(), "limit": limit, "best_accuracy": best, "uplink_bytes_per_round": progress.uplink_bytes}
    return about | {"reached": reached, "curve": curve}


@cache
def code() -> str:
    """The date and the commit of the code that is measured."""
    show = ["git", "-C", str(Path(__file__).parent), "show", "-s", "--format=%cs, %h", "HEAD"]
    return subprocess.run(show, capture_output=True, text=True, check=True).stdout.strip()


def chosen(trials: dict[str, Any], model: str, mode: str) -> Setting | None:
    """The setting of the best trial; none before all of them are there. In a tie the first is taken."""
    settings = settings_of(model, mode)
    names = [f"{model}/{mode}/{setting}" for setting in settings]
    if not names or not trials.keys() >= set(names):
        return None
    accuracies = [trials[name]["accuracy"] for name in names]
    return settings[accuracies.index(max(accuracies))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", action="append", metavar="PATTERN", help="trials and runs like 'lenet/units/*' or '*/usps/0'"
    )
    parser.add_argument("--part", type=float, default=1.0, help="take this part of all CPU seconds, for a first look")
    parser.add_argument("--out", type=Path, help="write results here, and continue from those that are already there")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found: dict[str, Any] = {"part": args.part, "trials": {}, "runs": {}}
    if args.out and args.out.exists():
        found = json.loads(args.out.read_text())
        if found["part"] != args.part:
            parser.error(f"--part: {args.out} holds results of {found['part']:g}; leave it out, or give another --out")

    def note(kind: str, name: str, work: Callable[[], dict[str, Any]]) -> None:
        if name in found[kind] or not any(fnmatch(name, pattern) for pattern in args.only or ["*"]):
            return
        found[kind][name] = row = work()
        print(f"{name:36}", {key: row[key] for key in row if key != "curve"}, file=sys.stderr, flush=True)
        if args.out:
            new = args.out.with_name(f".{args.out.name}.new")
            new.write_text(json.dumps(found) + "\n")
            new.replace(args.out)

    with one_thread_each():
        for model in MODELS:
            for mode in MODES:
                for setting in settings_of(model, mode):
                    work = partial(tried, model, mode, setting, args.part * TRIAL_SECONDS[model])
                    note("trials", f"{model}/{mode}/{setting}", work)
            for data, seed, mode in product(SETS, SEEDS, MODES):
                if best := chosen(found["trials"], model, mode):
                    run = partial(measured, model, mode, best, data, seed, args.part * LIMITS[model])
                    note("runs", f"{model}/{mode}/{data}/{seed}", run)
    if args.json:
        print(json.dumps(found, indent=1))
        return
    for name, row in found["runs"].items():
        to = [f"{goal} in {at['cpu_seconds']:.1f} s" for goal, at in row["reached"].items()]
        print(f"{name:36} {row['setting']:16} {', '.join(to) or 'no goal'}, best {row['best_accuracy']:.1%}")


if __name__ == "__main__":
    main()
