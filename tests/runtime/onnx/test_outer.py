"""Graphs for many outer directions: the outputs of one pass a direction, whatever operators a model is built of."""

from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baffle.core.arrays import F32
from baffle.core.directions import OUTER, RADEMACHER, Directions, Support, dense, distribution_of
from baffle.core.ports import Batch
from baffle.core.probe import SCHEMES, losses_along
from baffle.errors import ModelError
from baffle.models.inputs import Inputs
from baffle.plan import WRN, LeNet, Softmax
from baffle.runtime.onnx.built_in import built_in
from baffle.runtime.onnx.foreign import graph_from_file
from baffle.runtime.onnx.graph import OnnxGraph
from baffle.runtime.onnx.loss import OnnxLoss
from baffle.runtime.onnx.outer import OnnxOuter, disagreement, tried_outputs
from baffle.runtime.onnx.outer_graph import outer_model
from tests.support.onnx_nets import Net

STEP, CLASSES = 1e-2, 4


def perceptron() -> tuple[Net, str]:
    net = Net(6)
    x = net.add("Tanh", net.add("Gemm", "samples", net.weight(7, 6), net.weight(7), transB=1, alpha=0.5, beta=2.0))
    x = net.add("Add", net.weight(5), net.add("MatMul", x, net.weight(7, 5)))
    x = net.add("PRelu", x, net.weight(5))
    return net, net.add("Gemm", x, net.weight(5, CLASSES))


def images() -> tuple[Net, str]:
    """Convolutions of many kinds, with the normalisations that tools write between them."""
    net = Net(4, 9, 8)
    x = net.add("Conv", "samples", net.weight(6, 2, 3, 3), net.weight(6), group=2, pads=[1, 0, 1, 1])
    x = net.add("GroupNormalization", x, net.weight(6), net.weight(6), num_groups=3)
    x = net.add("Relu", net.add("Conv", x, net.weight(6, 1, 3, 2), group=6, strides=[2, 1], dilations=[1, 2]))
    statistics = [net.constant(np.full(6, value, np.float32)) for value in (0.1, 2.0)]
    x = net.add("BatchNormalization", x, net.weight(6), net.weight(6), *statistics)
    x = net.add("Conv", x, net.weight(5, 6, 1, 1), net.weight(5))
    x = net.add("InstanceNormalization", x, net.weight(5), net.weight(5))
    x = net.add("Conv", x, net.weight(4, 5, 2, 3), auto_pad="SAME_LOWER", strides=[1, 2])
    x = net.add("Mul", x, net.weight(4, 1, 1))
    return net, net.classify(net.add("GlobalAveragePool", x), 4)


def signals() -> tuple[Net, str]:
    """One and three dimensions."""
    net = Net(2, 4, 3, 4)
    x = net.add("Conv", "samples", net.weight(3, 2, 2, 3, 2), net.weight(3), pads=[0, 1, 1, 1, 1, 0])
    x = net.add("Reshape", x, net.constant([0, 3, -1]))
    x = net.add("Conv", x, net.weight(4, 3, 4), strides=[3], auto_pad="SAME_UPPER")
    return net, net.classify(net.add("ReduceMean", x, net.constant([2])), 4)


def tokens(*, first: bool = False) -> tuple[Net, str]:
    """Attention over tokens and positions behind a learned first token; samples may be the second axis."""
    net = Net(5, dtype="int64")
    table, width = net.weight(20, 8), 8
    ids = net.add("Transpose", "samples", perm=[1, 0]) if first else "samples"
    x = net.add("Gather", table, ids)
    positions = net.add("Gather", net.weight(9, width), net.constant([0, 1, 2, 3, 4]))
    x = net.add("Add", x, net.add("Unsqueeze", positions, net.constant([1 if first else 0])))
    count = net.add("Gather", net.add("Shape", "samples"), net.constant([0]))
    one, wide = net.constant([1]), net.constant([width])
    sizes = net.add("Concat", *((one, count, wide) if first else (count, one, wide)), axis=0)
    beginning = net.add("Expand", net.weight(1, 1, width), sizes)
    x = net.add("Concat", beginning, x, axis=0 if first else 1)
    x = net.add("LayerNormalization", x, net.weight(width), net.weight(width))
    query, key, value = (
        net.add("MatMul", x, net.add("Transpose", net.weight(width, width), perm=[1, 0])) for _ in range(3)
    )
    if first:
        query, key, value = (net.add("Transpose", each, perm=[1, 0, 2]) for each in (query, key, value))
    scores = net.add("Softmax", net.add("MatMul", query, net.add("Transpose", key, perm=[0, 2, 1])))
    x = net.add("MatMul", scores, value)
    if first:
        x = net.add("Transpose", x, perm=[1, 0, 2])
    flat = net.add("Reshape", x, net.constant([-1, width]))  # with samples as the second axis, tokens go first
    flat = net.add("Add", net.add("Gemm", flat, net.weight(width, width), net.weight(width)), net.weight(width))
    sizes = net.constant([6, -1, width] if first else [-1, 6, width])
    pooled = net.add("ReduceMean", net.add("Reshape", flat, sizes), net.constant([0 if first else 1]), keepdims=0)
    tied = net.add("MatMul", pooled, net.add("Transpose", table, perm=[1, 0]))
    return net, net.add("Slice", tied, net.constant([0]), net.constant([CLASSES]), net.constant([1]))


