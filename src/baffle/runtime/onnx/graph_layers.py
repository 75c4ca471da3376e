"""The layers of a graph that another tool made, whose names need not tell which tensors belong together."""

from collections.abc import Mapping

from onnx import GraphProto, NodeProto

from baffle.core.arrays import F32
from baffle.runtime.onnx.model_file import nodes_of


def layers_by_nodes(graph: GraphProto, weights: Mapping[str, F32]) -> dict[str, str]:
    """For each weight, the layer that it is of, named after the layer's first weight.

    Weights that one node uses are of one layer. So is a vector that is added to the output of a node with weights, as
    the bias of a product is. A weight that several nodes use counts where it is used first; one that no node uses is a
    layer of its own.
    """
    layers = dict[str, str]()
    layer_behind = dict[str, str]()  # for outputs of nodes with weights
    for node in nodes_of(graph):
        used = [name for name in node.input if name in weights]
        if not used:
            continue
        vectors = all(weights[name].size == max(weights[name].shape) for name in used)
        layer = (_continued(node, layer_behind) if vectors else None) or layers.get(used[0], used[0])
        for name in used:
            layers.setdefault(name, layer)
        layer_behind |= dict.fromkeys(node.output, layer)
    return {name: layers.get(name, name) for name in weights}


def _continued(node: NodeProto, layer_behind: dict[str, str]) -> str | None:
    """The layer whose output a node adds something to; None if it does not add, or to something else."""
    if node.op_type != "Add":
        return None
    return next((layer_behind[name] for name in node.input if name in layer_behind), None)
