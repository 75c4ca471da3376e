"""Models with weights of integers: which σ works through rounded activations, and how well what is left trains.

    python benchmarks/int8.py --json                  # everything that results/int8.json does not have yet
    python benchmarks/int8.py --json --only 'window/*'

A small net is trained on MNIST at 8 × 8 pixels by backpropagation, and quantised by ONNX Runtime's tools. Then ten
clients fit parts of it to the digits. Rates are chosen on a fifth of the training samples.
"""

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatch
from functools import cache
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import onnx
import torch
from edge import QUIET
from kept import Kept
from torch import nn

import baffle
from baffle.core.arrays import F32, F64, I64
from baffle.core.directions import GAUSSIAN, Directions, dense, lay_out, supports as supports_of
from baffle.core.ports import Batch
from baffle.core.probe import SCHEMES, Loss
from baffle.core.samples import Array
from baffle.data.sources import data_folder, load
from baffle.export import export_onnx
from baffle.network.member.edge import MICRO_BATCH as AT_ONCE
from baffle.paper.gradients import alignment
from baffle.plan import load as load_plan
from baffle.runtime.onnx.foreign import graph_from_file
from baffle.runtime.onnx.loss import OnnxLoss
from baffle.runtime.onnx.model_folder import MODEL, initial_weights
from baffle.runtime.torch.model import initial_module
from baffle.task.load import inputs_of

RESULTS = Path(__file__).parents[1] / "results" / "int8.json"
SIGMAS = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1)
KEYS, K, SAMPLES = 8, 40, 16
SEEDS, RATES = (0, 1, 2), (0.01, 0.03)
PLAN: Mapping[str, Any] = {"rounds": 100, "probe.k": 20}
SIGMA = 0.1  # by the windows, for directions of one layer each

FORMS = ("float32", "dynamic", "QDQ", "QOperator")
PIXELS, TRAINED, TESTED = 128, 2000, 1000  # of PACS
HEAD_RATES = (0.001, 0.003, 0.01)
ONE = {"run.workers": 1, "run.evaluate_every": 1000}

Set = tuple[Array, I64]


def net() -> nn.Sequential:
    layers = list[nn.Module]()
    for before, after in ((1, 16), (16, 16), (16, 32), (32, 32)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
        layers += [nn.MaxPool2d(2)] if before == after else []
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128, 10))


def folded(module: nn.Sequential) -> nn.Sequential:
    """The same net, whose norms have become part of its convolutions."""
    layers = list[nn.Module]()
    for layer in module.eval():
        if isinstance(layer, nn.BatchNorm2d) and isinstance(layers[-1], nn.Conv2d):
            layers[-1] = torch.nn.utils.fusion.fuse_conv_bn_eval(layers[-1], layer)
        else:
            layers.append(layer)
    return nn.Sequential(*layers)


def small_mnist() -> Set:
    """The training set of MNIST at 8 × 8 pixels, on the scale of the digits."""
    train = load("mnist").train
    batch = train.batch(np.arange(len(train)))
    pixels = batch.x.reshape(len(train), 1, 8, 4, 8, 4).mean((3, 5)) * 0.3081 + 0.1307
    return ((pixels - 0.305) / 0.376).astype(np.float32), batch.y


def digits() -> tuple[Set, Set]:
    source = load("digits")
    train, test = (part.batch(np.arange(len(part))) for part in (source.train, source.test))
    return (train.x, train.y), (test.x, test.y)


def learn(module: nn.Module, data: Set, steps: int) -> None:
    """Backpropagation with Adam."""
    random, optimizer = np.random.default_rng(0), torch.optim.Adam(module.parameters(), 0.002)
    for _ in range(steps):
        rows = random.integers(0, len(data[1]), 64)
        loss = nn.functional.cross_entropy(module(torch.from_numpy(data[0][rows])), torch.from_numpy(data[1][rows]))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()


@cache
def models(state: str) -> tuple[Path, nn.Sequential]:
    """A folder with the net in each form, and the net: trained on MNIST, or on the digits, too."""
    torch.manual_seed(0)
    module, data = net(), small_mnist()
    learn(module.train(), data, 1500)
    if state == "digits":
        learn(module, digits()[0], 60)
    module = folded(module)
    folder = Path(tempfile.mkdtemp())
    write_forms(folder, module, data[0][:256])
    return folder, module


