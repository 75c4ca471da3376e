"""Models in ONNX files that another tool made. They keep their operators; their float initializers become inputs,
except for those that configure an operator and those that stay frozen. Integers stay frozen, unless they become floats
(quantised.py)."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from fnmatch import fnmatch
from glob import escape
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from onnx import GraphProto, ModelProto, TensorProto, helper, numpy_helper

from baffle.core.arrays import F32
from baffle.core.samples import Shape, is_plain
from baffle.errors import BaffleError, ModelError, PlanError
from baffle.runtime.onnx.finishing import few, finished, inputs_of, read_model, reading
from baffle.runtime.onnx.graph import OnnxGraph
from baffle.runtime.onnx.masks import MASK, NONZERO, with_masks, without_masks, zeros_of
from baffle.runtime.onnx.model_folder import (
    CROSS_ENTROPY,
    LOGITS,
    WEIGHT,
    GraphLoss,
    Manifest,
    initial_weights,
    read_exported,
    read_manifest,
)
from baffle.runtime.onnx.nodes import computing, copy_of, nodes_of, replace_all
from baffle.runtime.onnx.quantised import (
    FACTOR,
    INTEGERS,
    scales_of,
    settings_of,
    with_factors,
    with_float_head,
    with_integers,
    without_factors,
)

FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16)

SETTINGS = {
    **{"BatchNormalization": (3, 4), "Clip": (1, 2), "Pad": (2,), "Pow": (1,), "Resize": (1, 2), "Upsample": (1,)},
}
"""Positions of operator inputs that are floats but not weights: running statistics, limits, scales of a size."""

ALL, HEAD, SCALES, KEPT = "all", "head", "scales", "nonzero"
"""What may be trained, beside names of weights; and that zeros stay zero."""


def graph_from_file(
    path: Path,
    freeze: Sequence[str] = (),
    shape: Shape = (),
    loss: GraphLoss = CROSS_ENTROPY,
    *,
    head: bool = False,
    output: str = "",
    train: Sequence[str] = (ALL,),
) -> OnnxGraph:
    """The graph of a model in an ONNX file. It trains what `train` says: "all" weights that are floats, those of the
    "last" layer, those of the "head", a last linear layer, which may be of integers, a factor for each of the "scales"
    of integers, or those whose names match patterns; and none whose names match a pattern in `freeze`. Zeros stay zero
    if "nonzero" is among them. A graph that leaves sizes of its samples open is made for samples of `shape`. With
    `head`, it shows what its last linear layer takes and gives. Of several outputs it keeps `output`, or the only one
    that holds floats: a classifier's labels, which scikit-learn's models give too, follow from its numbers."""
    model = read_model(path)
    with reading(path):
        model = _prepared(model, shape, output, Rewritten(HEAD in train, SCALES in train))
        names = _chosen(model, train, loss) - _frozen(model, path, freeze)
        if KEPT in train:
            model = with_masks(model, names)
            names = {name + NONZERO if name + NONZERO in _names(model) else name for name in names}
        if not names:
            _refuse_integers(model, path)
        return _trainable(model, names, loss, head=head)


def _with_one_output(model: ModelProto, wanted: str) -> ModelProto:
    outputs = {value.name: value.type.tensor_type.elem_type for value in model.graph.output}
    if wanted and wanted not in outputs:
        raise ModelError(f"--output {wanted}: the model has no such output; it has {few(list(outputs))}")
    floats = [name for name, kind in outputs.items() if kind in FLOATS]
    chosen = wanted or (floats[0] if len(floats) == 1 else "")
    return computing(model, chosen) if chosen and len(outputs) > 1 else model


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


class Rewritten(NamedTuple):
    """What of a file's model was turned into floats, and which of its weights have masks."""

    head: bool = False
    scales: bool = False
    masks: Collection[str] = ()


def _prepared(model: ModelProto, shape: Shape, output: str, how: Rewritten) -> ModelProto:
    """The model with one output and samples of this shape, rewritten."""
    model = _with_one_output(model, output)
    if shape:
        _close_sizes(model.graph, shape)
    return _rewrite(model, model.graph.output[0].name, how)


def _rewrite(model: ModelProto, output: str, how: Rewritten) -> ModelProto:
    if how.head:
        model = with_float_head(model, output)
    if how.scales:
        model = with_factors(model)
    return with_masks(model, how.masks) if how.masks else model


