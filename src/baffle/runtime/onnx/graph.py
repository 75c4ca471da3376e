"""ONNX graphs as clients run them: weights are inputs, the mean loss is an output.

A model from elsewhere keeps its operators. Its float initializers become inputs, but for those that are settings of an
operator rather than weights, and those that shall stay frozen.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from baffle.core.arrays import F32
from baffle.errors import ModelError
from baffle.runtime.onnx.model_folder import LOGITS, LOSS, MODEL, WEIGHT, WEIGHTS, X, Y, read_manifest, read_weights

PREFIX = "inner/"
"""Before every name that a model came with, so that none of them is also the name of something added."""

LOSSES, DOUBLES = "losses", "losses/float64"

FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16)

SETTINGS: Mapping[str, Collection[int]] = {
    "BatchNormalization": (3, 4),
    "Clip": (1, 2),
    "DequantizeLinear": (1,),
    "Pad": (2,),
    "Pow": (1,),
    "QuantizeLinear": (1,),
    "Resize": (1, 2),
    "Upsample": (1,),
}
"""Inputs of operators that are no weights although they are floats: running statistics, limits, scales."""

OPSET = 13
"""The first one in which all that is added here has its present form."""


@dataclass(frozen=True)
class OnnxGraph:
    """A finished graph, the weights it was found with, and the shapes of what goes in and comes out."""

    model: ModelProto
    weights: Mapping[str, F32]
    input_shape: tuple[int, ...]
    classes: int

    @property
    def opset(self) -> int:
        return _opset(self.model)

    def to_bytes(self) -> bytes:
        return bytes(self.model.SerializeToString(deterministic=True))


def graph_from_folder(folder: Path) -> OnnxGraph:
    """The graph of a model that was exported before, as it is."""
    manifest = read_manifest(folder)
    weights = manifest.split(read_weights(folder / WEIGHTS, manifest))
    return OnnxGraph(onnx.load(folder / MODEL), weights, manifest.input_shape, manifest.classes)


def graph_from_file(path: Path, freeze: Sequence[str] = ()) -> OnnxGraph:
    """A classifier that came as ONNX. Weights whose names match a pattern in `freeze` stay as they are."""
    try:
        model = onnx.load(path)
    except Exception as fault:  # a damaged file can raise anything that parsing can
        reason = str(fault).splitlines()[0] if str(fault) else type(fault).__name__
        raise ModelError(f"{path} is no ONNX model that can be read: {reason}") from None
    found = {one.name: one for one in model.graph.initializer}
    for unused in freeze:
        if not any(fnmatch(name, unused) for name in found):
            raise ModelError(f"--freeze {unused}: no weight of {path} has such a name; there are {_few(list(found))}")
    settings = set(_settings(model.graph))
    weights = {
        name: numpy_helper.to_array(one).astype(np.float32)
        for name, one in found.items()
        if one.data_type in FLOATS and one.dims and name not in settings and not any(fnmatch(name, f) for f in freeze)
    }
    return finished(model, weights)


def finished(model: ModelProto, weights: Mapping[str, F32], tag: str = "") -> OnnxGraph:
    """A classifier with these weights as inputs, after its samples and labels, and its mean loss as an output. In the
    model their names have `tag` before them. Losses are averaged in float64: a probe is a small difference of means."""
    if _opset(model) < OPSET:
        raise ModelError(f"the model has opset {_opset(model)}, expected {OPSET} or newer; export it anew with that")
    if not weights:
        raise ModelError("the model has no weights to train; expected float initializers that are not frozen")
    model = onnx.compose.add_prefix(_without_remarks(model), PREFIX)
    graph, inside = model.graph, {PREFIX + tag + name: name for name in weights}
    initializers = {one.name: one for one in graph.initializer}
    samples = _only([one for one in graph.input if one.name not in inside and one.name not in initializers], "input")
    given, shape = _only(list(graph.output), "output"), _input_shape(samples)
    halves = {
        name: f"{PREFIX}{WEIGHT}{name}"
        for found, name in inside.items()
        if found in initializers and initializers[found].data_type == TensorProto.FLOAT16
    }
    _keep(graph.initializer, [one for one in graph.initializer if one.name not in inside])
    _rename_uses(graph, {found: halves.get(name, WEIGHT + name) for found, name in inside.items()})
    logits, ending = _before_softmax(graph, given.name)
    _keep(
        graph.node,
        [
            helper.make_node("Cast", [X], [samples.name], to=samples.type.tensor_type.elem_type),
            *(
                helper.make_node("Cast", [WEIGHT + name], [half], to=TensorProto.FLOAT16)
                for name, half in halves.items()
            ),
            *(node for node in graph.node if ending not in node.output),
            helper.make_node("Cast", [logits], [LOGITS], to=TensorProto.FLOAT),
            helper.make_node("SoftmaxCrossEntropyLoss", [LOGITS, Y], [LOSSES], reduction="none"),
            helper.make_node("Cast", [LOSSES], [DOUBLES], to=TensorProto.DOUBLE),
            helper.make_node("ReduceMean", [DOUBLES], [LOSS], keepdims=0),
        ],
    )
    inputs: list[tuple[str, int, Sequence[str | int | None]]]
    inputs = [(X, TensorProto.FLOAT, ("batch", *shape)), (Y, TensorProto.INT64, ("batch",))]
    inputs += [(WEIGHT + name, TensorProto.FLOAT, values.shape) for name, values in weights.items()]
    _keep(graph.input, [helper.make_tensor_value_info(*one) for one in inputs])
    loss = helper.make_tensor_value_info(LOSS, TensorProto.DOUBLE, ())
    _keep(graph.output, [loss, helper.make_tensor_value_info(LOGITS, TensorProto.FLOAT, ("batch", None))])
    return OnnxGraph(model, weights, shape, _classes(model))


def _without_remarks(model: ModelProto) -> ModelProto:
    """The same model without what does not change its output: notes, sources, who made it."""
    bare = ModelProto()
    bare.CopyFrom(model)
    for field in ("doc_string", "metadata_props", "producer_name", "producer_version", "domain", "model_version"):
        bare.ClearField(field)
    for field in ("doc_string", "metadata_props", "value_info"):
        bare.graph.ClearField(field)
    for node in _nodes(bare.graph):
        node.ClearField("doc_string")
        node.ClearField("metadata_props")
    for one in (*bare.graph.initializer, *bare.graph.input, *bare.graph.output):
        one.ClearField("doc_string")
        one.ClearField("metadata_props")
    bare.graph.name = "model"
    return bare


def _nodes(graph: GraphProto) -> Iterator[NodeProto]:
    """All nodes, those of branches and loops too."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                yield from _nodes(inner)


