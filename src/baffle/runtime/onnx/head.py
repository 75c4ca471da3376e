"""The last linear layer of a graph: where it is, and what it takes and gives."""

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from onnx import GraphProto, NodeProto

from baffle.core.arrays import F32
from baffle.errors import NoHeadError
from baffle.runtime.model import USED_TWICE
from baffle.runtime.onnx.graph import ShownHead
from baffle.runtime.onnx.masks import MASK
from baffle.runtime.onnx.model_folder import CROSS_ENTROPY, WEIGHT, GraphLoss, HeadTensors
from baffle.runtime.onnx.nodes import nodes_of, setting

RESHAPES = ("Reshape", "Squeeze", "Unsqueeze", "Flatten")
KEEPS = (*RESHAPES, "Identity", "Cast")
"""Operators that give the numbers that they take, in the same order."""

Makers = Mapping[str, NodeProto]  # what makes each value


def find_head(
    graph: GraphProto, outputs: str, weights: Mapping[str, F32], loss: GraphLoss, *, rank: int, classes_last: bool
) -> ShownHead:
    """The last linear layer of a graph whose weights are inputs: a Gemm, or a MatMul with or without an Add. Its
    numbers must be the outputs, in any shape (under cross-entropy also their logarithmic softmax). Outputs have `rank`
    axes. Refuses other graphs, and says what it found."""
    if not classes_last:
        raise NoHeadError("the last axis of the outputs is not the classes")
    makers = {name: node for node in graph.node for name in node.output}
    node = _behind(makers.get(outputs), makers, loss, rank)
    linear, bias = _linear(node, makers)
    if node is None or linear is None:
        raise NoHeadError(f"the outputs come from {node.op_type if node else 'an input'}")
    if any(setting(linear, name, 1.0) != 1.0 for name in ("alpha", "beta")) or setting(linear, "transA", 0):
        raise NoHeadError("the last linear layer, a Gemm, has an alpha, beta or transA of its own")
    tensors = [_tensor(name, makers) for name in (linear.input[1], bias) if name]
    shapes = [weights[tensor.name].shape if tensor.name in weights else None for tensor in tensors]
    if None in shapes:
        raise NoHeadError("the weights of the last linear layer are not trained")
    by_input = bool(tensors[0].turned) == bool(setting(linear, "transB", 0))
    matrix, *vector = [shape for shape in shapes if shape is not None]
    if len(matrix) != 2 or (vector and vector[0] != matrix[by_input : by_input + 1]):
        raise NoHeadError(f"the weights of the last linear layer are of shapes {shapes}")
    used = Counter(name for each in nodes_of(graph) for name in each.input)
    if any(used[name] > 1 for tensor in tensors for name in tensor.path):
        raise NoHeadError(USED_TWICE)
    head = HeadTensors(tensors[0].name, tensors[1].name if bias else "", by_input)
    return ShownHead(linear.input[0], node.output[0], head)


def _behind(node: NodeProto | None, makers: Makers, loss: GraphLoss, rank: int) -> NodeProto | None:
    """What made the numbers of the outputs, before they were copied, reshaped or, as cross-entropy allows, turned into
    logarithms of probabilities."""
    reshaped = False
    while node is not None:
        logarithms = node.op_type == "LogSoftmax" and loss == CROSS_ENTROPY and not reshaped
        if not (logarithms and setting(node, "axis", -1) in (-1, rank - 1)) and node.op_type not in KEEPS:
            break
        reshaped = reshaped or node.op_type in RESHAPES
        node = makers.get(node.input[0])
    return node


def _linear(node: NodeProto | None, makers: Makers) -> tuple[NodeProto | None, str]:
    """The matrix product that a node is, or adds to; and the name of what is added, if anything is."""
    if node is None or node.op_type not in ("Gemm", "MatMul", "Add"):
        return None, ""
    if node.op_type != "Add":
        return node, node.input[2] if node.op_type == "Gemm" and len(node.input) > 2 else ""
    for product, bias in (node.input, reversed(node.input)):
        if (maker := makers.get(product)) is not None and maker.op_type == "MatMul" and _tensor(bias, makers).name:
            return maker, bias
    return None, ""


class _Tensor(NamedTuple):
    """A trained tensor as an operator takes it: perhaps in another precision, transposed or masked. `path` are its
    names on its way there. A value that is not trained has no name."""

    name: str
    turned: bool
    path: tuple[str, ...]


def _tensor(value: str, makers: Makers) -> _Tensor:
    path, turned = [value], False
    while (node := makers.get(path[-1])) is not None and (
        node.op_type in ("Cast", "Identity", "Transpose") or (node.op_type == "Mul" and node.input[1].endswith(MASK))
    ):
        turned ^= node.op_type == "Transpose" and list(setting(node, "perm", (1, 0))) == [1, 0]
        path.append(node.input[0])
    name = path[-1].removeprefix(WEIGHT) if path[-1].startswith(WEIGHT) else ""
    return _Tensor(name, turned, tuple(path))
