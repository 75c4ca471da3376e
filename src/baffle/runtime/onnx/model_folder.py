"""Exported models for devices without PyTorch: a folder holds the graph, its weights and a manifest of both."""

import math
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import msgspec
import numpy as np
from msgspec import UNSET, Meta, UnsetType

from baffle.core.arrays import F32
from baffle.core.directions import Support
from baffle.core.head import Head
from baffle.core.samples import Shape, is_plain
from baffle.core.state import FLOAT
from baffle.errors import ModelError, NoHeadError
from baffle.files import read_file
from baffle.runtime.model import layer_of, layers_of
from baffle.runtime.onnx.tensor_file import MOST_HEADER_BYTES, Size, parse_tensors

MODEL, WEIGHTS, AVERAGE = "model.onnx", "weights.safetensors", "average.safetensors"
MANIFEST, PLAN = "manifest.json", "plan.toml"

MOST_BYTES = 1 << 31  # the most bytes of an ONNX file, which is protobuf's limit

X, Y, LOSS, LOGITS, HEAD_INPUTS, HEAD_OUTPUTS = "x", "y", "loss", "logits", "head/inputs", "head/outputs"
"""A graph's names for samples, labels, the mean loss, the model's output, and what its last linear layer takes and
gives."""

WEIGHT = "weight/"  # prefix of a weight tensor's name as an input of the graph

InputType = Literal["float32", "int64", "int32", "uint8", "int8", "bool"]
GraphLoss = Literal["cross-entropy", "mse", "mae", "bce", "none"]
CROSS_ENTROPY: GraphLoss = "cross-entropy"
NO_LOSS: GraphLoss = "none"
"""The loss that a graph holds, as its manifest spells it. Others are taken of the outputs of a graph without one."""

GRAPH_LOSSES: Mapping[str, GraphLoss] = {"cross_entropy": CROSS_ENTROPY, "mse": "mse", "mae": "mae", "bce": "bce"}
"""Losses that a graph can hold, by their names in a plan."""

Digest = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]


class Tensor(msgspec.Struct, frozen=True, omit_defaults=True):
    """A trained weight tensor, which is the graph's input `WEIGHT + name`. A module that uses the tensor in several
    places has more names for it in its state dict; `also` holds these. Tensors of one layer have the same `layer`; if
    it is empty, the tensor's name says it."""

    name: str
    shape: tuple[Size, ...]
    also: tuple[str, ...] = ()
    layer: str = ""

    @property
    def size(self) -> int:
        return math.prod(self.shape)


class Input(msgspec.Struct, frozen=True):
    """One of the arrays that a sample consists of. The only one has no name."""

    name: str
    shape: tuple[Size, ...]
    dtype: InputType = "float32"

    @property
    def in_graph(self) -> str:
        """Its name as an input of the graph."""
        return f"{X}/{self.name}" if self.name else X


class HeadTensors(msgspec.Struct, frozen=True, omit_defaults=True):
    """The names of a last linear layer's tensors. W has a row for each output, unless it is stored `by_input`."""

    weight: str
    bias: str = ""
    by_input: bool = False


Format = Literal["baffle/model/1", "baffle/model/2"]
ONE_ARRAY: Format = "baffle/model/1"
SEVERAL_ARRAYS: Format = "baffle/model/2"
"""Formats of a manifest. Versions that know the first alone refuse a graph whose samples are several arrays."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Describes a graph: its trained weights in the order of the flat vector, its samples and its files. `inputs` are
    the arrays of a sample if there are several; `input_shape` and `input_dtype` describe the only one. `classes` is
    the number of its outputs (for each position, if there are several), `label_shape` the shape of one sample's label.
    `trajectory` is the digest of the plan that the weights belong to, `architecture` the digest of the plan's model.
    Without a plan both are empty. `head` is the last linear layer, if the graph has its inputs and outputs among its
    outputs. `instead_of` is the digest of another graph with the same weights, for whose plans this one may serve: the
    same model with a backbone of integers. `outer` described a second graph, `outer.onnx`, in folders of version 0.2;
    it is ignored, and null in new manifests."""

    format: Format = ONE_ARRAY
    weights: tuple[Tensor, ...]
    n_weights: Annotated[int, Meta(ge=1)]
    dtype: Literal["float32"] = "float32"
    input_shape: tuple[Size, ...]
    input_dtype: InputType = "float32"
    inputs: tuple[Input, ...] = ()
    classes: Annotated[int, Meta(ge=1)]
    label_shape: tuple[Size, ...] = ()
    loss: GraphLoss = CROSS_ENTROPY
    opset: int
    rounds: Size
    model_sha256: Digest
    weights_sha256: Digest
    trajectory: Annotated[str, Meta(pattern="^([0-9a-f]{64})?$")]
    architecture: Annotated[str, Meta(pattern="^([0-9a-f]{64})?$")] = ""
    outer: dict[str, str | int] | None = None
    head: HeadTensors | None = None
    instead_of: Digest | UnsetType = UNSET

    def head_place(self) -> Head:
        """Where the last linear layer lies among the weights."""
        stops = np.cumsum([tensor.size for tensor in self.weights]).tolist()
        places = {each.name: (stop - each.size, stop) for each, stop in zip(self.weights, stops, strict=True)}
        places[""] = (0, 0)  # that of a bias that there is not
        if self.head is None or not {self.head.weight, self.head.bias} <= places.keys():
            raise NoHeadError("the graph does not show its last linear layer")
        return Head(places[self.head.weight], places[self.head.bias], self.head.by_input)

    def layers(self) -> tuple[Support, ...]:
        """The slices of each layer."""
        return layers_of((tensor.layer or layer_of(tensor.name), tensor.size) for tensor in self.weights)

    @property
    def arrays(self) -> tuple[Input, ...]:
        """The arrays of a sample."""
        return self.inputs or (Input("", self.input_shape, self.input_dtype),)

    @property
    def shape(self) -> Shape:
        """The shape of one sample."""
        return {wanted.name: wanted.shape for wanted in self.inputs} if self.inputs else self.input_shape

    def takes(self, shape: Shape) -> bool:
        """Whether samples of this shape fit: one array, several in order, or several by name."""
        if isinstance(shape, dict):
            return shape == {wanted.name: wanted.shape for wanted in self.arrays}
        several = (shape,) if is_plain(shape) else shape
        return several == tuple(wanted.shape for wanted in self.arrays)

    @property
    def sample(self) -> str:
        """What a sample looks like, for messages."""
        named = [f"{wanted.name} of shape {wanted.shape}" for wanted in self.inputs]
        return ", ".join(named) if named else f"shape {self.input_shape}"

    def split(self, weights: F32) -> dict[str, F32]:
        """A view of the flat vector for each tensor."""
        if len(weights) != self.n_weights:
            raise ModelError(f"expected {self.n_weights} weights, got {len(weights)}; they belong to another model")
        parts = np.split(weights, np.cumsum([tensor.size for tensor in self.weights])[:-1])
        return {tensor.name: part.reshape(tensor.shape) for tensor, part in zip(self.weights, parts, strict=True)}