def computed() -> tuple[Net, str]:
    """Weights that are changed before they are used."""
    net = Net(3, 4)
    scale = net.add("Exp", net.add("Mul", net.weight(4), net.constant(np.array(0.5, np.float32))))
    x = net.add("Div", net.add("Mul", "samples", scale), net.add("Reshape", net.weight(3), net.constant([3, 1])))
    x = net.add("Sub", net.add("Transpose", net.weight(4, 3), perm=[1, 0]), x)
    return net, net.classify(net.add("Sigmoid", x), 12)


def pairs() -> tuple[Net, str]:
    net = Net(4)
    other = net.input("other", 3)
    left = net.add("MatMul", "samples", net.weight(4, 5))
    right = net.add("MatMul", net.add("Relu", other), net.weight(3, 5))
    return net, net.add("MatMul", net.add("Mul", left, right), net.weight(5, CLASSES))


FOREIGN: dict[str, Callable[[], tuple[Net, str]]] = {
    "perceptron": perceptron,
    "images": images,
    "signals": signals,
    "tokens": tokens,
    "tokens first": lambda: tokens(first=True),
    "computed": computed,
    "pairs": pairs,
}
OWN: dict[str, tuple[Any, tuple[int, ...]]] = {
    "LeNet": (LeNet(channels=(3, 4), head="flatten", norm="group"), (1, 8, 8)),
    "WRN": (WRN(widen=1, norm="group"), (3, 8, 8)),
    "softmax": (Softmax(), (5,)),
}


class Both(NamedTuple):
    """A graph, and the one for many directions that was made of it."""

    graph: OnnxGraph
    outer: bytes

    def plain(self, micro_batch: int = 0) -> OnnxLoss:
        return OnnxLoss(
            self.graph.manifest(self.graph.to_bytes(), self.graph.flat()),
            self.graph.to_bytes(),
            micro_batch=micro_batch,
        )

    def many(self, together: int, micro_batch: int = 0) -> OnnxOuter:
        manifest = self.graph.manifest(self.graph.to_bytes(), self.graph.flat())
        return OnnxOuter(manifest, self.outer, self.plain, together=together, micro_batch=micro_batch)

    def disagreement(self, batch: Batch) -> str:
        weights = self.graph.flat()
        return disagreement(self.many(4), weights, batch, tried_outputs(self.plain(), weights, batch))

    def directions(self, seed: int = 0) -> Directions:
        shapes = tuple(values.shape for values in self.graph.weights.values())
        return Directions(seed.to_bytes(32, "big"), distribution_of(OUTER, shapes))

    def batch(self, samples: int, seed: int = 0) -> Batch:
        random = np.random.default_rng(seed)
        arrays = tuple(
            random.integers(0, 20, (samples, *wanted.shape))
            if wanted.dtype == "int64"
            else random.normal(size=(samples, *wanted.shape)).astype(np.float32)
            for wanted in self.graph.inputs
        )
        return Batch(arrays if len(arrays) > 1 else arrays[0], random.integers(0, CLASSES, samples))


def foreign(net: Net, output: str) -> OnnxGraph:
    with TemporaryDirectory() as folder:
        return graph_from_file(net.saved(Path(folder) / "net.onnx", output))


