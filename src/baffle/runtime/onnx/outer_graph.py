"""A graph for many outer directions at once: beside the weights it takes the small factors of directions as inputs.

A sample becomes a row for each direction, and those of one direction stay side by side, so the model's own nodes run on
directions × samples rows. Where a node uses a weight, what directions add to its output is added to its rows.

Inputs are the samples, the weights, and for each weight `a/NAME` and `b/NAME` with a row for each direction. The output
is that of every row. Weights are the same for all directions, but not constants of the graph: ONNX Runtime would run
constants quicker, but a session that is opened anew in each round costs more than that gains (benchmarks/outer.py).
"""

from collections.abc import Sequence
from copy import deepcopy
from hashlib import sha256
from typing import NamedTuple

from onnx import ModelProto, NodeProto, TensorProto, helper

from baffle.core.outer import Place, places
from baffle.errors import ModelError
from baffle.runtime.onnx.graph import OnnxGraph
from baffle.runtime.onnx.model_file import computing, reads
from baffle.runtime.onnx.model_folder import LOGITS, WEIGHT, A, B, OuterFile
from baffle.runtime.onnx.outer_builder import Factored, OuterBuilder
from baffle.runtime.onnx.outer_rules import RULES, VIEWS
from baffle.runtime.onnx.probing import row_bytes, sizes_in


class OuterModel(NamedTuple):
    """The bytes of such a graph, and about how many bytes its tensors take for each direction of a sample."""

    graph: bytes
    row_bytes: int

    def file(self) -> OuterFile:
        return OuterFile(sha256(self.graph).hexdigest(), self.row_bytes)


def outer_model(graph: OnnxGraph) -> OuterModel:
    """The graph for many directions, ready to be run or written."""
    model = outer_graph(graph)
    return OuterModel(bytes(model.SerializeToString(deterministic=True)), row_bytes(model, graph))


def outer_graph(graph: OnnxGraph) -> ModelProto:
    """The graph for many directions. Refused is one that uses a weight in a way for which there is no rule."""
    plain = computing(graph.model, [LOGITS])
    trained = _places(graph)
    views = {
        WEIGHT + name: Factored(WEIGHT + name, graph.weights[name].shape, A + name, B + name if place.columns else "")
        for name, place in trained.items()
    }
    builder = OuterBuilder(graph.inputs, views, sizes_in(graph))
    moved = {WEIGHT + name: name for name in trained}  # what depends on weights, each with the name of one
    for node in plain.graph.node:
        _take(builder, node, moved)
    if LOGITS not in moved or LOGITS in builder.views:
        raise ModelError("the outputs do not depend on samples and weights")
    factors = [(A + name, place.rows) for name, place in trained.items()]
    factors += [(B + name, place.columns) for name, place in trained.items() if place.columns]
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ("directions", size)) for name, size in factors]
    output = helper.make_tensor_value_info(LOGITS, TensorProto.FLOAT, None)
    constants = [*plain.graph.initializer, *builder.constants]
    return computing(
        helper.make_model(
            helper.make_graph(builder.nodes, "outer", [*plain.graph.input, *inputs], [output], constants),
            opset_imports=plain.opset_import,
            ir_version=plain.ir_version,
            functions=plain.functions,
        ),
        [LOGITS],
    )


def _places(graph: OnnxGraph) -> dict[str, Place]:
    """The trained tensors, without those that have no weight."""
    names = [name for name, values in graph.weights.items() if values.size]
    return dict(zip(names, places(tuple(graph.weights[name].shape for name in names)), strict=True))


def _take(builder: OuterBuilder, node: NodeProto, moved: dict[str, str]) -> None:
    """Add a node of the model, in the form that it has for many directions."""
    read = set(reads(node))
    branches = any(attribute.g.node or attribute.graphs for attribute in node.attribute)
    weights = sorted(moved[name] for name in read if name in moved)
    if read & builder.views.keys():
        try:
            if branches:
                raise ModelError("a branch or a loop")
            _take_weight(builder, node)
        except ModelError as fault:
            raise ModelError(f"{weights[0]} is used by {node.op_type} ({fault})") from None
    else:
        builder.nodes.append(_renamed(node, [builder.rows(name) for name in node.input], list(node.output)))
    if weights:
        moved |= dict.fromkeys(node.output, weights[0])
    elif read & builder.once.keys() and not branches:
        once = [name and f"outer/once/{name}" for name in node.output]
        builder.nodes.append(_renamed(node, [builder.once.get(name, name) for name in node.input], once))
        builder.once |= dict(zip(node.output, once, strict=True))


def _take_weight(builder: OuterBuilder, node: NodeProto) -> None:
    """Add a node that uses a weight."""
    output = node.output[0]
    if node.op_type in VIEWS and not builder.has_samples(output):
        builder.views[output] = VIEWS[node.op_type](builder, node)
    elif node.op_type in RULES:
        builder.nodes.append(helper.make_node("Identity", [RULES[node.op_type](builder, node)], [output]))
    else:
        raise ModelError("an operator without a rule")


def _renamed(node: NodeProto, inputs: Sequence[str], outputs: Sequence[str]) -> NodeProto:
    copy = deepcopy(node)
    copy.input[:] = inputs
    copy.output[:] = outputs
    return copy
