"""The nodes of an ONNX graph."""

from collections.abc import Iterator
from typing import Any

from onnx import GraphProto, NodeProto, helper


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
