"""The gradient of a head, from a forward pass alone, against backpropagation; and models that have no such head."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

from baffle.core.arrays import F64
from baffle.core.ports import Batch
from baffle.core.samples import PADDING, Labels
from baffle.errors import PlanError
from baffle.models.inputs import Inputs
from baffle.plan import LeNet
from baffle.plan.tasks import LOSSES
from baffle.runtime.model import slopes_of
from baffle.runtime.onnx.built_in import built_in
from baffle.runtime.onnx.foreign import graph_from_file
from baffle.runtime.onnx.loss import OnnxLoss
from baffle.runtime.onnx.model_folder import graph_loss
from baffle.runtime.torch.head import find_head
from baffle.runtime.torch.loss import TorchLoss, criterion_named, weights_of
from tests.support.modules import Made

SAMPLES, WIDTH, CLASSES = 7, 5, 4
RANDOM = np.random.default_rng(0)


def _labels(loss: str, shape: tuple[int, ...] = ()) -> Labels:
    if loss == "cross_entropy":
        return RANDOM.integers(0, CLASSES, (SAMPLES, *shape))
    numbers = RANDOM.normal(size=(SAMPLES, CLASSES)).astype(np.float32)
    return (numbers > 0).astype(np.float32) if loss == "bce" else numbers


def _net(*after: nn.Module, bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 6), nn.Tanh(), nn.Linear(6, CLASSES, bias=bias), *after)


def _by_backpropagation(module: nn.Module, loss: str, batch: Batch) -> F64:
    """The whole gradient, in float64."""
    module = module.double().eval()
    outputs = module(torch.from_numpy(batch.x.astype(np.float64)))
    criterion_named(loss)(outputs, torch.from_numpy(batch.y)).mean().backward()  # type: ignore[no-untyped-call]
    parts = [p.grad.reshape(-1) for p in module.parameters() if p.grad is not None]
    return torch.cat(parts).numpy()


def _exact(
    module: nn.Module, loss: str, batch: Batch, micro_batch: int = 0, structured: bool = False
) -> tuple[F64, slice]:
    """The gradient of the head, and where it lies in the flat vector."""
    head = find_head(module, loss, batch)
    weights: Any = weights_of(module).astype(np.float64)
    runtime = TorchLoss(
        module,
        criterion_named(loss),
        micro_batch=micro_batch,
        dtype=torch.float64,
        head_at=head.support,
        loss_name=loss,
        structured=structured,
    )
    own = runtime.on(batch)
    seen = runtime.head_on(batch, own)(weights)
    assert seen.loss == runtime.on(batch)(weights), "the loss of the same pass, bit for bit"
    return runtime.head.gradient(seen), slice(head.support.start, head.support.stop)


@pytest.mark.parametrize("micro_batch", [0, 3])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("loss", LOSSES)
def test_a_head_has_the_gradient_of_backpropagation(loss: str, bias: bool, micro_batch: int) -> None:
    batch = Batch(RANDOM.normal(size=(SAMPLES, WIDTH)).astype(np.float32), _labels(loss))
    expected = _by_backpropagation(_net(bias=bias), loss, batch)
    got, place = _exact(_net(bias=bias), loss, batch, micro_batch)
    np.testing.assert_allclose(got, expected[place], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("structured", [False, True])
def test_stages_and_units_know_the_head_of_their_own_base_pass(structured: bool) -> None:
    batch = Batch(RANDOM.normal(size=(SAMPLES, WIDTH)).astype(np.float32), _labels("cross_entropy"))
    expected = _by_backpropagation(_net(), "cross_entropy", batch)
    got, place = _exact(_net(), "cross_entropy", batch, structured=structured)
    np.testing.assert_allclose(got, expected[place], rtol=1e-12, atol=1e-14)


def test_a_head_of_tokens_leaves_padding_out() -> None:
    x = RANDOM.normal(size=(SAMPLES, 3, WIDTH)).astype(np.float32)
    y = _labels("cross_entropy", (3,))
    y[0, 1:], y[1] = PADDING, PADDING
    expected = _by_backpropagation(_net(), "cross_entropy", Batch(x, y))
    got, place = _exact(_net(), "cross_entropy", Batch(x, y), 2)
    np.testing.assert_allclose(got, expected[place], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("loss", "after", "labels"),
    [
        ("cross_entropy", nn.LogSoftmax(-1), (SAMPLES,)),
        ("cross_entropy", nn.Identity(), (SAMPLES,)),
        ("cross_entropy", nn.Unflatten(1, (2, 2)), (SAMPLES, 2)),
        ("mse", nn.Unflatten(1, (2, 2)), (SAMPLES, 2, 2)),
    ],
)
def test_what_may_follow_a_head(loss: str, after: nn.Module, labels: tuple[int, ...]) -> None:
    classes = RANDOM.integers(0, 2, labels)
    y = classes if loss == "cross_entropy" else classes.astype(np.float32)
    batch = Batch(RANDOM.normal(size=(SAMPLES, WIDTH)).astype(np.float32), y)
    expected = _by_backpropagation(_net(after), loss, batch)
    got, place = _exact(_net(after), loss, batch)
    np.testing.assert_allclose(got, expected[place], rtol=1e-12, atol=1e-14)


def _tied() -> nn.Module:
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    net[2].weight = net[0].weight
    return net


def _frozen() -> nn.Module:
    net = _net()
    net[2].requires_grad_(False)
    return net


def _twice(net: Any, x: Tensor) -> Tensor:
    output: Tensor = net.inner(net.inner(x))
    return output


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "an activation": (lambda: _net(nn.ReLU()), "are not those of its last linear layer"),
    "a softmax": (lambda: _net(nn.Softmax(-1)), "are not those of its last linear layer"),
    "a tied weight": (_tied, "used more than once"),
    "a layer used twice": (lambda: Made(_twice, inner=nn.Linear(WIDTH, WIDTH)), "used more than once"),
    "a frozen head": (_frozen, "are not those of its last linear layer"),
    "no linear layer": (lambda: nn.Sequential(nn.Unflatten(1, (1, WIDTH)), nn.Conv1d(1, 2, WIDTH), nn.Flatten()), "no"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_model_without_such_a_head_is_refused_in_words(what: str) -> None:
    make, words = REFUSED[what]
    torch.manual_seed(0)
    batch = Batch(RANDOM.normal(size=(2, WIDTH)).astype(np.float32), np.array([0, 1]))
    with pytest.raises(PlanError, match=words) as refused:
        find_head(make(), "cross_entropy", batch)
    assert 'probe.head = "probed"' in str(refused.value)


def test_a_loss_of_ones_own_has_no_exact_head() -> None:
    batch = Batch(RANDOM.normal(size=(2, WIDTH)).astype(np.float32), np.array([0, 1]))
    with pytest.raises(PlanError, match="the derivative of task"):
        find_head(_net(), "package.module:function", batch)


def test_classes_must_be_the_last_axis() -> None:
    net = nn.Sequential(nn.Linear(WIDTH, 3))  # (samples, 2 classes, 3 positions)
    batch = Batch(RANDOM.normal(size=(2, 2, WIDTH)).astype(np.float32), np.zeros((2, 3), np.int64))
    with pytest.raises(PlanError, match="is not the classes"):
        find_head(net, "cross_entropy", batch)


@pytest.mark.parametrize("micro_batch", [0, 3])
def test_onnx_runtime_shows_the_head_of_a_built_in_model(micro_batch: int) -> None:
    inputs = Inputs((1, 8, 8), CLASSES)
    graph = built_in(LeNet(channels=(2, 4), head="flatten"), inputs, 0, graph_loss("cross_entropy"), head=True)
    plain = built_in(LeNet(channels=(2, 4), head="flatten"), inputs, 0, graph_loss("cross_entropy"))
    weights = graph.flat()
    batch = Batch(RANDOM.normal(size=(SAMPLES, 1, 8, 8)).astype(np.float32), _labels("cross_entropy"))
    runtime = OnnxLoss(graph.manifest(weights), graph.model, micro_batch, loss="cross_entropy")
    seen = runtime.head_on(batch, runtime.on(batch))(weights)
    assert seen.loss == runtime.on(batch)(weights)
    assert seen.loss == OnnxLoss(plain.manifest(weights), plain.model, micro_batch).on(batch)(weights)
    head = runtime.head
    weight, bias = (weights[slice(*place)].astype(np.float64) for place in (head.weight, head.bias))
    outputs = seen.inputs @ weight.reshape(CLASSES, -1).T + bias
    np.testing.assert_allclose(seen.slopes, slopes_of("cross_entropy", outputs, batch.y), atol=1e-6)
    step, moved = 1e-3, np.random.default_rng(1).normal(size=head.support.size)
    losses = [_loss_at(outputs, seen.inputs, moved * sign * step, batch.y) for sign in (1, -1)]
    assert (losses[0] - losses[1]) / (2 * step) == pytest.approx(float(head.gradient(seen) @ moved), rel=1e-4)


def _loss_at(outputs: F64, inputs: F64, moved: F64, labels: Labels) -> float:
    """The mean cross-entropy after the head has moved."""
    split = CLASSES * inputs.shape[1]
    moved_outputs = outputs + inputs @ moved[:split].reshape(CLASSES, -1).T + moved[split:]
    tensor = torch.from_numpy(moved_outputs)
    return float(nn.functional.cross_entropy(tensor, torch.from_numpy(labels)))


def test_a_graph_that_does_not_show_its_head_is_refused() -> None:
    graph = built_in(LeNet(channels=(2, 4), head="flatten"), Inputs((1, 8, 8), CLASSES), 0)
    with pytest.raises(PlanError, match="does not show its last linear layer"):
        graph.manifest(graph.flat()).head_place()


NAMES = {"gemm": True, "gemm, by input": True, "matmul and add": True, "matmul": False}


def _foreign(kind: str, path: Path, after: str = "") -> None:
    """An ONNX file of two linear layers, as another tool might write it."""
    drawn = np.random.default_rng(2)
    sizes = {"first": (WIDTH, 6), "head": (6, CLASSES), "bias": (CLASSES,)}
    values = {name: drawn.normal(size=size).astype(np.float32) for name, size in sizes.items()}
    if kind == "gemm":
        values["head"] = np.ascontiguousarray(values["head"].T)
    nodes = [helper.make_node("MatMul", ["in", "first"], ["a"]), helper.make_node("Tanh", ["a"], ["h"])]
    if kind.startswith("gemm"):
        nodes.append(helper.make_node("Gemm", ["h", "head", "bias"], ["o"], transB=int(kind == "gemm")))
    else:
        nodes.append(helper.make_node("MatMul", ["h", "head"], ["o" if kind == "matmul" else "m"]))
        nodes += [helper.make_node("Add", ["bias", "m"], ["o"])] if kind != "matmul" else []
    nodes.append(helper.make_node(after or "Identity", ["o"], ["out"]))
    if kind == "matmul":
        del values["bias"]
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("in", TensorProto.FLOAT, ("n", WIDTH))],
        [helper.make_tensor_value_info("out", TensorProto.FLOAT, ("n", CLASSES))],
        [numpy_helper.from_array(array, name) for name, array in values.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10), path)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("kind", NAMES)
def test_the_head_of_another_tools_graph(kind: str, loss: str, tmp_path: Path) -> None:
    """Its gradient is the slope of the graph's own loss."""
    _foreign(kind, tmp_path / "net.onnx")
    graph = graph_from_file(tmp_path / "net.onnx", loss=graph_loss(loss), head=True)
    weights = graph.flat()
    runtime = OnnxLoss(graph.manifest(weights), graph.model, 3, loss=loss)
    labels = _labels(loss) * (100 if loss == "mae" else 1)  # no output comes near a kink
    batch = Batch(np.random.default_rng(3).normal(size=(SAMPLES, WIDTH)).astype(np.float32), labels)
    head, own = runtime.head, runtime.on(batch)
    assert bool(head.bias[1]) == NAMES[kind]
    gradient = head.gradient(runtime.head_on(batch, own)(weights))
    for number, weight in enumerate(w for part, _ in head.support.parts() for w in range(part.start, part.stop)):
        moved = [weights.copy() for _ in range(2)]
        moved[0][weight] += 1e-2
        moved[1][weight] -= 1e-2
        slope = (own(moved[0]) - own(moved[1])) / float(moved[0][weight] - moved[1][weight])
        assert gradient[number] == pytest.approx(slope, abs=2e-3)


@pytest.mark.parametrize(("after", "words"), [("Relu", "come from Relu"), ("Softplus", "come from Softplus")])
def test_a_graph_that_goes_on_after_its_last_linear_layer_is_refused(after: str, words: str, tmp_path: Path) -> None:
    _foreign("gemm", tmp_path / "net.onnx", after)
    with pytest.raises(PlanError, match=words):
        graph_from_file(tmp_path / "net.onnx", head=True)
