"""The losses in graphs are those of PyTorch and of a slow computation in plain Python, for any shape and padding."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given, settings, strategies as st
from onnx import TensorProto, helper

from baffle.core.arrays import F64
from baffle.core.ports import Batch
from baffle.core.samples import PADDING, Array
from baffle.errors import ModelError
from baffle.plan import Plan, change
from baffle.runtime.onnx.finishing import finished
from baffle.runtime.onnx.graph import OnnxGraph
from baffle.runtime.onnx.loss import OnnxLoss, require_loss
from baffle.runtime.onnx.model_folder import GraphLoss
from baffle.runtime.torch.loss import criterion_named


def linear(before: tuple[int, ...], outputs: int, order: list[int], loss: GraphLoss, labels: Any = None) -> OnnxGraph:
    """A graph that multiplies the last axis of samples by a matrix, and puts the axes into another order."""
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"]), helper.make_node("Transpose", ["y"], ["z"], perm=order)]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", *before])]
    inputs.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, [before[-1], outputs]))
    output = helper.make_tensor_value_info("z", TensorProto.FLOAT, None)
    graph = helper.make_graph(nodes, "linear", inputs, [output])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    weights = np.random.default_rng(0).normal(size=(before[-1], outputs)).astype(np.float32)
    return finished(model, {"w": weights}, loss=loss, label_shape=labels)


def of_graph(graph: OnnxGraph, batch: Batch, micro_batch: int = 0) -> tuple[float, Array]:
    """The loss of a batch, and the outputs."""
    onnx.checker.check_model(graph.model, full_check=True)
    data = graph.model
    runtime = OnnxLoss(graph.manifest(graph.flat()), data, micro_batch=micro_batch)
    return runtime.on(batch)(graph.flat()), runtime.outputs(graph.flat(), batch)


def slow_cross_entropy(logits: Array, labels: Array) -> float:
    """Logits of (samples, positions, classes): the mean over samples of the mean over positions that count."""
    losses = []
    for rows, own in zip(logits.astype(np.float64), labels, strict=True):
        each = [
            math.log(sum(math.exp(number - max(row)) for number in row)) + max(row) - row[label]
            for row, label in zip(rows, own, strict=True)
            if label != PADDING
        ]
        losses.append(sum(each) / len(each) if each else 0.0)
    return sum(losses) / len(losses)


@settings(max_examples=30, deadline=None)
@given(
    samples=st.integers(1, 6),
    positions=st.lists(st.integers(1, 4), min_size=1, max_size=2),
    classes=st.integers(2, 5),
    last=st.booleans(),
    micro_batch=st.integers(0, 4),
    seed=st.integers(0, 2**32 - 1),
)
def test_cross_entropy_over_positions(
    samples: int, positions: list[int], classes: int, last: bool, micro_batch: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    rank = len(positions) + 2
    order = list(range(rank)) if last else [0, rank - 1, *range(1, rank - 1)]
    x = random.normal(size=(samples, *positions, 3)).astype(np.float32)
    labels = random.integers(0, classes, (samples, *positions))
    labels[random.random(labels.shape) < 0.3] = PADDING
    # Where the shapes alone do not tell which axis is that of the classes, it is the last one.
    told_apart = last or (*labels.shape[1:],) != (classes, *positions)[:-1]
    graph = linear((*positions, 3), classes, order, "cross-entropy", tuple(positions))
    loss, outputs = of_graph(graph, Batch(x, labels), micro_batch)
    theirs = float(criterion_named("cross_entropy")(torch.from_numpy(outputs), torch.from_numpy(labels)).mean())
    assert loss == pytest.approx(theirs, rel=1e-5, abs=1e-5)
    if told_apart:
        rows = outputs if last else np.moveaxis(outputs, 1, -1)
        expected = slow_cross_entropy(rows.reshape(samples, -1, classes), labels.reshape(samples, -1))
        assert loss == pytest.approx(expected, rel=1e-5, abs=1e-5)
        assert graph.manifest(graph.flat()).classes == classes


SLOW: dict[str, Callable[[float, float], float]] = {
    "mse": lambda output, target: (output - target) ** 2,
    "mae": lambda output, target: abs(output - target),
    "bce": lambda x, y: -y * math.log(1 / (1 + math.exp(-x))) - (1 - y) * math.log(1 - 1 / (1 + math.exp(-x))),
}


@settings(max_examples=40, deadline=None)
@given(
    loss=st.sampled_from(["mse", "mae", "bce"]),
    samples=st.integers(1, 6),
    outputs=st.integers(1, 4),
    flat=st.booleans(),
    micro_batch=st.integers(0, 4),
    seed=st.integers(0, 2**32 - 1),
)
def test_losses_of_numbers(
    loss: GraphLoss, samples: int, outputs: int, flat: bool, micro_batch: int, seed: int
) -> None:
    """A target of shape (n,) fits an output of (n, 1)."""
    random = np.random.default_rng(seed)
    x = random.normal(size=(samples, 3)).astype(np.float32)
    targets = random.random((samples, outputs)).astype(np.float32)
    if flat and outputs == 1:
        targets = targets[:, 0]
    ours, found = of_graph(linear((3,), outputs, [0, 1], loss), Batch(x, targets), micro_batch)
    theirs = float(criterion_named(loss)(torch.from_numpy(found), torch.from_numpy(targets)).mean())
    numbers, wanted = found.reshape(-1).astype(float).tolist(), targets.reshape(-1).astype(float).tolist()
    expected = [SLOW[loss](number, target) for number, target in zip(numbers, wanted, strict=True)]
    assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-5)
    assert ours == pytest.approx(sum(expected) / len(expected), rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("sign", [-1, 1])
def test_binary_cross_entropy_overflows_nowhere(sign: int) -> None:
    graph = linear((1,), 1, [0, 1], "bce")
    x = np.full((2, 1), sign * 1e30, np.float32) / graph.flat()
    loss, outputs = of_graph(graph, Batch(x, np.array([0.0, 1.0], np.float32)))
    assert loss == pytest.approx(abs(float(outputs[0, 0])) / 2)


def test_a_graph_without_a_loss_gives_outputs_alone() -> None:
    graph = linear((3,), 2, [0, 1], "none")
    data = graph.model
    manifest = graph.manifest(graph.flat())
    batch = Batch(np.ones((4, 3), np.float32), np.array([0, 1, 1, 0]))
    with pytest.raises(ModelError, match="the graph holds no loss"):
        OnnxLoss(manifest, data).on(batch)

    def loss(outputs: Array, labels: Array) -> F64:
        assert type(outputs) is type(labels) is np.ndarray
        return np.array((outputs.argmax(1) != labels).sum(), np.float64)

    runtime = OnnxLoss(manifest, data, micro_batch=3, criterion=loss)
    outputs = runtime.outputs(graph.flat(), batch)
    wrong = outputs.argmax(1) != batch.y
    assert runtime.on(batch)(graph.flat()) == pytest.approx((wrong[:3].sum() * 3 + wrong[3:].sum()) / 4)


def test_labels_of_another_shape_are_refused() -> None:
    graph = linear((3,), 2, [0, 1], "mse")
    with pytest.raises(ModelError, match=r"takes labels of shape \(2,\) for each sample, got \(3,\)"):
        of_graph(graph, Batch(np.ones((4, 3), np.float32), np.ones((4, 3), np.float32)))


@pytest.mark.parametrize(
    ("held", "loss", "says"),
    [
        ("mse", "cross_entropy", 'holds the loss "mse", .* or with --loss cross_entropy$'),
        ("cross-entropy", "bce", 'holds the loss "cross_entropy", but task.loss is "bce"; .* or with --loss bce$'),
        ("mae", "mine:loss", "or with --loss none$"),
    ],
)
def test_a_graph_that_holds_another_loss_is_refused(held: GraphLoss, loss: str, says: str) -> None:
    graph = linear((3,), 2, [0, 1], held)
    plan = change(Plan(), [f'task.loss="{loss}"'])
    with pytest.raises(ModelError, match=says):
        require_loss(plan, graph.manifest(graph.flat()), Path("model"))