@cache
def both(name: str) -> Both:
    if name in FOREIGN:
        graph = foreign(*FOREIGN[name]())
    else:
        model, shape = OWN[name]
        graph = built_in(model, Inputs(shape, CLASSES), 0)
    return Both(graph, outer_model(graph).graph)


def require_equal(pair: Both, batch: Batch, supports: tuple[Support, ...], together: int, micro_batch: int) -> None:
    weights, directions = pair.graph.flat(), pair.directions()
    expected = losses_along(pair.plain().samples_on(batch), weights, directions, supports, STEP)
    got = losses_along(pair.many(together, micro_batch).samples_on(batch), weights, directions, supports, STEP)
    np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", [*FOREIGN, *OWN])
def test_losses_are_those_of_one_pass_a_direction(name: str) -> None:
    pair = both(name)
    batch, supports = pair.batch(3), dense(len(pair.graph.flat()), 5)
    base = pair.plain().samples_on(batch)(pair.graph.flat())
    np.testing.assert_allclose(pair.many(5).samples_on(batch)(pair.graph.flat()), base, rtol=1e-5, atol=1e-5)
    moved = losses_along(pair.plain().samples_on(batch), pair.graph.flat(), pair.directions(), supports, STEP)
    assert np.abs(moved - base).max() > 1e-3  # the directions lead somewhere
    require_equal(pair, batch, supports, 5, 0)
    assert not pair.disagreement(batch)


@settings(max_examples=25, deadline=None)
@given(
    name=st.sampled_from(["perceptron", "images", "tokens first", "LeNet"]),
    samples=st.integers(1, 5),
    k=st.integers(1, 7),
    together=st.integers(1, 8),
    micro_batch=st.integers(0, 3),
    cut=st.integers(0, 40),
)
def test_any_block_and_micro_batch_and_any_part_of_the_weights(
    name: str, samples: int, k: int, together: int, micro_batch: int, cut: int
) -> None:
    pair = both(name)
    starts = [0, *np.cumsum([values.size for values in pair.graph.weights.values()])]
    parts = [Support(int(start), int(stop)) for start, stop in pairwise(starts)]
    supports = tuple((*parts, *dense(int(starts[-1]), 1))[(cut + number) % (len(parts) + 1)] for number in range(k))
    require_equal(pair, pair.batch(samples, cut), supports, together, micro_batch)