class Calibration:
    def __init__(self, x: Array) -> None:
        self.batches = iter([{"x": x}])

    def get_next(self) -> dict[str, Array] | None:
        return next(self.batches, None)


def write_forms(folder: Path, module: nn.Module, x: Array) -> None:
    """The module as ONNX: in floats, and quantised by channel in each form."""
    from onnxruntime.quantization import QuantFormat, QuantType, quantize_dynamic, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process  # after BAFFLE, which turns telemetry off

    logging.getLogger().setLevel(logging.ERROR)
    names: dict[str, Any] = {"input_names": ["x"], "output_names": ["out"]}
    axes = {name: {0: "batch"} for name in ("x", "out")}
    torch.onnx.export(
        module,
        (torch.from_numpy(x[:2]),),
        folder / "raw.onnx",
        dynamo=False,
        dynamic_axes=axes,
        opset_version=17,
        **names,
    )
    quant_pre_process(folder / "raw.onnx", folder / "float32.onnx")
    quantize_dynamic(folder / "float32.onnx", folder / "dynamic.onnx", per_channel=True)
    static = {"QOperator": (QuantFormat.QOperator, True), "QDQ": (QuantFormat.QDQ, True)}
    for name, (form, biases) in {**static, "QDQ, float biases": (QuantFormat.QDQ, False)}.items():
        quantize_static(
            *(folder / "float32.onnx", folder / f"{name}.onnx", Calibration(x)),
            quant_format=form,
            per_channel=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            extra_options={"QuantizeBias": biases, "QDQKeepRemovableActivations": True},
        )
    for name in ("QDQ", "QDQ, float biases"):
        onnx.save(unrounded(onnx.load(folder / f"{name}.onnx")), folder / f"{name}, unrounded.onnx")


def unrounded(model: onnx.ModelProto) -> onnx.ModelProto:
    """A model in QDQ form whose activations are not rounded; its weights are."""
    constants, rounded = {tensor.name for tensor in model.graph.initializer}, set[str]()
    for node in model.graph.node:
        if node.op_type == "QuantizeLinear" or (node.op_type == "DequantizeLinear" and node.input[0] in rounded):
            rounded.update(node.output)
            node.op_type = "Identity"
            del node.input[1:], node.attribute[:]
    assert rounded.isdisjoint(constants)
    return model


def opened(path: Path, train: Sequence[str]) -> tuple[OnnxLoss, F32]:
    graph = graph_from_file(path, train=train)
    weights = graph.flat()
    return OnnxLoss(graph.manifest(weights), graph.model), weights


def by_coordinates(loss: Loss, weights: F32, step: float = 3e-3) -> F64:
    """The gradient, from two passes for each weight."""
    gradient = np.zeros(len(weights))
    for at in range(len(weights)):
        moved = np.repeat(weights[None], 2, 0)
        moved[:, at] += (step, -step)
        gradient[at] = (loss(moved[0]) - loss(moved[1])) / float(moved[0, at] - moved[1, at])
    return gradient


WINDOWS = {
    "biases": (("QDQ, float biases, unrounded", "dynamic", "QDQ, float biases"), ("all",)),
    "scales": (("QDQ, unrounded", "QDQ", "QOperator"), ("scales",)),
}


def window(state: str, part: str, form: str, kind: str) -> dict[str, Any]:
    """Cosines of estimates with the gradient without rounding, as shares of what exact scalars reach."""
    folder, _ = models(state)
    forms, train = WINDOWS[part]
    (x, y), _ = digits()
    exact, weights = opened(folder / f"{forms[0]}.onnx", train)
    runtime, own = opened(folder / f"{form}.onnx", train)
    order = order_of(exact, runtime)
    cosines: dict[str, dict[str, list[float]]] = {scheme: {f"{s:g}": [] for s in SIGMAS} for scheme in SCHEMES}
    for key in range(KEYS):
        batch = Batch(x[key * SAMPLES : (key + 1) * SAMPLES], y[key * SAMPLES : (key + 1) * SAMPLES])
        gradient = by_coordinates(exact.on(batch), weights)[order]
        directions, layers = Directions(bytes([key] * 32), GAUSSIAN), runtime.manifest.layers()
        supports = dense(len(own), K) if kind == "dense" else supports_of(lay_out(layers, K))

        def linear(weights: F32, gradient: F64 = gradient) -> float:
            return float(gradient @ weights)

        exactly = SCHEMES["central"](linear, np.zeros_like(own), directions, supports, 1.0).scalars
        best = alignment(exactly, directions, supports, gradient)
        for scheme, by_sigma in cosines.items():
            for sigma in SIGMAS:
                scalars = SCHEMES[scheme](runtime.on(batch), own, directions, supports, sigma).scalars
                by_sigma[f"{sigma:g}"].append(alignment(scalars, directions, supports, gradient) / best)
    return {
        "n": len(own),
        **{scheme: {s: round(fmean(found), 3) for s, found in by.items()} for scheme, by in cosines.items()},
    }


