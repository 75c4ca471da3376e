"""Models in ONNX files that another tool made. They keep their operators; their float initializers become inputs,
except for those that configure an operator and those that stay frozen."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
from onnx import GraphProto, ModelProto, TensorProto, ValueInfoProto, helper, numpy_helper

from baffle.core.samples import Shape, is_plain
from baffle.errors import ModelError
from baffle.runtime.onnx.graph import OnnxGraph, by_commas, few, finished, inputs_of
from baffle.runtime.onnx.graph_layers import layers_by_nodes
from baffle.runtime.onnx.model_file import nodes_of, read_model, translated
from baffle.runtime.onnx.model_folder import CROSS_ENTROPY, GraphLoss

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
"""Positions of operator inputs that are floats but not weights: running statistics, limits, scales."""


def graph_from_file(
    path: Path, freeze: Sequence[str] = (), shape: Shape = (), loss: GraphLoss = CROSS_ENTROPY
) -> OnnxGraph:
    """The graph of a model in an ONNX file. Weights whose names match a pattern in `freeze` are not trained. A
    graph that leaves sizes of its samples open is made for samples of `shape`."""
    model = read_model(path)
    with translated(path):
        if shape:
            _close_sizes(model.graph, shape)
        return _trainable(model, path, freeze, loss)


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
        if value.name in by_name:
            _close(value, by_name[value.name])


def _close(samples: ValueInfoProto, shape: Sequence[int]) -> None:
    dims = samples.type.tensor_type.shape.dim
    if len(dims) != len(shape) + 1 or any(
        d.dim_value not in (0, size) for d, size in zip(dims[1:], shape, strict=True)
    ):
        raise ModelError(
            f"--shape {by_commas(shape)}: the input {samples.name} has {helper.printable_type(samples.type)}; "
            "expected the sizes of one sample, without the batch"
        )
    for dim, size in zip(dims[1:], shape, strict=True):
        dim.dim_value = size


def _trainable(model: ModelProto, path: Path, freeze: Sequence[str], loss: GraphLoss) -> OnnxGraph:
    initializers = {tensor.name: tensor for tensor in model.graph.initializer}
    for pattern in freeze:
        if not any(fnmatch(name, pattern) for name in initializers):
            names = few(list(initializers))
            raise ModelError(f"--freeze {pattern}: no weight of {path} matches; it has {names}")
    untrained = set(_settings(model.graph))
    untrained |= {name for name in initializers if any(fnmatch(name, pattern) for pattern in freeze)}
    weights = {
        name: numpy_helper.to_array(tensor).astype(np.float32)
        for name, tensor in initializers.items()
        if tensor.data_type in FLOATS and tensor.dims and name not in untrained
    }
    return replace(finished(model, weights, loss=loss), layers=layers_by_nodes(model.graph, weights))


def _settings(graph: GraphProto) -> Iterator[str]:
    """Names of values that configure an operator, so are not weights."""
    for node in nodes_of(graph):
        positions = SETTINGS.get(node.op_type, ())
        yield from (name for position, name in enumerate(node.input) if position in positions)