def test_no_more_directions_share_a_pass_than_may(monkeypatch: pytest.MonkeyPatch) -> None:
    pair, passes = both("perceptron"), list[tuple[int, int]]()
    run = OnnxOuter.run

    def counted(self: OnnxOuter, weights: F32, x: Any, drawn: F32) -> F32:
        passes.append((len(drawn), len(x[0])))
        return run(self, weights, x, drawn)

    monkeypatch.setattr(OnnxOuter, "run", counted)
    supports = dense(len(pair.graph.flat()), 7)
    losses_along(pair.many(3, micro_batch=2).on(pair.batch(5)), pair.graph.flat(), pair.directions(), supports, STEP)
    assert passes == [(directions, samples) for directions in (2, 2, 3) for samples in (2, 2, 1)]


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_convolution(data: st.DataObject) -> None:
    """Behind another layer, so that directions do not share its input; and as the first, where they do."""
    rank, groups = data.draw(st.integers(1, 2)), data.draw(st.sampled_from([1, 1, 2]))
    kernel = data.draw(st.lists(st.integers(1, 3), min_size=rank, max_size=rank))
    how: dict[str, Any] = {"group": groups}
    how["strides"] = data.draw(st.lists(st.integers(1, 3), min_size=rank, max_size=rank))
    how["dilations"] = data.draw(st.lists(st.integers(1, 2), min_size=rank, max_size=rank))
    if data.draw(st.booleans()):
        how["pads"] = data.draw(st.lists(st.integers(0, 4), min_size=2 * rank, max_size=2 * rank))
    elif how["dilations"] == [1] * rank:
        how["auto_pad"] = data.draw(st.sampled_from(["VALID", "SAME_UPPER", "SAME_LOWER"]))
    image = data.draw(st.lists(st.integers(5, 7), min_size=rank, max_size=rank))
    net = Net(2, *image)
    x = "samples"
    if data.draw(st.booleans()):
        x = net.add("Conv", x, net.weight(2, 2, *[1] * rank))
    x = net.add("Conv", x, net.weight(2 * groups, 2 // groups, *kernel), **how)
    x = net.add("ReduceMean", x, net.constant(range(2, 2 + rank)), keepdims=0)
    graph = foreign(net, net.add("Gemm", x, net.weight(2 * groups, CLASSES)))
    pair = Both(graph, outer_model(graph).graph)
    require_equal(pair, pair.batch(2), dense(len(graph.flat()), 3), 3, 0)


@pytest.mark.parametrize("scheme", ["forward", "central"])
def test_other_directions_take_a_pass_each(scheme: str) -> None:
    pair = both("perceptron")
    batch, weights = pair.batch(4), pair.graph.flat()
    directions, supports = Directions(bytes(32), RADEMACHER), dense(len(weights), 6)
    expected, got = (
        SCHEMES[scheme](runtime.on(batch), weights, directions, supports, STEP)
        for runtime in (pair.plain(), pair.many(3))
    )
    np.testing.assert_allclose(got.scalars, expected.scalars, rtol=1e-3, atol=1e-3)
    np.testing.assert_array_equal(pair.many(3).outputs(weights, batch), pair.plain().outputs(weights, batch))


def test_a_pass_knows_its_own_shapes_alone() -> None:
    pair = both("perceptron")
    weights = pair.graph.flat()
    turned = Directions(bytes(32), distribution_of(OUTER, ((len(weights),),)))
    with pytest.raises(ModelError, match=r"probe\.shapes are not those of task\.model"):
        losses_along(pair.many(3).on(pair.batch(2)), weights, turned, dense(len(weights), 3), STEP)


def recurrent() -> tuple[Net, str]:
    net = Net(3, 4)
    x = net.add("Transpose", "samples", perm=[1, 0, 2])
    x = net.add("RNN", x, net.weight(1, 5, 4, name="cells"), net.weight(1, 5, 5), hidden_size=5)
    return net, net.add("Gemm", net.add("ReduceMean", x, net.constant([0, 1]), keepdims=0), net.weight(5, CLASSES))


def transposed() -> tuple[Net, str]:
    net = Net(2, 5)
    return net, net.classify(net.add("ConvTranspose", "samples", net.weight(2, 3, 2, name="wider")), 18)


def sliced() -> tuple[Net, str]:
    net = Net(4)
    part = net.add("Slice", net.weight(6, CLASSES, name="table"), net.constant([1]), net.constant([5]))
    return net, net.add("MatMul", "samples", part)


def from_the_left() -> tuple[Net, str]:
    net = Net(4, 3)
    return net, net.classify(net.add("MatMul", net.weight(2, 4, name="left"), "samples"), 6)


def over_samples() -> tuple[Net, str]:
    net = Net(4)
    turned = net.add("Transpose", "samples", perm=[1, 0])
    mixed = net.add("Gemm", turned, net.weight(4, 2), transA=1)
    return net, net.add("Gemm", mixed, net.weight(2, CLASSES))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (recurrent, r"cells is used by RNN \(an operator without a rule\)"),
        (transposed, "wider is used by ConvTranspose"),
        (sliced, "table is used by Slice"),
        (from_the_left, "left is used by MatMul"),
        (over_samples, "weight0 is used by Gemm"),
    ],
)
def test_a_weight_that_is_used_in_another_way_is_named(make: Callable[[], tuple[Net, str]], says: str) -> None:
    with pytest.raises(ModelError, match=says):
        outer_model(foreign(*make()))


def test_samples_that_depend_on_one_another_are_noticed() -> None:
    graph = built_in(LeNet(channels=(3, 4), norm="batch"), Inputs((1, 8, 8), CLASSES), 0)
    pair = Both(graph, outer_model(graph).graph)
    assert "other outputs" in pair.disagreement(pair.batch(3))


def test_the_memory_of_a_row_grows_with_its_tensors() -> None:
    sizes = [built_in(LeNet(channels=(c, 2 * c)), Inputs((1, 8, 8), CLASSES), 0) for c in (2, 16)]
    small, large = (outer_model(graph).row_bytes for graph in sizes)
    assert 2 * 64 * 4 < small < large < 64 * 16 * 4 * 20


def test_equal_graphs_give_equal_bytes() -> None:
    one, other = (outer_model(foreign(*images())) for _ in range(2))
    assert one == other