def graph_loss(loss: str) -> GraphLoss:
    """What a graph must hold for a plan's `task.loss`."""
    return GRAPH_LOSSES.get(loss, NO_LOSS)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    (folder / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n")


class ExportedModel(NamedTuple):
    """What an exported folder holds, read once: what runs is what was hashed. `sha256` is the manifest's. The manifest
    names the hashes of graph and weights, so that one hash stands for the three."""

    manifest: Manifest
    graph: bytes
    sha256: str


def read_exported(folder: Path) -> ExportedModel:
    """An exported model, whose graph must be the one that its manifest names."""
    try:
        text = read_file(folder / MANIFEST, MOST_HEADER_BYTES)
        manifest, graph = msgspec.json.decode(text, type=Manifest), read_file(folder / MODEL, MOST_BYTES)
    except (OSError, ValueError, RecursionError, MemoryError) as fault:
        raise ModelError(
            f"{folder} holds no exported model ({fault}); expected a folder that `baffle export` made"
        ) from None
    if sha256(graph).hexdigest() != manifest.model_sha256:
        raise ModelError(f"{folder / MODEL} is not the graph that {MANIFEST} describes; export or copy both again")
    names = [wanted.name for wanted in manifest.inputs]
    if (manifest.format == SEVERAL_ARRAYS) != (len(names) > 1) or len(set(names)) != len(names) or "" in names:
        raise ModelError(f"{folder / MANIFEST}: its inputs do not suit the format {manifest.format}; export it again")
    if sum(tensor.size for tensor in manifest.weights) != manifest.n_weights:
        raise ModelError(f"{folder / MANIFEST}: shapes do not add up to {manifest.n_weights} weights; export it again")
    return ExportedModel(manifest, graph, sha256(text).hexdigest())


def read_manifest(folder: Path) -> Manifest:
    """The manifest of an exported model, after the same checks."""
    return read_exported(folder).manifest


def initial_weights(folder: Path, manifest: Manifest) -> F32:
    """The weights that an exported folder begins with, which must be those that its manifest names."""
    weights = read_weights(folder / WEIGHTS, manifest)
    if sha256(weights.astype(FLOAT).tobytes()).hexdigest() != manifest.weights_sha256:
        raise ModelError(
            f"{folder / WEIGHTS} does not hold the weights that {MANIFEST} names; export or copy both again"
        )
    return weights


def read_weights(path: Path, manifest: Manifest) -> F32:
    """The flat vector of the trained weights, from a file that may hold other tensors too."""
    try:
        tensors = parse_tensors(path)
        for tensor in manifest.weights:
            if tensor.name not in tensors:
                raise ValueError(f"{tensor.name} is missing")
            kind, values = tensors[tensor.name]
            if (kind, values.shape) != ("F32", tensor.shape):
                raise ValueError(f"{tensor.name} is {kind} of shape {values.shape}")
    except (OSError, ValueError, RecursionError, MemoryError) as fault:
        raise ModelError(f"{path} does not hold this model's weights ({fault}); export or copy it again") from None
    return np.concatenate([tensors[tensor.name].values.reshape(-1) for tensor in manifest.weights]).astype(np.float32)
