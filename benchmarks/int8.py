"""Models with weights of integers: which σ works through rounded activations, and how well what is left trains.

    python benchmarks/int8.py --json                  # everything that results/int8.json does not have yet
    python benchmarks/int8.py --json --only 'window/*'

A small net is trained on MNIST at 8 × 8 pixels by backpropagation, and quantised by ONNX Runtime's tools. Then ten
clients fit parts of it to the digits. Rates are chosen on a fifth of the training samples.
"""

import argparse
import json
import logging
import tempfile
import time
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import onnx
import torch
from kept import Kept
from onnxruntime.quantization import QuantFormat, QuantType, quantize_dynamic, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process
from torch import nn

import baffle
from baffle.core.arrays import F32, F64, I64
from baffle.core.directions import GAUSSIAN, Directions, dense
from baffle.core.ports import Batch
from baffle.core.probe import SCHEMES, Loss
from baffle.core.samples import Array
from baffle.data.sources import load
from baffle.paper.gradients import alignment
from baffle.runtime.onnx.foreign import graph_from_file
from baffle.runtime.onnx.loss import OnnxLoss

RESULTS = Path(__file__).parents[1] / "results" / "int8.json"
SIGMAS = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1)
KEYS, K, SAMPLES = 8, 40, 16
SEEDS, RATES = (0, 1, 2), (0.003, 0.01)
SIGMA = 0.03  # of the fits, by the windows

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


def window(state: str, part: str, form: str) -> dict[str, Any]:
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
        directions, supports = Directions(bytes([key] * 32), GAUSSIAN), dense(len(own), K)
        z = directions.draw(range(K), 0, len(own)).astype(np.float64) * GAUSSIAN.unit
        best = alignment(z @ gradient, directions, supports, gradient)
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
    "head and biases": ["head", "*bias*"],
    "head and scales": ["head", "scales"],
}
ROWS = [
    *(("backpropagation", "float32", way) for way in ("head", "head and biases")),
    *(("forward passes", "float32", way) for way in ("head", "head and biases")),
    *(("forward passes", "dynamic", way) for way in WAYS),
    *(("forward passes", "QDQ", way) for way in ("head", "head and scales")),
    *(("forward passes", "QOperator", way) for way in ("head", "head and scales")),
]


def fitted(row: tuple[str, str, str], rate: float, seed: int, *, validation: bool) -> dict[str, float]:
    """One fit on the digits, and the accuracy of what it hands back: also with its head as int8 again."""
    (by, form, way), (folder, module) = row, models("MNIST")
    train, test = digits()
    if validation:
        held = np.arange(len(train[1])) % 5 == 4
        train, test = (train[0][~held], train[1][~held]), (train[0][held], train[1][held])
    plan: dict[str, Any] = {"update.rate": rate, "seed": seed, "run.workers": 1, "run.evaluate_every": 1000}
    backwards = by == "backpropagation"
    plan |= {"estimator": "backprop"} if backwards else {"probe.sigma": SIGMA}
    file = folder / f"{form}.onnx"
    names = [name for name, _ in module.named_parameters()]
    parts = [n for n in names if n.startswith(names[-1].split(".")[0]) or (way != "head" and n.endswith("bias"))]
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
        if not backwards and form != "float32":
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


def chosen_rate(kept: Kept, name: str) -> float:
    trials = kept.trials(name)
    return max(trials, key=lambda rate: trials[rate])


def jobs(kept: Kept) -> Iterator[tuple[str, str, Any]]:
    for state in ("MNIST", "digits"):
        for part, (forms, _) in WINDOWS.items():
            for form in forms:
                yield "windows", f"{state}/{part}/{form}", lambda s=state, p=part, f=form: window(s, p, f)
    for form in ("float32", "dynamic", "QDQ", "QOperator"):
        yield "before", form, lambda form=form: untouched(form)
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
    kept = Kept(RESULTS if arguments.json else None, ["*"], ("windows", "before", "trials", "runs"))
    for kind, name, measure in jobs(kept):
        if any(fnmatch(f"{kind}/{name}", pattern) for pattern in arguments.only or ["*"]):
            kept.note(kind, name, measure)
    if not arguments.json:
        print(json.dumps(kept.found, indent=1))


if __name__ == "__main__":
    main()
