"""ONNX graphs as clients run them: weights are inputs, the mean loss is an output.

A model from elsewhere keeps its operators. Its float initializers become inputs, except for those that are settings of
an operator rather than weights, and those that are to stay frozen.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from baffle.core.arrays import F32
from baffle.errors import ModelError
from baffle.runtime.onnx.model_folder import (
    LOGITS,
    LOSS,
    MODEL,
    WEIGHT,
    WEIGHTS,
    InputType,
    Stored,
    X,
    Y,
    read_manifest,
    read_stored,
    read_weights,
)

PREFIX = "inner/"
"""Prefix of every name that a model came with, so that none of them is also the name of something added."""

LOSSES, DOUBLES = "losses", "losses/float64"

FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16)

INPUT_TYPES: Mapping[int, tuple[InputType, int]] = {
    TensorProto.FLOAT: ("float32", TensorProto.FLOAT),
    TensorProto.FLOAT16: ("float32", TensorProto.FLOAT),
    TensorProto.INT64: ("int64", TensorProto.INT64),
    TensorProto.INT32: ("int32", TensorProto.INT32),
}
"""For each type of input that a model may have: the type of the samples that the finished graph takes."""

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
"""Inputs of operators that are floats but not weights: running statistics, limits, scales."""

OPSET = 13
"""The first opset in which all operators that are added here have their present form."""


@dataclass(frozen=True)
class OnnxGraph:
    """A finished graph, the weights that it came with, and what its samples and outputs look like.

    A graph that came from a module also has the rest of the module's state dict: `frozen` holds what is not trained,
    `tied` the further names of trained weights, by their names in `weights`.
    """

    model: ModelProto
    weights: Mapping[str, F32]
    input_shape: tuple[int, ...]
    input_dtype: InputType
    classes: int
    frozen: Mapping[str, Stored] = field(default_factory=dict)
    tied: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def opset(self) -> int:
        return _opset(self.model)

    def to_bytes(self) -> bytes:
        return bytes(self.model.SerializeToString(deterministic=True))


def graph_from_folder(folder: Path) -> OnnxGraph:
    """The graph of a model that was exported before, unchanged."""
    manifest = read_manifest(folder)
    trained = {name for tensor in manifest.weights for name in (tensor.name, *tensor.also)}
    stored = read_stored(folder / WEIGHTS)
    return OnnxGraph(
        onnx.load(folder / MODEL),
        manifest.split(read_weights(folder / WEIGHTS, manifest)),
        manifest.input_shape,
        manifest.input_dtype,
        manifest.classes,
        frozen={name: tensor for name, tensor in stored.items() if name not in trained},
        tied={tensor.name: tensor.also for tensor in manifest.weights if tensor.also},
    )


def graph_from_file(path: Path, freeze: Sequence[str] = ()) -> OnnxGraph:
    """A classifier that came as ONNX. Weights whose names match a pattern in `freeze` stay as they are."""
    try:
        model = onnx.load(path)
    except Exception as fault:  # a damaged file can raise anything that parsing can
        reason = str(fault).splitlines()[0] if str(fault) else type(fault).__name__
        raise ModelError(f"{path} is no ONNX model that can be read: {reason}") from None
    initializers = {tensor.name: tensor for tensor in model.graph.initializer}
    for pattern in freeze:
        if not any(fnmatch(name, pattern) for name in initializers):
            names = _few(list(initializers))
            raise ModelError(f"--freeze {pattern}: no weight of {path} has such a name; there are {names}")
    kept = set(_settings(model.graph))
    kept |= {name for name in initializers if any(fnmatch(name, pattern) for pattern in freeze)}
    weights = {
        name: numpy_helper.to_array(tensor).astype(np.float32)
        for name, tensor in initializers.items()
        if tensor.data_type in FLOATS and tensor.dims and name not in kept
    }
    return finished(model, weights)


def finished(model: ModelProto, weights: Mapping[str, F32], tag: str = "") -> OnnxGraph:
    """A classifier whose inputs are samples, labels and these weights, and whose first output is the mean loss. In the
    model, the weights' names have the prefix `tag`. Losses are averaged in float64, since a probe is a small difference
    of means."""
    if _opset(model) < OPSET:
        raise ModelError(f"the model has opset {_opset(model)}, expected {OPSET} or newer; export it anew with that")
    if not weights:
        raise ModelError("the model has no weights to train; expected float initializers that are not frozen")
    model = onnx.compose.add_prefix(_without_remarks(model), PREFIX)
    graph = model.graph
    inside = {PREFIX + tag + name: name for name in weights}
    initializers = {tensor.name: tensor for tensor in graph.initializer}
    samples = _only([value for value in graph.input if value.name not in {*inside, *initializers}], "input")
    shape = _input_shape(samples)
    input_dtype, input_type = INPUT_TYPES[samples.type.tensor_type.elem_type]
    halves = {
        name: f"{PREFIX}{WEIGHT}{name}"
        for inner, name in inside.items()
        if inner in initializers and initializers[inner].data_type == TensorProto.FLOAT16
    }
    _keep(graph.initializer, [tensor for tensor in graph.initializer if tensor.name not in inside])
    _rename_uses(graph, {inner: halves.get(name, WEIGHT + name) for inner, name in inside.items()})
    logits, ending = _before_softmax(graph, _only(list(graph.output), "output").name)
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
    inputs = [(X, input_type, ("batch", *shape)), (Y, TensorProto.INT64, ("batch",))]
    inputs += [(WEIGHT + name, TensorProto.FLOAT, values.shape) for name, values in weights.items()]
    _keep(graph.input, [helper.make_tensor_value_info(*described) for described in inputs])
    loss = helper.make_tensor_value_info(LOSS, TensorProto.DOUBLE, ())
    _keep(graph.output, [loss, helper.make_tensor_value_info(LOGITS, TensorProto.FLOAT, ("batch", None))])
    return OnnxGraph(model, weights, shape, input_dtype, _classes(model))


def _without_remarks(model: ModelProto) -> ModelProto:
    """The same model without all that has no effect on its output: notes, sources, the name of the tool."""
    bare = ModelProto()
    bare.CopyFrom(model)
    for remark in ("doc_string", "metadata_props", "producer_name", "producer_version", "domain", "model_version"):
        bare.ClearField(remark)
    for remark in ("doc_string", "metadata_props", "value_info"):
        bare.graph.ClearField(remark)
    for node in _nodes(bare.graph):
        node.ClearField("doc_string")
        node.ClearField("metadata_props")
    for value in (*bare.graph.initializer, *bare.graph.input, *bare.graph.output):
        value.ClearField("doc_string")
        value.ClearField("metadata_props")
    bare.graph.name = "model"
    return bare


def _nodes(graph: GraphProto) -> Iterator[NodeProto]:
    """All nodes, including those inside branches and loops."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                yield from _nodes(inner)


