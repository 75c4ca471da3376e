"""From ONNX models of any origin to graphs that clients run."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper

from baffle.core.arrays import F32
from baffle.errors import BaffleError, ModelError, first_line
from baffle.files import read_file
from baffle.runtime.onnx import model_folder
from baffle.runtime.onnx.endings import ending
from baffle.runtime.onnx.graph import PREFIX, OnnxGraph
from baffle.runtime.onnx.head import find_head
from baffle.runtime.onnx.model_folder import (
    CROSS_ENTROPY,
    HEAD_INPUTS,
    HEAD_OUTPUTS,
    LOGITS,
    LOSS,
    MOST_BYTES,
    NO_LOSS,
    WEIGHT,
    GraphLoss,
    Input,
    Y,
)
from baffle.runtime.onnx.nodes import copy_of, nodes_of, replace_all
from baffle.runtime.onnx.session import open_session, translated

INPUT_TYPES: Mapping[int, model_folder.InputType] = {
    TensorProto.FLOAT: "float32",
    TensorProto.FLOAT16: "float32",
    TensorProto.INT64: "int64",
    TensorProto.INT32: "int32",
    TensorProto.UINT8: "uint8",
    TensorProto.INT8: "int8",
    TensorProto.BOOL: "bool",
}
"""For each input type that a model may have: the type of the samples that the finished graph takes."""

OPSET = 13  # the first opset in which every operator added here has its present form


def read_model(path: Path) -> ModelProto:
    """The model in an ONNX file, with the numbers that it keeps in files beside it."""
    with reading(path):
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
def reading(path: Path) -> Iterator[None]:
    try:
        yield
    except BaffleError:
        raise
    except Exception as fault:  # parsing a damaged file can raise almost anything
        raise ModelError(f"{path} cannot be read as an ONNX model: {first_line(fault)}") from None


def _tensors(graph: GraphProto) -> Iterator[TensorProto]:
    yield from graph.initializer
    for node in nodes_of(graph):
        for attribute in node.attribute:
            yield from (attribute.t, *attribute.tensors)


def _external_bytes(tensor: TensorProto, folder: Path) -> int:
    """How many bytes of another file a tensor takes. Many tensors may name the same file."""
    place = {entry.key: entry.value for entry in tensor.external_data}
    if tensor.data_location != TensorProto.EXTERNAL:
        return 0
    return int(place["length"]) if "length" in place else (folder / place["location"]).stat().st_size


def finished(
    model: ModelProto,
    weights: Mapping[str, F32],
    tag: str = "",
    loss: GraphLoss = CROSS_ENTROPY,
    label_shape: tuple[int, ...] | None = None,
    *,
    head: bool = False,
) -> OnnxGraph:
    """Turn a model into a graph that clients run: its inputs are samples, labels and these weights, its first output is
    the mean loss. A graph without a loss takes no labels. In `model`, the weights' names have the prefix `tag`.
    `label_shape` is that of one sample's label, if it is known. With `head`, the graph also shows what its last linear
    layer takes and gives, or is refused if its outputs do not follow from one."""
    if _opset(model) < OPSET:
        raise ModelError(f"the model has opset {_opset(model)}, expected {OPSET} or newer; export it again")
    if not weights:
        raise ModelError("the model has no weights to train; expected float initializers that are not frozen")
    model = onnx.compose.add_prefix(_without_remarks(model), PREFIX)
    graph = model.graph
    inside = {PREFIX + tag + name: name for name in weights}
    initializers = {tensor.name: tensor for tensor in graph.initializer}
    samples = inputs_of(graph, {*inside, *initializers})
    taken = tuple(_input(value, alone=len(samples) == 1) for value in samples)
    halves = {
        name: f"{PREFIX}{WEIGHT}{name}"
        for inner, name in inside.items()
        if inner in initializers and initializers[inner].data_type == TensorProto.FLOAT16
    }
    replace_all(graph.initializer, [tensor for tensor in graph.initializer if tensor.name not in inside])
    new_names = {inner: halves.get(name, WEIGHT + name) for inner, name in inside.items()}
    for node in nodes_of(graph):
        replace_all(node.input, [new_names.get(name, name) for name in node.input])
    if len(graph.output) != 1:
        names = few([value.name.removeprefix(PREFIX) for value in graph.output])
        raise ModelError(
            f"expected a model with one output of floats, got {len(graph.output)} ({names}); choose one with --output "
            "NAME (in Python, fit the folder that `baffle export --onnx FILE --output NAME` makes)"
        )
    logits, dropped = graph.output[0].name, None
    ends_in = next((node for node in graph.node if logits in node.output), None)
    if loss == CROSS_ENTROPY and ends_in is not None and ends_in.op_type == "Softmax":  # the loss contains a softmax
        logits, dropped = ends_in.input[0], logits
    pairs = zip(taken, samples, strict=True)
    casts = [(each.in_graph, value.name, value.type.tensor_type.elem_type) for each, value in pairs]
    casts += [(WEIGHT + name, half, TensorProto.FLOAT16) for name, half in halves.items()]
    nodes = [helper.make_node("Cast", [value], [new], to=kind) for value, new, kind in casts]
    nodes += [node for node in graph.node if dropped not in node.output]
    replace_all(graph.node, [*nodes, helper.make_node("Cast", [logits], [LOGITS], to=TensorProto.FLOAT)])
    inputs: list[tuple[str, int, Sequence[str | int | None]]] = [
        (each.in_graph, helper.np_dtype_to_tensor_dtype(np.dtype(each.dtype)), ("batch", *each.shape)) for each in taken
    ]
    trained = [(WEIGHT + name, TensorProto.FLOAT, values.shape) for name, values in weights.items()]
    replace_all(graph.input, [helper.make_tensor_value_info(*description) for description in (*inputs, *trained)])
    replace_all(graph.output, [helper.make_tensor_value_info(LOGITS, TensorProto.FLOAT, None)])
    sizes = _output_sizes(model, taken, weights)
    end = ending(loss, sizes, label_shape)
    graph.node.extend(NodeProto.FromString(node) for node in end.nodes)
    outputs = [helper.make_tensor_value_info(LOGITS, TensorProto.FLOAT, ("batch", *[None] * len(sizes)))]
    last = loss != CROSS_ENTROPY or label_shape in (None, sizes[:-1])
    rank = len(sizes) + 1
    shown = find_head(graph, logits, weights, loss, rank=rank, classes_last=last) if head else None
    for name, at in [(HEAD_INPUTS, shown.inputs), (HEAD_OUTPUTS, shown.outputs)] if shown else []:
        graph.node.append(helper.make_node("Cast", [at], [name], to=TensorProto.FLOAT))
        outputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, None))
    if loss != NO_LOSS:
        inputs.append((Y, end.label_type, ("batch", *end.label_shape)))
        outputs.insert(0, helper.make_tensor_value_info(LOSS, TensorProto.DOUBLE, ()))
    replace_all(graph.input, [helper.make_tensor_value_info(*description) for description in (*inputs, *trained)])
    replace_all(graph.output, outputs)
    data = bytes(model.SerializeToString(deterministic=True))
    tensors = shown.tensors if shown else None
    shape = end.label_shape
    return OnnxGraph(data, _opset(model), weights, taken, end.classes, loss=loss, label_shape=shape, head=tensors)


def _without_remarks(model: ModelProto) -> ModelProto:
    """The model without everything that has no effect on its output: comments, source locations, the tool's name."""
    bare = copy_of(model)
    for remark in ("doc_string", "metadata_props", "producer_name", "producer_version", "domain", "model_version"):
        bare.ClearField(remark)
    for remark in ("doc_string", "metadata_props", "value_info"):
        bare.graph.ClearField(remark)
    for part in (*nodes_of(bare.graph), *bare.graph.initializer, *bare.graph.input, *bare.graph.output):
        part.ClearField("doc_string")
        part.ClearField("metadata_props")
    bare.graph.name = "model"
    return bare


