"""The layers of a model are the same on every runtime, and hold every weight once."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor, nn

from baffle.core.arrays import F32
from baffle.core.directions import Support, coverage
from baffle.models.inputs import Inputs
from baffle.plan import Plan, load
from baffle.runtime.model import layer_of, layers_of
from baffle.runtime.onnx.foreign import layers_by_nodes
from baffle.runtime.onnx.loss import OnnxLoss
from baffle.runtime.onnx.model import load as load_onnx, model_in
from baffle.runtime.onnx.model_folder import read_exported
from baffle.runtime.torch.model import TorchModel, load as load_torch
from tests.support.modules import Made
from tests.support.numpy_runtime import NumpyModel, NumpySoftmax
from tests.support.onnx_nets import export_module

INPUTS = Inputs((1, 8, 8), 10, None, None)


def tied() -> nn.Module:
    """A transformer's parts: an embedding that is used again at the end, attention, positions of the module itself, and
    a frozen layer."""

    def compute(net: Any, x: Tensor) -> Any:
        x = net.table(x) + net.positions + net.start
        x = net.norm(net.frozen(x + net.attention(x, x, x, need_weights=False)[0]))
        return net.last(x.mean(1))

    table, last = nn.Embedding(9, 6), nn.Linear(6, 9)
    last.weight = table.weight
    return Made(
        compute,
        **{"positions": torch.zeros(5, 6), "start": torch.zeros(6), "table": table},
        **{"attention": nn.MultiheadAttention(6, 2, batch_first=True), "norm": nn.LayerNorm(6)},
        **{"frozen": nn.Linear(6, 6).requires_grad_(False), "last": last},
    )


def _torch(module: nn.Module) -> TorchModel:
    plan = load("digits", ["task.init=", 'task.model={name="custom", factory="a:b"}'])
    return TorchModel(plan, plan.task.model, lambda: module)


def test_a_layer_is_what_one_module_owns_itself() -> None:
    assert [layer.size for layer in _torch(tied()).layers()] == [30, 6, 54, 3 * 36 + 18, 36 + 6, 12, 9]


@pytest.mark.slow
def test_an_exported_module_has_its_own_layers(tmp_path: Path) -> None:
    module = tied()
    layers = _torch(module).layers()
    export_module(module, (5,), tmp_path / "model", "int64")
    assert model_in(tmp_path / "model", read_exported(tmp_path / "model")).layers() == layers
    assert OnnxLoss.in_folder(tmp_path / "model").n_weights == layers[-1].stop


@pytest.mark.parametrize("model", ['{name="lenet"}', '{name="wrn", widen=1}', '{name="softmax"}'])
def test_both_runtimes_find_the_same_layers_and_layouts(model: str) -> None:
    plan = load("digits", [f"task.model={model}", "probe.supports=layers", "probe.k=30"])
    on_torch, on_onnx = load_torch(plan, INPUTS), load_onnx(plan, INPUTS)
    assert on_torch.layers() == on_onnx.layers()
    batch = None
    assert on_torch.layout(plan.probe, batch) == on_onnx.layout(plan.probe, batch)  # type: ignore[arg-type]
    assert coverage(on_torch.layers(), len(on_torch.initial_weights())).tolist() == [1] * len(on_onnx.initial_weights())


def test_a_runtime_that_does_not_know_its_layers_says_so(tiny: Callable[..., Plan]) -> None:
    model = NumpyModel(NumpySoftmax(), INPUTS)
    with pytest.raises(Exception, match=r'probe\.supports: this runtime runs whole models; expected "dense", got "lay'):
        model.layout(tiny("probe.supports=layers").probe, None)  # type: ignore[arg-type]


def test_a_name_tells_its_layer() -> None:
    assert layer_of("block.conv.bias") == layer_of("block.conv.weight") == "block.conv"
    assert (layer_of("positions"), layer_of("start")) == ("positions", "start")


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 5)), min_size=1, max_size=12))
def test_every_weight_is_in_one_layer(tensors: list[tuple[str, int]]) -> None:
    layers, n = layers_of(tensors), sum(size for _, size in tensors)
    assert coverage(layers, n).tolist() == [1] * n
    assert all(layer.size for layer in layers)
    owner = [name for name, size in tensors for _ in range(size)]
    for layer in layers:
        assert len({owner[weight] for part, _ in layer.parts() for weight in range(part.start, part.stop)}) == 1


def test_a_layer_in_two_places_is_one_support_and_in_three_places_three() -> None:
    assert layers_of([("a", 2), ("b", 3), ("a", 1)]) == (Support(0, 2, (5, 6)), Support(2, 5))
    assert layers_of([("a", 2), ("b", 1), ("a", 1), ("c", 1), ("a", 1)]) == (
        *(Support(0, 2), Support(2, 3), Support(3, 4), Support(4, 5), Support(5, 6)),
    )


@pytest.mark.parametrize(
    ("nodes", "shapes", "layers"),
    [
        (
            "a = Conv(x, w1, b1) b = LayerNormalization(a, scale, shift) c = Gemm(b, w2, b2)",
            {"w1": (4, 4), "w2": (4, 4), "b1": (4,), "b2": (4,), "scale": (4,), "shift": (4,)},
            {"w1": "w1", "b1": "w1", "scale": "scale", "shift": "scale", "w2": "w2", "b2": "w2"},
        ),
        (
            "a = MatMul(x, w) c = Add(b, a) d = Add(c, positions) e = Relu(d) f = Add(e, alone)",
            {"w": (4, 4), "b": (1, 4), "positions": (3, 4), "alone": (4,)},
            {"w": "w", "b": "w", "positions": "positions", "alone": "alone"},
        ),
        (
            "a = Gemm(x, w, b1) b = Gemm(a, w, b2)",
            {"w": (4, 4), "b1": (4,), "b2": (4,), "unused": (2,)},
            {"w": "w", "b1": "w", "b2": "w", "unused": "unused"},
        ),
    ],
    ids=["weights of one node", "a vector added to a product is its bias", "where a weight comes first, or alone"],
)
def test_layers_of_another_tools_graph_follow_from_its_nodes(
    nodes: str, shapes: dict[str, tuple[int, ...]], layers: dict[str, str]
) -> None:
    graph = onnx.parser.parse_graph(f"theirs (float[n, 4] x) => () {{ {nodes} }}")
    weights: dict[str, F32] = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    assert layers_by_nodes(graph, weights) == layers