def order_of(exact: OnnxLoss, other: OnnxLoss) -> I64:
    """Where each weight of the other graph lies in the first: their tensors may have another order."""
    sizes = [tensor.size for tensor in exact.manifest.weights]
    starts = dict(zip((t.name for t in exact.manifest.weights), np.cumsum([0, *sizes[:-1]]).tolist(), strict=True))
    return np.concatenate([starts[t.name] + np.arange(t.size) for t in other.manifest.weights])


WAYS = {
    "head": ["head"],
    "biases": ["*bias*"],
    "scales": ["scales"],
}
ROWS = [
    *(("backpropagation", "float32", way) for way in ("head", "biases")),
    *(("forward passes", form, way) for form in ("float32", "dynamic") for way in ("head", "biases")),
    *(("forward passes", form, way) for form in ("QDQ", "QOperator") for way in ("head", "scales")),
]


def fitted(row: tuple[str, str, str], rate: float, seed: int, *, validation: bool) -> dict[str, float]:
    """One fit on the digits, and the accuracy of what it hands back: also with its head as int8 again."""
    (by, form, way), (folder, module) = row, models("MNIST")
    train, test = digits()
    if validation:
        held = np.arange(len(train[1])) % 5 == 4
        train, test = (train[0][~held], train[1][~held]), (train[0][held], train[1][held])
    plan: dict[str, Any] = {"update.rate": rate, "seed": seed, **PLAN, **ONE}
    backwards = by == "backpropagation"
    plan |= {"estimator": "backprop"} if backwards else {"probe.sigma": SIGMA}
    file = folder / f"{form}.onnx"
    names = [name for name, _ in module.named_parameters()]
    parts = names[-2:] if way == "head" else [name for name in names if name.endswith("bias")]
    began = time.process_time()
    with tempfile.TemporaryDirectory() as scratch:
        run = baffle.fit(
            *(module if backwards else file, train, test),
            train=parts if backwards else WAYS[way],
            plan=plan,
            out=f"{scratch}/run",
            progress=False,
        )
        found = {"accuracy": round(run["test_accuracy"], 4), "n": run["n_weights"]}
        found["cpu_seconds"] = round(time.process_time() - began, 1)
        if not backwards and form != "float32" and way == "head":
            found["int8_head"] = round(accuracy(run.restore(file, int8=True), test), 4)
    return found


def accuracy(model: onnx.ModelProto, test: Set) -> float:
    """How often ONNX Runtime alone is right with a file."""
    import onnxruntime

    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return float(np.mean(session.run(None, {"x": test[0]})[0].argmax(1) == test[1]))


def untouched(form: str) -> dict[str, float]:
    """The accuracy on the digits before any fit."""
    folder, _ = models("MNIST")
    return {"accuracy": round(accuracy(onnx.load(folder / f"{form}.onnx"), digits()[1]), 4)}