def inputs_of(graph: GraphProto, others: Collection[str]) -> list[ValueInfoProto]:
    """What a graph takes as samples: its inputs besides these others."""
    if values := [value for value in graph.input if value.name not in others]:
        return values
    raise ModelError("expected a model with an input for samples, got none")


def _input(samples: ValueInfoProto, *, alone: bool) -> Input:
    """What one input takes. A single number for each sample is possible beside other inputs."""
    tensor = samples.type.tensor_type
    sizes = [dim.dim_value for dim in tensor.shape.dim][1:]
    name = samples.name.removeprefix(PREFIX)
    if tensor.elem_type not in INPUT_TYPES or not tensor.shape.dim or (alone and not sizes):
        raise ModelError(
            f"the input {name} must be floats, integers or booleans of shape (batch, …), got "
            f"{helper.printable_type(samples.type)}; export the model like that"
        )
    if not all(size > 0 for size in sizes):
        example = ",".join(str(size if size > 0 else 8) for size in sizes)
        raise ModelError(
            f"the input {name} leaves the size of a sample open, got {helper.printable_type(samples.type)}; say how "
            f"large one is: --shape {example}, for example"
        )
    return Input("" if alone else name, tuple(sizes), INPUT_TYPES[tensor.elem_type])


def _output_sizes(model: ModelProto, taken: Sequence[Input], weights: Mapping[str, F32]) -> tuple[int, ...]:
    """The sizes of a model's output for one sample: those that follow from its operators, or else those that it has."""
    inferred = onnx.shape_inference.infer_shapes(model, data_prop=True)
    dims = next(value for value in inferred.graph.output if value.name == LOGITS).type.tensor_type.shape.dim
    if dims and all(dim.dim_value > 0 for dim in dims[1:]):
        return tuple(int(dim.dim_value) for dim in dims[1:])
    samples = 2
    inputs = {each.in_graph: np.zeros((samples, *each.shape), each.dtype) for each in taken}
    inputs |= {WEIGHT + name: values for name, values in weights.items()}
    with translated("a forward pass"):
        shape = open_session(model.SerializeToString()).run([LOGITS], inputs)[0].shape
    if shape[:1] != (samples,):
        raise ModelError(f"the output must be of shape (batch, outputs), got {list(shape)}; export it like that")
    return tuple(shape[1:])


def _opset(model: ModelProto) -> int:
    return next((int(entry.version) for entry in model.opset_import if entry.domain in ("", "ai.onnx")), 0)


def few(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (", …" if len(names) > 5 else "") if names else "none"
