"""Nets that dense directions train badly: accuracy against rounds for dense directions, one layer at a time, stages and
backpropagation; and how unlike the gradients of their layers are.

    python benchmarks/any_net.py --out results/any_net.json          # all rows; those in the file are not run again
    python benchmarks/any_net.py --out results/any_net.json --json   # and print them

Small nets, and the demo's LeNet, which has normalisation. One client, plain sums, Adam. Whole forward passes run on
ONNX Runtime, which is quicker here, the rest on PyTorch, from the same initial weights. Each way is tried at a few
rates on held-out training samples. The one with the best mean accuracy there is run with other seeds, and the
accuracy on test samples is reported, that of the averaged weights. Dense directions and those of one layer each are
also run at the rate that `baffle.fit` has, whichever was chosen. On nets whose seeds differ by ten points and more,
these two get more seeds, both for choosing and for the report.

    python benchmarks/any_net.py --out results/any_net.json --fit     # other nets, by baffle.fit

Nets as people bring them, by `baffle.fit` with nothing set but 150 rounds, against backpropagation in the same loop,
with five clients. Questions are read from $BAFFLE_DATA/text; BERT needs the package transformers.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import nets
import numpy as np
import torch
from exact_contrast import exact_contrast
from torch import nn

import baffle
from baffle.export import export_plan
from baffle.fitting.fit import DEFAULTS
from baffle.measuring.precision import measure_contrast
from baffle.plan import Custom, Plan, change, load
from baffle.simulation import simulate
from baffle.task.load import load_task

SEEDS, MORE_SEEDS = (0, 1, 2), (0, 1, 2, 3, 4)
TUNING_SEEDS, MORE_TUNING_SEEDS = (100,), (100, 101, 102)
COMPARED, UNSTEADY = ("dense", "layers"), ("eight layers", "SqueezeNet-like")
"""The ways, and the nets, that get more seeds."""

RATES, FIT_RATE = (0.01, 0.02), DEFAULTS["update"]["rate"]
RATES_OF = {("SqueezeNet-like", "layers"): (0.01, 0.014, 0.02)}
"""At the larger rate, one of three seeds never starts and the others are ahead, so one between is tried, too."""

ROUNDS, EVERY = 300, 75
COMMON = (
    *(f"rounds={ROUNDS}", f"run.evaluate_every={EVERY}", "run.workers=1", "secure.mode=off"),
    *("federation.clients=1", "probe.k=80", "update.ema=0.98"),
)
NETS = {
    "eight layers": ("images", "eight_layers", 40),
    "SqueezeNet-like": ("images", "squeezenet", 80),
    "three Fire blocks": ("images", "three_fires", 40),
    "six layers": ("images", "six_layers", 40),
    "transformer": ("tokens", "transformer", 40),
    "LeNet of the demo": ("images", "", 16),
}
"""The data and the factory of each net, and the samples of a round."""

MORE_NETS = {"four layers": ("images", "four_layers", 40)}
"""Nets whose contrast alone is measured."""

WAYS = {
    "dense": (),
    "layers": ("probe.supports=layers",),
    "layers, a moment each": ("probe.supports=layers", "update.moments=layers"),
    "layers, exact head": ("probe.supports=layers", "probe.head=exact"),
    "stages": ("probe.supports=stages",),
    "backpropagation": ("estimator=backprop",),
}
NO_PIPELINE = ("transformer",)
"""Nets that are no chain of stages."""


def plan_of(net: str, way: str, rate: float, seed: int, *, held_out: bool, settings: tuple[str, ...] = ()) -> Plan:
    data, factory, batch = (NETS | MORE_NETS)[net]
    model = (f'task.model={{name="custom", factory="nets:{factory}"}}', "task.init=") if factory else ()
    chosen = (*COMMON, f"federation.batch={batch}", *WAYS[way], f"update.rate={rate}", f"seed={seed}")
    return load("digits", (*model, f'task.data="nets:{data}{"_held_out" * held_out}"', *chosen, *settings))


def curve_of(plan: Plan) -> list[float]:
    """The accuracy after every so many rounds."""
    with tempfile.TemporaryDirectory() as folder:
        if plan.estimator == "probe" and plan.probe.moves_whole_models and isinstance(plan.task.model, Custom):
            (Path(folder) / "plan.toml").write_text(plan.to_toml())
            export_plan(f"{folder}/plan.toml", Path(folder) / "model")
            plan = change(plan, ['task.model={name="onnx"}', f"run.model={folder}/model"])
        simulate(plan, Path(folder) / "run")
        records = map(json.loads, (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines())
        return [round(record["test_accuracy"], 4) for record in records if "test_accuracy" in record]


def contrast_of(net: str) -> dict[str, Any]:
    """How unlike the layers are at the initial weights, by probes as `baffle plan` measures it, and by
    backpropagation."""
    tasks = [
        load_task(plan_of(net, "dense", RATES[0], seed, held_out=False, settings=("run.runtime=torch",)))
        for seed in SEEDS
    ]
    probed = [contrast for task in tasks if (contrast := measure_contrast(task))]
    exact = [exact_contrast(task) for task in tasks]
    return {
        "layers": probed[0].layers,
        "factor": [round(contrast.factor, 2) for contrast in probed],
        "noise": [round(contrast.noise, 2) for contrast in probed],
        "exact_factor": [round(contrast.factor, 2) for contrast in exact],
        "exact_noise": [round(contrast.noise, 2) for contrast in exact],
    }


FIT_ROUNDS, FIT_EVERY, FIT_CLIENTS = 150, 50, 5
FIT_NETS: dict[str, tuple[str, Callable[[int], nn.Module], int]] = {
    "tied MLP": ("digits", nets.Tied, 10),
    "SqueezeNet-like": ("digits", nets.squeezenet, 10),
    "LSTM": ("digits", nets.Recurrent, 10),
    "transformer on TREC": ("questions", nets.Asking, nets.KINDS_OF_QUESTIONS),
    "BERT on TREC": ("bert", nets.bert, nets.KINDS_OF_QUESTIONS),
}
FIT_WAYS: dict[str, dict[str, Any]] = {
    "backpropagation": {"estimator": "backprop"},
    "fit": {},
}


def samples_of(data: str, part: str) -> tuple[Any, Any]:
    """All training or test samples, as `baffle.fit` takes them."""
    if data == "digits":
        source = nets.images()
        batch = (source.train if part == "train" else source.test).batch(np.arange(len(getattr(source, part))))
        return batch.x, batch.y
    x, y = nets.questions(part)
    names = ("input_ids", "attention_mask") if data == "bert" else ("x", "mask")
    return {names[0]: x, names[1]: x != 0}, y


def fitted(net: str, way: str, seed: int, settings: Sequence[str] = ()) -> list[float]:
    """The accuracy after every so many rounds of `baffle.fit`."""
    data, make, classes = FIT_NETS[net]
    torch.manual_seed(seed)
    plan = {"rounds": FIT_ROUNDS, "seed": seed, "federation.clients": FIT_CLIENTS, "run.workers": 1}
    plan |= {"run.evaluate_every": FIT_EVERY, **FIT_WAYS[way]}
    wanted = [*(f"{name}={value}" for name, value in plan.items()), *settings]
    with tempfile.TemporaryDirectory() as folder:
        given = (make(classes), samples_of(data, "train"), samples_of(data, "test"))
        measured = baffle.fit(*given, plan=wanted, out=f"{folder}/run", progress=False).metrics["test_accuracy"]
        return [round(float(accuracy), 4) for accuracy in measured[~np.isnan(measured)]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--net", action="append", choices=NETS, help="only this one; may be repeated")
    parser.add_argument("--way", action="append", choices=WAYS, help="only this one; may be repeated")
    parser.add_argument("--out", type=Path, help="write rows here, and continue from those that are already there")
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--json", action="store_true")
    parser.add_argument(
        "--fit", action="append", nargs="?", const="", metavar="NET", help="only baffle.fit, of this net"
    )
    args = parser.parse_args()
    if args.out and args.settings:
        parser.error("rows in --out are those of the benchmark's own settings; leave --set or --out out")
    found: dict[str, Any] = {"contrast": {}, "held_out": {}, "test": {}, "fit": {}}
    if args.out and args.out.exists():
        found |= json.loads(args.out.read_text())

    def note(part: str, key: str, value: Any) -> None:
        found[part][key] = value
        print(f"{part:9} {key:50} {value}", file=sys.stderr, flush=True)
        if args.out:
            args.out.write_text(json.dumps(found, indent=1) + "\n")

    def curve(part: str, net: str, way: str, rate: float, seed: int) -> list[float]:
        key = f"{net} | {way} | {rate:g} | {seed}"
        if key not in found[part]:
            plan = plan_of(net, way, rate, seed, held_out=part == "held_out", settings=tuple(args.settings))
            note(part, key, curve_of(plan))
        accuracies: list[float] = found[part][key]
        return accuracies

    if args.fit:
        chosen = [net for net in FIT_NETS if net in args.fit or "" in args.fit]
        for seed, net, way in product(SEEDS, chosen, FIT_WAYS):
            if (key := f"{net} | {way} | {seed}") not in found["fit"]:
                note("fit", key, fitted(net, way, seed, args.settings))
        print(json.dumps(found["fit"], indent=1))
        return
    for net in args.net or NETS:
        for way in args.way or WAYS:
            if net in NO_PIPELINE and way == "stages":
                continue
            more = way in COMPARED and net in UNSTEADY
            rates, tuning = RATES_OF.get((net, way), RATES), MORE_TUNING_SEEDS if more else TUNING_SEEDS
            totals = {rate: sum(curve("held_out", net, way, rate, seed)[-1] for seed in tuning) for rate in rates}
            best = max(rates, key=totals.__getitem__)
            for rate in sorted({best, FIT_RATE} if way in COMPARED else {best}):
                for seed in MORE_SEEDS if more else SEEDS:
                    curve("test", net, way, rate, seed)
    for net in args.net or (*NETS, *MORE_NETS):
        if net not in found["contrast"]:
            note("contrast", net, contrast_of(net))
    if args.json:
        print(json.dumps(found, indent=1))
        return
    last = dict[str, list[float]]()
    for key, accuracies in found["test"].items():
        last.setdefault(key.rpartition(" | ")[0], []).append(accuracies[-1])
    for key, accuracies in last.items():
        print(f"{key:45} median {statistics.median(accuracies):.1%}  {accuracies}")


if __name__ == "__main__":
    main()
