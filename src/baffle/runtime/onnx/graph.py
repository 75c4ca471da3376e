"""ONNX graphs as clients run them: weights are inputs, the mean loss is an output.

A model made by another tool keeps its operators. Its float initializers become inputs, except for those that configure
an operator and those that stay frozen.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from fnmatch import fnmatch
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import GraphProto, ModelProto, TensorProto, ValueInfoProto, helper, numpy_helper

from baffle.core.arrays import F32
from baffle.core.state import FLOAT
from baffle.errors import ModelError
from baffle.plan import Plan
from baffle.runtime.onnx.model_file import nodes_of, read_model, translated
from baffle.runtime.onnx.model_folder import (
    LOGITS,
    LOSS,
    MODEL,
    WEIGHT,
    WEIGHTS,
    InputType,
    Manifest,
    Stored,
    Tensor,
    X,
    Y,
    read_manifest,
    read_stored,
    read_weights,
)

PREFIX = "inner/"
"""Prefix of every name in the original model, so that none clashes with a name that is added here."""

LOSSES, DOUBLES = "losses", "losses/float64"

FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16)

INPUT_TYPES: Mapping[int, tuple[InputType, int]] = {
    TensorProto.FLOAT: ("float32", TensorProto.FLOAT),
    TensorProto.FLOAT16: ("float32", TensorProto.FLOAT),
    TensorProto.INT64: ("int64", TensorProto.INT64),
    TensorProto.INT32: ("int32", TensorProto.INT32),
}
"""For each input type that a model may have: the type of the samples that the finished graph takes."""

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
"""Positions of operator inputs that are floats but not weights: running statistics, limits, scales."""

OPSET = 13
"""The first opset in which every operator added here has its present form."""


@dataclass(frozen=True)
class OnnxGraph:
    """A finished graph, its original weights, and the shapes and types of its samples and outputs.

    A graph made from a module also has the rest of the module's state dict: `frozen` holds everything that is not
    trained; `tied` maps the name of a weight in `weights` to its further names.
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

    def flat(self) -> F32:
        """The original weights as one vector."""
        return np.concatenate([values.reshape(-1) for values in self.weights.values()])

    def manifest(self, model: bytes, weights: F32, rounds: int = 0, plan: Plan | None = None) -> Manifest:
        """Describes this graph, whose bytes are `model`, with these weights."""
        return Manifest(
            weights=tuple(Tensor(name, values.shape, self.tied.get(name, ())) for name, values in self.weights.items()),
            n_weights=sum(values.size for values in self.weights.values()),
            input_shape=self.input_shape,
            input_dtype=self.input_dtype,
            classes=self.classes,
            opset=self.opset,
            rounds=rounds,
            model_sha256=sha256(model).hexdigest(),
            weights_sha256=sha256(weights.astype(FLOAT).tobytes()).hexdigest(),
            trajectory=plan.trajectory_digest().hex() if plan else "",
            architecture=plan.model_digest().hex() if plan else "",
        )


def graph_from_folder(folder: Path) -> OnnxGraph:
    """The graph in an exported folder, unchanged."""
    manifest = read_manifest(folder)
    trained = {name for tensor in manifest.weights for name in (tensor.name, *tensor.also)}
    stored = read_stored(folder / WEIGHTS)
    return OnnxGraph(
        read_model(folder / MODEL),
        manifest.split(read_weights(folder / WEIGHTS, manifest)),
        manifest.input_shape,
        manifest.input_dtype,
        manifest.classes,
        frozen={name: tensor for name, tensor in stored.items() if name not in trained},
        tied={tensor.name: tensor.also for tensor in manifest.weights if tensor.also},
    )


def graph_from_file(path: Path, freeze: Sequence[str] = ()) -> OnnxGraph:
    """The graph of a classifier in an ONNX file. Weights whose names match a pattern in `freeze` are not trained."""
    model = read_model(path)
    with translated(path):
        return _trainable(model, path, freeze)


def _trainable(model: ModelProto, path: Path, freeze: Sequence[str]) -> OnnxGraph:
    initializers = {tensor.name: tensor for tensor in model.graph.initializer}
    for pattern in freeze:
        if not any(fnmatch(name, pattern) for name in initializers):
            names = _few(list(initializers))
            raise ModelError(f"--freeze {pattern}: no weight of {path} matches; it has {names}")
    untrained = set(_settings(model.graph))
    untrained |= {name for name in initializers if any(fnmatch(name, pattern) for pattern in freeze)}
    weights = {
        name: numpy_helper.to_array(tensor).astype(np.float32)
        for name, tensor in initializers.items()
        if tensor.data_type in FLOATS and tensor.dims and name not in untrained
    }
    return finished(model, weights)