def _settings(graph: GraphProto) -> Iterator[str]:
    """Names of the values that set an operator and so are not weights."""
    for node in _nodes(graph):
        places = SETTINGS.get(node.op_type, ())
        yield from (name for place, name in enumerate(node.input) if place in places)


def _rename_uses(graph: GraphProto, names: Mapping[str, str]) -> None:
    for node in _nodes(graph):
        for place, name in enumerate(node.input):
            node.input[place] = names.get(name, name)


def _before_softmax(graph: GraphProto, output: str) -> tuple[str, str | None]:
    """The name of the logits, and the output to leave out: that of a final softmax, which is part of the loss."""
    last = next((node for node in graph.node if output in node.output), None)
    return (last.input[0], output) if last is not None and last.op_type == "Softmax" else (output, None)


def _only(values: Sequence[ValueInfoProto], what: str) -> ValueInfoProto:
    if len(values) != 1:
        names = _few([value.name.removeprefix(PREFIX) for value in values])
        raise ModelError(f"expected a model with one {what}, got {len(values)} ({names}); cut it down to one")
    return values[0]


def _input_shape(samples: ValueInfoProto) -> tuple[int, ...]:
    sizes = [dim.dim_value for dim in samples.type.tensor_type.shape.dim][1:]
    if samples.type.tensor_type.elem_type not in INPUT_TYPES or not sizes or not all(size > 0 for size in sizes):
        raise ModelError(
            f"the input {samples.name.removeprefix(PREFIX)} must be floats, int64 or int32, of shape (batch, …) where "
            f"only the batch is open, got {helper.printable_type(samples.type)}; export the model so"
        )
    return tuple(sizes)


def _classes(model: ModelProto) -> int:
    inferred = onnx.shape_inference.infer_shapes(model, data_prop=True)
    dims = next(value for value in inferred.graph.output if value.name == LOGITS).type.tensor_type.shape.dim
    if len(dims) != 2 or dims[1].dim_value < 1:
        sizes = [dim.dim_value or "?" for dim in dims]
        raise ModelError(f"the output must be logits of shape (batch, classes), got {sizes}; export the model so")
    return int(dims[1].dim_value)


def _opset(model: ModelProto) -> int:
    return next((int(entry.version) for entry in model.opset_import if entry.domain in ("", "ai.onnx")), 0)


def _keep(repeated: Any, kept: Sequence[Any]) -> None:
    """Make a repeated field hold these."""
    copies = deepcopy(list(kept))
    del repeated[:]
    repeated.extend(copies)


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (", …" if len(names) > 5 else "") if names else "none"
