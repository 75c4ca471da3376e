"""Models in ONNX files that another tool made. They keep their operators; their float initializers become inputs,
except for those that configure an operator and those that stay frozen."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from fnmatch import fnmatch
from glob import escape
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from baffle.core.arrays import F32
from baffle.core.samples import Shape, is_plain
from baffle.errors import ModelError
from baffle.runtime.onnx.finishing import few, finished, inputs_of, read_model, reading, replace_all
from baffle.runtime.onnx.graph import OnnxGraph
from baffle.runtime.onnx.model_folder import CROSS_ENTROPY, LOGITS, WEIGHT, GraphLoss, Manifest, read_exported
from baffle.runtime.onnx.nodes import nodes_of

FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16)

SETTINGS = {
    **{"BatchNormalization": (3, 4), "Clip": (1, 2), "DequantizeLinear": (1,), "Pad": (2,), "Pow": (1,)},
    **{"QuantizeLinear": (1,), "Resize": (1, 2), "Upsample": (1,)},
}
"""Positions of operator inputs that are floats but not weights: running statistics, limits, scales."""


def graph_from_file(
    path: Path,
    freeze: Sequence[str] = (),
    shape: Shape = (),
    loss: GraphLoss = CROSS_ENTROPY,
    *,
    head: bool = False,
    output: str = "",
) -> OnnxGraph:
    """The graph of a model in an ONNX file. Weights whose names match a pattern in `freeze` are not trained. A
    graph that leaves sizes of its samples open is made for samples of `shape`. With `head`, it shows what its last
    linear layer takes and gives. Of several outputs it keeps `output`, or the only one that holds floats: a
    classifier's labels, which scikit-learn's models give too, follow from its numbers."""
    model = read_model(path)
    with reading(path):
        model = _with_one_output(model, output)
        if shape:
            _close_sizes(model.graph, shape)
        return _trainable(model, path, freeze, loss, head=head)


def _with_one_output(model: ModelProto, wanted: str) -> ModelProto:
    outputs = {value.name: value.type.tensor_type.elem_type for value in model.graph.output}
    if wanted and wanted not in outputs:
        raise ModelError(f"--output {wanted}: the model has no such output; it has {few(list(outputs))}")
    floats = [name for name, kind in outputs.items() if kind in FLOATS]
    chosen = wanted or (floats[0] if len(floats) == 1 else "")
    return _computing(model, chosen) if chosen and len(outputs) > 1 else model


def _close_sizes(graph: GraphProto, shape: Shape) -> None:
    """Set the open sizes of the graph's samples, all but that of the batch."""
    values = inputs_of(graph, {tensor.name for tensor in graph.initializer})
    names = [value.name for value in values]
    if isinstance(shape, dict):
        if unknown := [name for name in shape if name not in names]:
            raise ModelError(f"the model has no input {unknown[0]}; its inputs are {few(names)}")
        by_name = shape
    else:
        several: list[Any] = [shape] if is_plain(shape) else list(shape)
        if len(several) != len(names):
            raise ModelError(f"expected samples of an array for each of the inputs {few(names)}, got {len(several)}")
        by_name = dict(zip(names, several, strict=True))
    for value in values:
        dims, sizes = value.type.tensor_type.shape.dim, by_name.get(value.name)
        if sizes is None:
            continue
        open_or_same = len(dims) == len(sizes) + 1 and all(
            dim.dim_value in (0, size) for dim, size in zip(dims[1:], sizes, strict=True)
        )
        if not open_or_same:
            given, found = ",".join(map(str, sizes)), helper.printable_type(value.type)
            raise ModelError(
                f"--shape {given}: the input {value.name} has {found}; expected the sizes of one sample, without the "
                "batch"
            )
        for dim, size in zip(dims[1:], sizes, strict=True):
            dim.dim_value = size