@cache
def photographs() -> tuple[Path, Set, Set]:
    """MobileNetV2 with a new head in each form, and images of PACS to train and test on."""
    plan = load_plan("digits", ["task.data=pacs", 'task.model={name="mobilenet"}', f"task.pixels={PIXELS}"])
    data = data_folder(None)
    source = load("pacs", data, PIXELS)
    torch.manual_seed(0)
    module = initial_module(plan, inputs_of(plan, source, data)).eval()
    random = np.random.default_rng(0)
    train, test = (
        part.batch(np.sort(random.permutation(len(part))[:count]))
        for part, count in ((source.train, TRAINED), (source.test, TESTED))
    )
    folder = Path(tempfile.mkdtemp())
    write_forms(folder, module, train.x[:: len(train.x) // 64][:64])
    return folder, (train.x, train.y), (test.x, test.y)


def features(form: str) -> tuple[Set, Set]:
    """What the last layer takes of each image: a frozen backbone gives the same in every round."""
    folder, *sets = photographs()
    with tempfile.TemporaryDirectory() as scratch:
        export_onnx(folder / f"{form}.onnx", Path(scratch) / "model", train=["head"], head=True)
        runtime = OnnxLoss.in_folder(Path(scratch) / "model", micro_batch=AT_ONCE)
        runtime.loss = "cross_entropy"
        weights = initial_weights(Path(scratch) / "model", runtime.manifest)
    found = []
    for x, y in sets:
        batch = Batch(x, y)
        found.append((runtime.head_on(batch, runtime.on(batch))(weights).inputs[:, 0].astype(np.float32), y))
    return found[0], found[1]


def on_photographs(form: str) -> dict[str, Any]:
    """Heads behind the backbone of a form, by forward passes and by backpropagation; the rate is chosen on a fifth of
    the training images."""
    (x, y), test = features(form)
    held = np.arange(len(y)) % 5 == 4
    known: dict[str, Any] = {}
    for estimator in ("probe", "backprop"):

        def accuracy_at(train: Set, test: Set, rate: float, seed: int, estimator: str = estimator) -> float:
            torch.manual_seed(seed)
            plan = {"rounds": 200, "update.rate": rate, "seed": seed, "estimator": estimator, **ONE}
            with tempfile.TemporaryDirectory() as scratch:
                head = nn.Linear(train[0].shape[1], 7)
                run = baffle.fit(head, train, test, plan=plan, out=f"{scratch}/run", progress=False)
                return round(float(run["test_accuracy"]), 4)

        trials = {rate: accuracy_at((x[~held], y[~held]), (x[held], y[held]), rate, 0) for rate in HEAD_RATES}
        rate = max(trials, key=lambda rate: trials[rate])
        known[estimator] = {"rate": rate, "accuracies": [accuracy_at((x, y), test, rate, seed) for seed in SEEDS]}
    return known


def cost(form: str) -> dict[str, float]:
    """Memory and time of a process without PyTorch that runs MobileNetV2 in a form, its head trained."""
    folder, _, _ = photographs()
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "model"
        export_onnx(folder / f"{form}.onnx", model, train=["head"], head=True)
        command = [sys.executable, str(Path(__file__).with_name("passes.py")), str(model)]
        said = subprocess.run(command, env=os.environ | QUIET, capture_output=True, text=True, check=True).stdout
        return {"megabytes": round((model / MODEL).stat().st_size / 1e6, 1), **json.loads(said)}


def chosen_rate(kept: Kept, name: str) -> float:
    trials = kept.trials(name)
    return max(trials, key=lambda rate: trials[rate])


def jobs(kept: Kept) -> Iterator[tuple[str, str, Any]]:
    for state in ("MNIST", "digits"):
        for (part, (forms, _)), kind in product(WINDOWS.items(), ("dense", "layers")):
            for form in forms:
                what = (state, part, form, kind)
                yield "windows", "/".join(what), lambda what=what: window(*what)
    for form in FORMS:
        yield "before", form, lambda form=form: untouched(form)
    for form in FORMS:
        yield "costs", form, lambda form=form: cost(form)
        yield "photographs", form, lambda form=form: on_photographs(form)
    for row in ROWS:
        way = "/".join(row)
        for rate in RATES:
            yield (
                "trials",
                f"{way}/{rate}",
                lambda row=row, rate=rate: {
                    "rate": rate,
                    "curve": [[fitted(row, rate, 0, validation=True)["accuracy"]]],
                },
            )
        for seed in SEEDS:
            yield (
                "runs",
                f"{way}/{seed}",
                lambda row=row, seed=seed, way=way: {
                    "rate": (rate := chosen_rate(kept, way)),
                    **fitted(row, rate, seed, validation=False),
                },
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help=f"keep results in {RESULTS.name}")
    parser.add_argument("--only", action="append", metavar="PATTERN", help="kinds and names, as windows/*")
    arguments = parser.parse_args()
    kept = Kept(
        RESULTS if arguments.json else None, ["*"], ("windows", "before", "trials", "runs", "costs", "photographs")
    )
    for kind, name, measure in jobs(kept):
        if any(fnmatch(f"{kind}/{name}", pattern) for pattern in arguments.only or ["*"]):
            kept.note(kind, name, measure)
    if not arguments.json:
        print(json.dumps(kept.found, indent=1))


if __name__ == "__main__":
    main()