def _names(model: ModelProto) -> set[str]:
    return {tensor.name for tensor in model.graph.initializer}


def _settings(model: ModelProto) -> set[str]:
    """The values that set an operator, scale its integers or mask its weights."""
    found = {
        name
        for node in nodes_of(model.graph)
        for position, name in enumerate(node.input)
        if position in SETTINGS.get(node.op_type, settings_of(node))
    }
    return found | scales_of(model).keys() | {name for name in _names(model) if name.endswith(MASK)}


def _floats(model: ModelProto) -> list[str]:
    """The weights of a model that are floats."""
    tensors, others = model.graph.initializer, _settings(model)
    return [each.name for each in tensors if each.data_type in FLOATS and each.dims and each.name not in others]


def _chosen(model: ModelProto, train: Sequence[str], loss: GraphLoss) -> set[str]:
    """The names of what is trained."""
    factors = {name for name in _names(model) if name.endswith(FACTOR)}
    floats = [name for name in _floats(model) if name not in factors]
    chosen = set[str]()
    for wanted in (ALL,) if list(train) == [KEPT] else train:
        if wanted == ALL:
            chosen.update(floats)
        elif wanted == KEPT:
            continue
        elif wanted == SCALES:
            if not factors:
                raise PlanError("train: the model has no scales of integers; expected one that was quantised")
            chosen |= factors
        elif wanted == HEAD:
            tensors = _trainable(model, floats, loss, head=True).head
            chosen |= {tensors.weight, tensors.bias} - {""} if tensors else set()
        elif wanted == "last" and floats:
            layer = floats[-1].rpartition(".")[0] or floats[-1]
            chosen |= {name for name in floats if name == floats[-1] or fnmatch(name, f"{escape(layer)}.*")}
        elif fitting := {name for name in floats if fnmatch(name, wanted)}:
            chosen |= fitting
        elif floats:
            raise PlanError(
                f'train: no weight of the model fits {wanted!r}; expected "all", "last", "head", "scales", "nonzero" '
                f"or patterns of names such as {floats[-1]!r}"
            )
    return chosen


def _frozen(model: ModelProto, path: Path, freeze: Sequence[str]) -> set[str]:
    names = [tensor.name for tensor in model.graph.initializer]
    for pattern in freeze:
        if not any(fnmatch(name, pattern) for name in names):
            raise ModelError(f"--freeze {pattern}: no weight of {path} matches; it has {few(names)}")
    return {name for name in names if any(fnmatch(name, pattern) for pattern in freeze)}


def _refuse_integers(model: ModelProto, path: Path) -> None:
    """Say what of a model without floats can be trained."""
    if scales_of(model):
        raise ModelError(
            f"the weights of {path} are integers, which stay as they are; train its last linear layer as floats with "
            'train="head", a factor for each scale with train="scales", or both (baffle export: --train head)'
        )


def _trainable(model: ModelProto, names: Collection[str], loss: GraphLoss, *, head: bool) -> OnnxGraph:
    weights = {
        tensor.name: numpy_helper.to_array(tensor).astype(np.float32)
        for tensor in model.graph.initializer
        if tensor.name in names
    }
    return replace(finished(model, weights, loss=loss, head=head), layers=layers_by_nodes(model.graph, weights))


def numbers_of(graph: bytes) -> tuple[int, int]:
    """How many numbers the weights inside a graph are, without scales and running statistics; and how many of those
    that are trained stay zero."""
    model = ModelProto.FromString(graph)
    others, kinds = _settings(model), (*FLOATS, *INTEGERS, TensorProto.INT32)
    sizes = [each.dims for each in model.graph.initializer if each.data_type in kinds and each.name not in others]
    return sum(prod(dims) for dims in sizes if dims), zeros_of(model)


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
        vectors = all(weights[name].size == max(weights[name].shape, default=1) for name in used)
        added_to = [layer_behind[name] for name in node.input if name in layer_behind and node.op_type == "Add"]
        layer = added_to[0] if vectors and added_to else layers.get(used[0], used[0])
        for name in used:
            layers.setdefault(name, layer)
        layer_behind |= dict.fromkeys(node.output, layer)
    return {name: layers.get(name, name) for name in weights}