def finished(model: ModelProto, weights: Mapping[str, F32], tag: str = "") -> OnnxGraph:
    """Turn a classifier into a graph that clients run: its inputs are samples, labels and these weights, its first
    output is the mean loss.

    In `model`, the weights' names have the prefix `tag`. Losses are averaged in float64, because a probe is a small
    difference of means.
    """
    if _opset(model) < OPSET:
        raise ModelError(f"the model has opset {_opset(model)}, expected {OPSET} or newer; export it again")
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
    _fill(graph.initializer, [tensor for tensor in graph.initializer if tensor.name not in inside])
    _rename_uses(graph, {inner: halves.get(name, WEIGHT + name) for inner, name in inside.items()})
    logits, ending = _before_softmax(graph, _only(list(graph.output), "output").name)
    _fill(
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
    _fill(graph.input, [helper.make_tensor_value_info(*description) for description in inputs])
    loss = helper.make_tensor_value_info(LOSS, TensorProto.DOUBLE, ())
    _fill(graph.output, [loss, helper.make_tensor_value_info(LOGITS, TensorProto.FLOAT, ("batch", None))])
    return OnnxGraph(model, weights, shape, input_dtype, _classes(model))


def _without_remarks(model: ModelProto) -> ModelProto:
    """The model without everything that has no effect on its output: comments, source locations, the tool's name."""
    bare = ModelProto()
    bare.CopyFrom(model)
    for remark in ("doc_string", "metadata_props", "producer_name", "producer_version", "domain", "model_version"):
        bare.ClearField(remark)
    for remark in ("doc_string", "metadata_props", "value_info"):
        bare.graph.ClearField(remark)
    for node in nodes_of(bare.graph):
        node.ClearField("doc_string")
        node.ClearField("metadata_props")
    for value in (*bare.graph.initializer, *bare.graph.input, *bare.graph.output):
        value.ClearField("doc_string")
        value.ClearField("metadata_props")
    bare.graph.name = "model"
    return bare


def _settings(graph: GraphProto) -> Iterator[str]:
    """Names of values that configure an operator, so are not weights."""
    for node in nodes_of(graph):
        positions = SETTINGS.get(node.op_type, ())
        yield from (name for position, name in enumerate(node.input) if position in positions)


def _rename_uses(graph: GraphProto, names: Mapping[str, str]) -> None:
    for node in nodes_of(graph):
        for position, name in enumerate(node.input):
            node.input[position] = names.get(name, name)


def _before_softmax(graph: GraphProto, output: str) -> tuple[str, str | None]:
    """The name of the logits, and the output to drop: that of a final softmax, because the loss contains a softmax."""
    last = next((node for node in graph.node if output in node.output), None)
    return (last.input[0], output) if last is not None and last.op_type == "Softmax" else (output, None)


def _only(values: Sequence[ValueInfoProto], what: str) -> ValueInfoProto:
    if len(values) != 1:
        names = _few([value.name.removeprefix(PREFIX) for value in values])
        raise ModelError(f"expected a model with one {what}, got {len(values)} ({names}); remove the others")
    return values[0]


def _input_shape(samples: ValueInfoProto) -> tuple[int, ...]:
    sizes = [dim.dim_value for dim in samples.type.tensor_type.shape.dim][1:]
    if samples.type.tensor_type.elem_type not in INPUT_TYPES or not sizes or not all(size > 0 for size in sizes):
        raise ModelError(
            f"the input {samples.name.removeprefix(PREFIX)} must be floats, int64 or int32 of shape (batch, …), where "
            f"only the batch size is open, got {helper.printable_type(samples.type)}; export the model like that"
        )
    return tuple(sizes)


def _classes(model: ModelProto) -> int:
    inferred = onnx.shape_inference.infer_shapes(model, data_prop=True)
    dims = next(value for value in inferred.graph.output if value.name == LOGITS).type.tensor_type.shape.dim
    if len(dims) != 2 or dims[1].dim_value < 1:
        sizes = [dim.dim_value or "?" for dim in dims]
        raise ModelError(f"the output must be logits of shape (batch, classes), got {sizes}; export it like that")
    return int(dims[1].dim_value)


def _opset(model: ModelProto) -> int:
    return next((int(entry.version) for entry in model.opset_import if entry.domain in ("", "ai.onnx")), 0)


def _fill(repeated: Any, values: Sequence[Any]) -> None:
    """Replace the contents of a repeated field."""
    copies = deepcopy(list(values))
    del repeated[:]
    repeated.extend(copies)


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (", …" if len(names) > 5 else "") if names else "none"