def _trainable(model: ModelProto, path: Path, freeze: Sequence[str], loss: GraphLoss, *, head: bool) -> OnnxGraph:
    initializers = {tensor.name: tensor for tensor in model.graph.initializer}
    for pattern in freeze:
        if not any(fnmatch(name, pattern) for name in initializers):
            names = few(list(initializers))
            raise ModelError(f"--freeze {pattern}: no weight of {path} matches; it has {names}")
    untrained = {
        name
        for node in nodes_of(model.graph)
        for position, name in enumerate(node.input)
        if position in SETTINGS.get(node.op_type, ())
    }
    untrained |= {name for name in initializers if any(fnmatch(name, pattern) for pattern in freeze)}
    weights = {
        name: numpy_helper.to_array(tensor).astype(np.float32)
        for name, tensor in initializers.items()
        if tensor.data_type in FLOATS and tensor.dims and name not in untrained
    }
    return replace(finished(model, weights, loss=loss, head=head), layers=layers_by_nodes(model.graph, weights))


def layers_by_nodes(graph: GraphProto, weights: Mapping[str, F32]) -> dict[str, str]:
    """The layer of each weight, named after the layer's first weight; names that another tool gave need not tell.
    Weights that one node uses belong to one layer, as does a vector that is added to the output of such a node. A
    weight that several nodes use counts where it is used first; one that no node uses is a layer of its own."""
    layers = dict[str, str]()
    layer_behind = dict[str, str]()  # for outputs of nodes with weights
    for node in nodes_of(graph):
        used = [name for name in node.input if name in weights]
        if not used:
            continue
        vectors = all(weights[name].size == max(weights[name].shape) for name in used)
        added_to = [layer_behind[name] for name in node.input if name in layer_behind and node.op_type == "Add"]
        layer = added_to[0] if vectors and added_to else layers.get(used[0], used[0])
        for name in used:
            layers.setdefault(name, layer)
        layer_behind |= dict.fromkeys(node.output, layer)
    return {name: layers.get(name, name) for name in weights}


def require_file(path: Path, manifest: Manifest) -> None:
    """Refuse an ONNX file other than the one that an exported graph was made of. Its trained weights may differ."""
    trained = {tensor.name for tensor in manifest.weights}
    frozen = [escape(tensor.name) for tensor in read_model(path).graph.initializer if tensor.name not in trained]

    def made(output: str) -> bytes:
        with suppress(ModelError):
            head = manifest.head is not None
            return graph_from_file(path, frozen, manifest.shape, manifest.loss, head=head, output=output).model
        return b""

    outputs = ["", *(value.name for value in read_model(path).graph.output)]
    if not any(sha256(made(output)).hexdigest() == manifest.model_sha256 for output in outputs):
        raise ModelError(
            f"model: {path} is not the run's model, but another graph; give the one that the run began with"
        )


def file_with_weights(path: Path, manifest: Manifest, weights: F32) -> ModelProto:
    """The model in an ONNX file with these weights, and otherwise unchanged. The manifest's graph was made from it."""
    require_file(path, manifest)
    model, trained = read_model(path), manifest.split(weights)
    for tensor in model.graph.initializer:
        if tensor.name in trained:
            kind = numpy_helper.to_array(tensor).dtype
            tensor.CopyFrom(numpy_helper.from_array(trained[tensor.name].astype(kind), tensor.name))
    return model


def graph_with_weights(folder: Path, weights: F32) -> ModelProto:
    """The graph in an exported folder with weights inside: from samples, `x` or `x/…` each, to outputs, `logits`."""
    manifest, graph, _ = read_exported(folder)
    with reading(folder):
        model = _computing(ModelProto.FromString(graph), LOGITS)
    trained = manifest.split(weights)
    model.graph.initializer.extend(numpy_helper.from_array(values, WEIGHT + name) for name, values in trained.items())
    samples = {wanted.in_graph for wanted in manifest.arrays}
    replace_all(model.graph.input, [value for value in model.graph.input if value.name in samples])
    return model


def _computing(model: ModelProto, output: str) -> ModelProto:
    """A copy of a model with only this output and the nodes that it needs."""
    needed, kept = {output}, list[NodeProto]()
    for node in reversed(model.graph.node):  # nodes are sorted, so a node comes after those that it needs
        if needed.intersection(node.output):
            kept.append(node)
            needed.update(_reads(node))
    graph = helper.make_graph(
        kept[::-1],
        model.graph.name,
        [value for value in model.graph.input if value.name in needed],
        [value for value in model.graph.output if value.name == output],
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