def graph_beside(path: Path, folder: Path, output: str = "") -> OnnxGraph:
    """The graph of a model in an ONNX file with the trained weights of an exported folder: in their order, with their
    values. A client may run it in place of the folder's, with other frozen parts: those of integers."""
    manifest, model = read_manifest(folder), read_model(path)
    names = [tensor.name for tensor in manifest.weights]
    with reading(path):
        model = _prepared(model, manifest.shape, output, _rewritten(model, names))
        found = {tensor.name: tuple(tensor.dims) for tensor in model.graph.initializer}
        for tensor in manifest.weights:
            if found.get(tensor.name) != tensor.shape:
                raise ModelError(
                    f"--beside {folder}: its model trains {tensor.name} of shape {tensor.shape}, {path} has "
                    f"{found.get(tensor.name, 'none of that name')}; leave the layers that are trained out of the "
                    "quantisation (nodes_to_exclude)"
                )
        graph = _trainable(model, names, manifest.loss, head=manifest.head is not None)
    if (graph.inputs, graph.label_shape, graph.head) != (manifest.arrays, manifest.label_shape, manifest.head):
        raise ModelError(f"--beside {folder}: its model takes other samples or ends otherwise than that of {path}")
    weights = manifest.split(initial_weights(folder, manifest))
    layers = {tensor.name: tensor.layer for tensor in manifest.weights if tensor.layer}
    return replace(graph, weights=weights, layers=layers, instead_of=manifest.model_sha256)


def require_file(path: Path, manifest: Manifest) -> str:
    """The output of an ONNX file that an exported graph has. Refuses any other file than that of which it was made,
    whose trained weights may differ."""
    trained, model = [tensor.name for tensor in manifest.weights], read_model(path)

    def made(output: str) -> bytes:
        with suppress(BaffleError):
            whole = _prepared(copy_of(model), manifest.shape, output, _rewritten(model, trained))
            return _trainable(whole, trained, manifest.loss, head=manifest.head is not None).model
        return b""

    for output in ("", *(value.name for value in model.graph.output)):
        if sha256(made(output)).hexdigest() == manifest.model_sha256:
            return output or str(_with_one_output(model, "").graph.output[0].name)
    raise ModelError(f"model: {path} is not the run's model, but another graph; give the one that the run began with")


def _rewritten(model: ModelProto, trained: Collection[str]) -> Rewritten:
    """How a file's model was rewritten, if these are the names of the trained weights."""
    own = _names(model)
    factors = {name for name in trained if name.endswith(FACTOR)} - own
    masked = {name for name in trained if name.endswith(NONZERO)} - own
    masks = {name.removesuffix(NONZERO) for name in masked}
    return Rewritten(not own | factors | masked >= {*trained} or not own >= masks, bool(factors), masks)


def file_with_weights(path: Path, manifest: Manifest, weights: F32, *, int8: bool = False) -> ModelProto:
    """The model in an ONNX file with these weights, and otherwise unchanged. The manifest's graph was made from it.
    With `int8`, a last linear layer that was of integers is again."""
    output, model, trained = require_file(path, manifest), read_model(path), manifest.split(weights)
    own, how = _names(model), _rewritten(model, trained)
    model = _rewrite(model, output, how)
    for tensor in model.graph.initializer:
        if tensor.name in trained:
            kind = numpy_helper.to_array(tensor).dtype
            tensor.CopyFrom(numpy_helper.from_array(trained[tensor.name].astype(kind), tensor.name))
    if how.masks:
        model = without_masks(model)
    if how.scales:
        model = without_factors(model)
    return with_integers(model, _names(model) - own) if int8 else model


def graph_with_weights(folder: Path, weights: F32) -> ModelProto:
    """The graph in an exported folder with weights inside: from samples, `x` or `x/…` each, to outputs, `logits`."""
    manifest, graph, _ = read_exported(folder)
    with reading(folder):
        model = computing(ModelProto.FromString(graph), LOGITS)
    trained = manifest.split(weights)
    model.graph.initializer.extend(numpy_helper.from_array(values, WEIGHT + name) for name, values in trained.items())
    samples = {wanted.in_graph for wanted in manifest.arrays}
    replace_all(model.graph.input, [value for value in model.graph.input if value.name in samples])
    return model
