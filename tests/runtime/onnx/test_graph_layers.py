"""The layers of another tool's graph: found by the nodes that use its weights."""

import numpy as np
from onnx import NodeProto, TensorProto, helper

from baffle.core.arrays import F32
from baffle.runtime.onnx.graph_layers import layers_by_nodes


def _layers(nodes: list[NodeProto], **shapes: tuple[int, ...]) -> dict[str, str]:
    graph = helper.make_graph(nodes, "theirs", [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4])], [])
    weights: dict[str, F32] = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    return layers_by_nodes(graph, weights)


def test_weights_of_one_node_are_a_layer() -> None:
    nodes = [
        helper.make_node("Conv", ["x", "w1", "b1"], ["a"]),
        helper.make_node("LayerNormalization", ["a", "scale", "shift"], ["b"]),
        helper.make_node("Gemm", ["b", "w2", "b2"], ["c"]),
    ]
    shapes = {"w1": (4, 4), "w2": (4, 4), "b1": (4,), "b2": (4,), "scale": (4,), "shift": (4,)}
    layers = {"w1": "w1", "b1": "w1", "scale": "scale", "shift": "scale", "w2": "w2", "b2": "w2"}
    assert _layers(nodes, **shapes) == layers


def test_a_vector_added_to_a_product_is_its_bias_and_a_matrix_is_not() -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"]),
        helper.make_node("Add", ["b", "a"], ["c"]),
        helper.make_node("Add", ["c", "positions"], ["d"]),
        helper.make_node("Relu", ["d"], ["e"]),
        helper.make_node("Add", ["e", "alone"], ["f"]),
    ]
    layers = _layers(nodes, w=(4, 4), b=(1, 4), positions=(3, 4), alone=(4,))
    assert layers == {"w": "w", "b": "w", "positions": "positions", "alone": "alone"}


def test_a_weight_of_two_nodes_counts_where_it_comes_first_and_an_unused_one_alone() -> None:
    nodes = [
        helper.make_node("Gemm", ["x", "w", "b1"], ["a"]),
        helper.make_node("Gemm", ["a", "w", "b2"], ["b"]),
    ]
    layers = _layers(nodes, w=(4, 4), b1=(4,), b2=(4,), unused=(2,))
    assert layers == {"w": "w", "b1": "w", "b2": "w", "unused": "unused"}
