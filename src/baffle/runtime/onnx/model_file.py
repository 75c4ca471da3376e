"""An ONNX file, whoever wrote it: bounded, and a ModelError if it cannot be read."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper

from baffle.errors import ModelError, first_line
from baffle.files import read_file

MOST_BYTES = 1 << 31
"""Of an ONNX file, which is as much as protobuf allows, and of the files beside it that it names."""


def read_model(path: Path) -> ModelProto:
    """The model in an ONNX file, with the numbers that it keeps in files beside it."""
    with translated(path):
        model = onnx.load_model_from_string(read_file(path, MOST_BYTES))
        if not model.graph.node:
            raise ValueError("it has no graph")
        if any(size < 0 for tensor in _tensors(model.graph) for size in tensor.dims):
            raise ValueError("it has a tensor of negative size")
        beside = sum(_external_bytes(tensor, path.parent) for tensor in _tensors(model.graph))
        if beside > MOST_BYTES:
            raise ValueError(f"it takes {beside:,} bytes from other files, expected at most {MOST_BYTES:,}")
        onnx.load_external_data_for_model(model, str(path.parent))
    return model


@contextmanager
def translated(path: Path) -> Iterator[None]:
    try:
        yield
    except ModelError:
        raise
    except Exception as fault:  # parsing a damaged file can raise almost anything
        raise ModelError(f"{path} cannot be read as an ONNX model: {first_line(fault)}") from None


def _tensors(graph: GraphProto) -> Iterator[TensorProto]:
    yield from graph.initializer
    for node in nodes_of(graph):
        for attribute in node.attribute:
            yield from (attribute.t, *attribute.tensors)


def _external_bytes(tensor: TensorProto, folder: Path) -> int:
    """How many bytes of another file a tensor takes. One file may be named by many tensors."""
    place = {entry.key: entry.value for entry in tensor.external_data}
    if tensor.data_location != TensorProto.EXTERNAL:
        return 0
    return int(place["length"]) if "length" in place else (folder / place["location"]).stat().st_size


def nodes_of(graph: GraphProto) -> Iterator[NodeProto]:
    """All nodes, including those in branches and loops."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                yield from nodes_of(inner)


def reads(node: NodeProto) -> Iterator[str]:
    """What a node reads, with what its branches and loops read from outside of them."""
    yield from node.input
    for attribute in node.attribute:
        for inner in (attribute.g, *attribute.graphs):
            for nested in nodes_of(inner):
                yield from nested.input
            yield from (value.name for value in inner.output)


def computing(model: ModelProto, outputs: Sequence[str]) -> ModelProto:
    """A copy of a model with these outputs alone, and only what they are computed from."""
    needed, kept = set(outputs), list[NodeProto]()
    for node in reversed(model.graph.node):  # nodes are in order, so what needs others stands behind them
        if needed.intersection(node.output):
            kept.append(node)
            needed.update(reads(node))
    graph = model.graph
    return helper.make_model(
        helper.make_graph(
            kept[::-1],
            graph.name,
            [value for value in graph.input if value.name in needed],
            [value for value in graph.output if value.name in outputs],
            [tensor for tensor in graph.initializer if tensor.name in needed],
        ),
        opset_imports=model.opset_import,
        ir_version=model.ir_version,
        functions=model.functions,
    )