def _settings(graph: GraphProto) -> Iterator[str]:
    """Names of what sets an operator and is no weight."""
    for node in _nodes(graph):
        places = SETTINGS.get(node.op_type, ())
        yield from (name for place, name in enumerate(node.input) if place in places)


def _rename_uses(graph: GraphProto, names: Mapping[str, str]) -> None:
    for node in _nodes(graph):
        for place, name in enumerate(node.input):
            node.input[place] = names.get(name, name)


def _before_softmax(graph: GraphProto, output: str) -> tuple[str, str | None]:
    """What holds the logits, and the output to leave out: that of a last softmax, which the loss has in it already."""
    last = next((node for node in graph.node if output in node.output), None)
    return (last.input[0], output) if last is not None and last.op_type == "Softmax" else (output, None)


def _only(found: Sequence[ValueInfoProto], what: str) -> ValueInfoProto:
    if len(found) != 1:
        names = _few([one.name.removeprefix(PREFIX) for one in found])
        raise ModelError(f"expected a model with one {what}, got {len(found)} ({names}); cut it down to one")
    return found[0]


def _input_shape(samples: ValueInfoProto) -> tuple[int, ...]:
    sizes = [dim.dim_value for dim in samples.type.tensor_type.shape.dim][1:]
    if samples.type.tensor_type.elem_type not in FLOATS or not sizes or not all(size > 0 for size in sizes):
        raise ModelError(
            f"the input {samples.name.removeprefix(PREFIX)} must be floats of shape (batch, …) where only the batch is "
            f"open, got {helper.printable_type(samples.type)}; export the model with its sizes fixed"
        )
    return tuple(sizes)


def _classes(model: ModelProto) -> int:
    inferred = onnx.shape_inference.infer_shapes(model, data_prop=True)
    dims = next(one for one in inferred.graph.output if one.name == LOGITS).type.tensor_type.shape.dim
    if len(dims) != 2 or dims[1].dim_value < 1:
        sizes = [dim.dim_value or "?" for dim in dims]
        raise ModelError(f"the output must be logits of shape (batch, classes), got {sizes}; export the model so")
    return int(dims[1].dim_value)


def _opset(model: ModelProto) -> int:
    return next((int(one.version) for one in model.opset_import if one.domain in ("", "ai.onnx")), 0)


def _keep(field: Any, kept: Sequence[Any]) -> None:
    """Make a repeated field hold these."""
    copies = deepcopy(list(kept))
    del field[:]
    field.extend(copies)


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (", …" if len(names) > 5 else "") if names else "none"
