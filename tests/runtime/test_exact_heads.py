"""The gradient of a head, from a forward pass alone, against backpropagation; and models that have no such head."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import NodeProto, TensorProto, helper, numpy_helper
from torch import Tensor, nn

from baffle.core.arrays import F32, F64
from baffle.core.head import Head, HeadPass
from baffle.core.ports import Batch
from baffle.core.samples import PADDING, Labels
from baffle.errors import PlanError
from baffle.models.inputs import Inputs
from baffle.plan import LeNet
from baffle.plan.tasks import LOSSES
from baffle.runtime.model import slopes_of
from baffle.runtime.onnx.built_in import built_in
from baffle.runtime.onnx.foreign import graph_from_file
from baffle.runtime.onnx.from_module import graph_of
from baffle.runtime.onnx.graph import OnnxGraph
from baffle.runtime.onnx.loss import OnnxLoss
from baffle.runtime.onnx.model_folder import HEAD_INPUTS, HEAD_OUTPUTS, X, Y, graph_loss
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


@pytest.mark.parametrize("loss", ["cross_entropy", "mse"])
def test_rows_of_a_head_may_be_positions(loss: str) -> None:
    """A linear layer may take positions of all samples as rows."""
    x = RANDOM.normal(size=(SAMPLES, 3, WIDTH)).astype(np.float32)
    y = _labels("cross_entropy", (3,)) if loss == "cross_entropy" else RANDOM.normal(size=(SAMPLES, 3, CLASSES))
    torch.manual_seed(0)
    nets = [Made(_positions_as_rows, inner=nn.Linear(WIDTH, CLASSES)) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    expected = _by_backpropagation(nets[0], loss, Batch(x, y))
    got, place = _exact(nets[1], loss, Batch(x, y), 2)
    np.testing.assert_allclose(got, expected[place], rtol=1e-12, atol=1e-14)


def test_positions_that_come_before_samples_are_refused() -> None:
    x, y = RANDOM.normal(size=(SAMPLES, 3, WIDTH)).astype(np.float32), _labels("cross_entropy", (3,))
    with pytest.raises(PlanError, match="come from Transpose"):
        find_head(Made(_positions_first, inner=nn.Linear(WIDTH, CLASSES)), "cross_entropy", Batch(x, y))


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


def _tied_by_a_function(net: Any, x: Tensor) -> Tensor:
    output: Tensor = net.inner(nn.functional.linear(x, net.inner.weight))
    return output


def _positions_as_rows(net: Any, x: Tensor) -> Tensor:
    output: Tensor = net.inner(x.reshape(-1, WIDTH))
    return output.reshape(-1, 3, CLASSES)


def _positions_first(net: Any, x: Tensor) -> Tensor:
    output: Tensor = net.inner(x.transpose(0, 1))
    return output.transpose(0, 1)


def _scaled(net: Any, x: Tensor) -> Tensor:
    output: Tensor = net.inner(x) * net.scale
    return output


def _blank(layer: nn.Linear) -> nn.Linear:
    """With zeros for weights, an output does not show what is done to it."""
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "an activation": (lambda: _net(nn.ReLU()), "the outputs come from Relu, not"),
    "a softmax": (lambda: _net(nn.Softmax(-1)), "the outputs come from Softmax, not"),
    "an activation of zeros": (lambda: nn.Sequential(_blank(nn.Linear(WIDTH, CLASSES)), nn.ReLU()), "come from Relu"),
    "a scale": (lambda: Made(_scaled, inner=_blank(nn.Linear(WIDTH, CLASSES)), scale=2.0), "come from Mul"),
    "a tied weight": (_tied, "used more than once"),
    "a weight that a function uses": (
        lambda: Made(_tied_by_a_function, inner=nn.Linear(WIDTH, WIDTH)),
        "more than once",
    ),
    "a layer used twice": (lambda: Made(_twice, inner=nn.Linear(WIDTH, WIDTH)), "used more than once"),
    "a frozen head": (_frozen, "the outputs come from Addmm, not from a trained nn.Linear"),
    "nothing trained": (lambda: _net().requires_grad_(False), "the outputs come from nothing that is trained"),
    "no linear layer": (
        lambda: nn.Sequential(nn.Unflatten(1, (1, WIDTH)), nn.Conv1d(1, 2, WIDTH), nn.Flatten()),
        "Conv",
    ),
    "logarithms of all positions": (lambda: _net(nn.LogSoftmax(-1), nn.Unflatten(1, (2, 2))), "come from LogSoftmax"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_model_without_such_a_head_is_refused_in_words(what: str) -> None:
    make, words = REFUSED[what]
    torch.manual_seed(0)
    y = np.zeros((2, 2) if "positions" in what else 2, np.int64)
    batch = Batch(RANDOM.normal(size=(2, WIDTH)).astype(np.float32), y)
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


def _of_the_same_pass(head: Head, loss: str, seen: HeadPass, weights: F32, labels: Labels) -> F64:
    """The gradient by PyTorch, from what a pass said about inputs of the head, and float64 outputs that follow."""
    matrix, bias = (torch.from_numpy(weights[slice(*place)].astype(np.float64)) for place in (head.weight, head.bias))
    inputs = torch.from_numpy(seen.inputs)
    shape = (inputs.shape[-1], -1) if head.by_input else (-1, inputs.shape[-1])
    parts = [each.requires_grad_() for each in (matrix, bias) if len(each)]
    w = parts[0].reshape(shape)
    outputs = inputs @ (w if head.by_input else w.T) + (parts[1] if len(parts) > 1 else 0)
    criterion_named(loss)(
        outputs.reshape(len(labels), *labels.shape[1:], -1), torch.from_numpy(labels)
    ).mean().backward()  # type: ignore[no-untyped-call]
    pairs = zip((head.weight, head.bias), parts, strict=False)
    return np.concatenate(
        [part.grad.numpy() for _, part in sorted(pairs, key=lambda pair: pair[0]) if part.grad is not None]
    )


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
    expected = _of_the_same_pass(runtime.head, "cross_entropy", seen, weights, batch.y)
    np.testing.assert_allclose(runtime.head.gradient(seen), expected, atol=1e-6)  # outputs of the pass are float32


def test_onnx_runtime_has_the_gradient_of_its_own_inputs_and_outputs_of_the_head() -> None:
    graph = built_in(
        LeNet(channels=(2, 4), head="flatten"), Inputs((1, 8, 8), CLASSES), 0, graph_loss("cross_entropy"), head=True
    )
    batch = Batch(RANDOM.normal(size=(SAMPLES, 1, 8, 8)).astype(np.float32), _labels("cross_entropy"))
    runtime = OnnxLoss(graph.manifest(graph.flat()), graph.model, loss="cross_entropy")
    seen = runtime.head_on(batch, runtime.on(batch))(graph.flat())
    given = {f"weight/{name}": values for name, values in graph.weights.items()}
    session = onnxruntime.InferenceSession(graph.model, providers=["CPUExecutionProvider"])
    h, o = session.run([HEAD_INPUTS, HEAD_OUTPUTS], {X: batch.x, Y: batch.y, **given})
    np.testing.assert_array_equal(seen.inputs.reshape(h.shape), h)
    outputs = torch.from_numpy(o.astype(np.float64)).requires_grad_()
    criterion_named("cross_entropy")(outputs, torch.from_numpy(batch.y)).mean().backward()  # type: ignore[no-untyped-call]
    assert outputs.grad is not None
    slopes = outputs.grad.numpy()
    expected = np.concatenate([(slopes.T @ h.astype(np.float64)).reshape(-1), slopes.sum(0)])
    np.testing.assert_allclose(runtime.head.gradient(seen), expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("loss", LOSSES)
def test_the_closed_form_is_the_derivative_of_the_same_outputs(loss: str) -> None:
    """In float64, for a pass whose outputs are known exactly."""
    head, weights = (
        Head((0, 6 * CLASSES), (6 * CLASSES, 7 * CLASSES)),
        RANDOM.normal(size=7 * CLASSES).astype(np.float32),
    )
    inputs, labels = RANDOM.normal(size=(SAMPLES, 1, 6)), _labels(loss)
    matrix, bias = weights[: 6 * CLASSES].reshape(CLASSES, 6).astype(np.float64), weights[6 * CLASSES :]
    seen = HeadPass(0.0, slopes_of(loss, inputs @ matrix.T + bias, labels), inputs)
    expected = _of_the_same_pass(head, loss, seen, weights, labels)
    np.testing.assert_allclose(head.gradient(seen), expected, rtol=1e-12, atol=1e-14)


EXPORTED: dict[str, tuple[Callable[[], nn.Module], str, tuple[int, ...], tuple[int, ...]]] = {
    "one label": (_net, "cross_entropy", (WIDTH,), ()),
    "logarithms": (lambda: _net(nn.LogSoftmax(1)), "cross_entropy", (WIDTH,), ()),
    "tokens": (_net, "cross_entropy", (3, WIDTH), (3,)),
    "tokens without a bias": (lambda: _net(bias=False), "cross_entropy", (3, WIDTH), (3,)),
    "positions as rows": (
        lambda: Made(_positions_as_rows, inner=nn.Linear(WIDTH, CLASSES)),
        "cross_entropy",
        (3, WIDTH),
        (3,),
    ),
    "one number": (lambda: nn.Sequential(nn.Linear(WIDTH, 1), nn.Flatten(0)), "mse", (WIDTH,), ()),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", EXPORTED)
def test_an_exported_module_has_the_gradient_of_backpropagation(kind: str) -> None:
    """As exact as float32 outputs are."""
    make, loss, shape, label_shape = EXPORTED[kind]
    torch.manual_seed(0)
    module = make()
    graph = graph_of(module, shape, np.dtype(np.float32), graph_loss(loss), label_shape, head=True)
    y = _labels("cross_entropy", label_shape) if loss == "cross_entropy" else RANDOM.normal(size=SAMPLES)
    if label_shape:
        y[0, 1:], y[1] = PADDING, PADDING
    batch = Batch(RANDOM.normal(size=(SAMPLES, *shape)).astype(np.float32), y)
    weights = graph.flat()
    runtime = OnnxLoss(graph.manifest(weights), graph.model, 3, loss=loss)
    got = runtime.head.gradient(runtime.head_on(batch, runtime.on(batch))(weights))
    place = slice(runtime.head.support.start, runtime.head.support.stop)
    np.testing.assert_allclose(got, _by_backpropagation(module, loss, batch)[place], atol=1e-6)


def test_a_graph_that_does_not_show_its_head_is_refused() -> None:
    graph = built_in(LeNet(channels=(2, 4), head="flatten"), Inputs((1, 8, 8), CLASSES), 0)
    with pytest.raises(PlanError, match="does not show its last linear layer"):
        graph.manifest(graph.flat()).head_place()


NAMES = {"gemm": True, "gemm, by input": True, "matmul and add": True, "matmul": False}


def _foreign(kind: str, path: Path) -> None:
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
    nodes.append(helper.make_node("Identity", ["o"], ["out"]))
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


def _ends_in(path: Path, *nodes: NodeProto, bias: tuple[int, ...] = (CLASSES,), frozen: bool = False) -> OnnxGraph:
    """A graph that ends in these nodes, which take "h" and make "out"."""
    drawn = np.random.default_rng(2)
    values = {"w": drawn.normal(size=(WIDTH, CLASSES)).astype(np.float32), "b": np.zeros(bias, np.float32)}
    values |= {"two": np.eye(CLASSES, dtype=np.float32)} if frozen else {}
    graph = helper.make_graph(
        [helper.make_node("Tanh", ["in"], ["h"]), *nodes],
        "net",
        [helper.make_tensor_value_info("in", TensorProto.FLOAT, ("n", WIDTH))],
        [helper.make_tensor_value_info("out", TensorProto.FLOAT, ("n", CLASSES))],
        [numpy_helper.from_array(array, name) for name, array in values.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10), path)
    return graph_from_file(path, ["two"] if frozen else [], head=True)


GEMM = helper.make_node("Gemm", ["h", "w", "b"], ["o"])


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        ([GEMM, helper.make_node("Relu", ["o"], ["out"])], "the outputs come from Relu"),
        ([GEMM, helper.make_node("Sigmoid", ["o"], ["out"])], "the outputs come from Sigmoid"),
        ([GEMM, helper.make_node("LogSoftmax", ["o"], ["out"], axis=0)], "the outputs come from LogSoftmax"),
        ([GEMM, helper.make_node("Add", ["o", "b"], ["out"])], "the outputs come from Add"),
        ([helper.make_node("Gemm", ["h", "w", "b"], ["out"], alpha=2.0)], "an alpha, beta or transA of its own"),
        ([helper.make_node("Gemm", ["h", "w", "b"], ["out"], beta=0.5)], "an alpha, beta or transA of its own"),
        (
            [GEMM, helper.make_node("MatMul", ["h", "w"], ["m"]), helper.make_node("Add", ["m", "b"], ["out"])],
            "used more than once",
        ),
        (
            [
                helper.make_node("Transpose", ["w"], ["t"]),
                helper.make_node("Gemm", ["h", "t", "b"], ["g"], transB=1),
                helper.make_node("MatMul", ["g", "t"], ["again"]),
                helper.make_node("Gemm", ["again", "t", "b"], ["out"], transB=1),
            ],
            "used more than once",
        ),
    ],
)
def test_a_graph_whose_outputs_are_not_those_of_a_linear_layer_is_refused(
    nodes: list[NodeProto], words: str, tmp_path: Path
) -> None:
    with pytest.raises(PlanError, match=words):
        _ends_in(tmp_path / "net.onnx", *nodes)


def test_a_bias_that_all_outputs_share_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="are of shapes"):
        _ends_in(tmp_path / "net.onnx", helper.make_node("Gemm", ["h", "w", "b"], ["out"]), bias=(1,))


def test_a_frozen_last_layer_of_a_graph_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="of the last linear layer are not trained"):
        _ends_in(tmp_path / "net.onnx", GEMM, helper.make_node("MatMul", ["o", "two"], ["out"]), frozen=True)


@pytest.mark.parametrize("axis", [-1, 1])
def test_logarithms_and_other_shapes_may_follow(axis: int, tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Transpose", ["w"], ["t"], perm=[1, 0]),
        helper.make_node("Gemm", ["h", "t", "b"], ["o"], transB=1),
        helper.make_node("Flatten", ["o"], ["f"]),
        helper.make_node("LogSoftmax", ["f"], ["out"], axis=axis),
    ]
    head = _ends_in(tmp_path / "net.onnx", *nodes).head
    assert head is not None
    assert (head.weight, head.bias, head.by_input) == ("w", "b", True)
