"""The nodes of an ONNX graph."""

from collections.abc import Iterator, Sequence
from copy import deepcopy
from typing import Any

from onnx import GraphProto, ModelProto, NodeProto, helper


def nodes_of(graph: GraphProto) -> Iterator[NodeProto]:
    """All nodes, including those in branches and loops."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                yield from nodes_of(inner)


def setting(node: NodeProto, name: str, default: Any) -> Any:
    """An attribute of a node."""
    return next((helper.get_attribute_value(each) for each in node.attribute if each.name == name), default)


def copy_of(model: ModelProto) -> ModelProto:
    copy = ModelProto()
    copy.CopyFrom(model)
    return copy


def replace_all(repeated: Any, values: Sequence[Any]) -> None:
    """Replace the contents of a repeated field."""
    copies = deepcopy(list(values))
    del repeated[:]
    repeated.extend(copies)


def computing(model: ModelProto, *outputs: str) -> ModelProto:
    """A copy of a model with only these outputs and the nodes that they need."""
    needed, kept = set(outputs), list[NodeProto]()
    for node in reversed(model.graph.node):  # nodes are sorted, so a node comes after those that it needs
        if needed.intersection(node.output):
            kept.append(node)
            needed.update(_reads(node))
    graph = helper.make_graph(
        kept[::-1],
        model.graph.name,
        [value for value in model.graph.input if value.name in needed],
        [value for value in model.graph.output if value.name in outputs],
        [tensor for tensor in model.graph.initializer if tensor.name in needed],
    )
    imports, version = model.opset_import, model.ir_version
    return helper.make_model(graph, opset_imports=imports, ir_version=version, functions=model.functions)


def _reads(node: NodeProto) -> Iterator[str]:
    """The values that a node reads, including those that its branches and loops read from outside."""
    yield from node.input
    for attribute in node.attribute:
        for inner in (attribute.g, *attribute.graphs):
            for nested in nodes_of(inner):
                yield from nested.input
            yield from (value.name for value in inner.output)
