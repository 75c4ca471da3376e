"""Exported models for devices without PyTorch: a folder holds the graph, its weights and a manifest of both."""

import hashlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from baffle.core.arrays import F32
from baffle.core.state import FLOAT
from baffle.errors import ModelError
from baffle.files import read_file

MODEL, WEIGHTS, AVERAGE, MANIFEST, PLAN = (
    "model.onnx",
    "weights.safetensors",
    "average.safetensors",
    "manifest.json",
    "plan.toml",
)

X, Y, LOSS, LOGITS = "x", "y", "loss", "logits"
"""A graph's names for samples, labels, the mean loss and the model's output."""

WEIGHT = "weight/"
"""Prefix of a weight tensor's name as an input of the graph."""

KINDS: Mapping[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": FLOAT,
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "F8_E4M3": np.dtype("u1"),
    "F8_E5M2": np.dtype("u1"),
    "C64": np.dtype("<c8"),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U64": np.dtype("<u8"),
    "U32": np.dtype("<u4"),
    "U16": np.dtype("<u2"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}
"""The types of a safetensors file, and the NumPy type that holds each. NumPy has no bfloat16 and no 8-bit floats, so
unsigned integers hold their bits."""

METADATA = "__metadata__"
"""The only entry of a safetensors header that is not a tensor."""

MOST_HEADER_BYTES = 1 << 24
"""Of a safetensors header, or of a manifest: room for a hundred thousand tensors."""

MOST_BYTES = 1 << 33
"""Of a file of weights."""

InputType = Literal["float32", "int64", "int32"]
GraphLoss = Literal["cross-entropy", "mse", "mae", "bce", "none"]
CROSS_ENTROPY: GraphLoss = "cross-entropy"
NO_LOSS: GraphLoss = "none"
"""The loss that a graph holds. A function of the user's own is applied to the outputs of a graph without a loss."""

Size = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
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


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Describes a graph: its trained weights in the order of the flat vector, its samples and its files. `classes` is
    the number of its outputs (for each position, if there are several), `label_shape` the shape of one sample's label.
    `trajectory` is the digest of the plan that the weights belong to, `architecture` the digest of the plan's model.
    Without a plan both are empty."""

    format: Literal["baffle/model/1"] = "baffle/model/1"
    weights: tuple[Tensor, ...]
    n_weights: Annotated[int, Meta(ge=1)]
    dtype: Literal["float32"] = "float32"
    input_shape: tuple[Size, ...]
    input_dtype: InputType = "float32"
    classes: Annotated[int, Meta(ge=1)]
    label_shape: tuple[Size, ...] = ()
    loss: GraphLoss = CROSS_ENTROPY
    opset: int
    rounds: Size
    model_sha256: Digest
    weights_sha256: Digest
    trajectory: Annotated[str, Meta(pattern="^([0-9a-f]{64})?$")]
    architecture: Annotated[str, Meta(pattern="^([0-9a-f]{64})?$")] = ""

    def split(self, weights: F32) -> dict[str, F32]:
        """A view of the flat vector for each tensor."""
        if len(weights) != self.n_weights:
            raise ModelError(f"expected {self.n_weights} weights, got {len(weights)}; they belong to another model")
        views = dict[str, F32]()
        start = 0
        for tensor in self.weights:
            views[tensor.name] = weights[start : start + tensor.size].reshape(tensor.shape)
            start += tensor.size
        return views


def graph_loss(loss: str) -> GraphLoss:
    """What a graph must hold for a plan's `task.loss`."""
    names: dict[str, GraphLoss] = {"cross_entropy": CROSS_ENTROPY, "mse": "mse", "mae": "mae", "bce": "bce"}
    return names.get(loss, NO_LOSS)


class Stored(NamedTuple):
    """A tensor as a safetensors file holds it: `kind` is one of `KINDS`."""

    kind: str
    values: NDArray[Any]


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor's entry in the header of a safetensors file."""

    dtype: str
    shape: Annotated[tuple[Size, ...], Meta(max_length=64)]
    data_offsets: tuple[Size, Size]


def write_manifest(folder: Path, manifest: Manifest) -> None:
    (folder / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n")


def read_manifest(folder: Path) -> Manifest:
    """The manifest of an exported model, after checking that the graph beside it has the SHA-256 that it states."""
    try:
        manifest = msgspec.json.decode(read_file(folder / MANIFEST, MOST_HEADER_BYTES), type=Manifest)
        if not (folder / MODEL).is_file():
            raise OSError(f"{MODEL} is not a file")
        with (folder / MODEL).open("rb") as file:
            model_sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    except (OSError, ValueError, RecursionError, MemoryError) as fault:
        raise ModelError(
            f"{folder} holds no exported model ({fault}); expected a folder that `baffle export` made"
        ) from None
    if model_sha256 != manifest.model_sha256:
        raise ModelError(f"{folder / MODEL} is not the graph that {MANIFEST} describes; export or copy both again")
    if sum(tensor.size for tensor in manifest.weights) != manifest.n_weights:
        raise ModelError(f"{folder / MANIFEST}: shapes do not add up to {manifest.n_weights} weights; export it again")
    return manifest


def write_tensors(path: Path, tensors: Mapping[str, Stored]) -> None:
    """Write a safetensors file: the length of a JSON header, the header, then all numbers. Wide types come first, so
    that each tensor starts at a multiple of its item size, as readers that map the file into memory need."""
    ordered = sorted(tensors.items(), key=lambda named: -KINDS[named[1].kind].itemsize)
    header = dict[str, object]()
    end = 0
    for name, (kind, values) in ordered:
        start = end
        end += values.size * KINDS[kind].itemsize
        header[name] = {"dtype": kind, "shape": list(values.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, (kind, values) in ordered:
            file.write(values.astype(KINDS[kind]).tobytes())


def read_tensors(path: Path) -> dict[str, NDArray[Any]]:
    """All tensors of a safetensors file, by name. NumPy has no bfloat16, so such a tensor comes as uint16 bits, which
    `torch.from_numpy(bits).view(torch.bfloat16)` turns back into numbers. 8-bit floats come as uint8 in the same
    way."""
    return {name: stored.values for name, stored in read_stored(path).items()}


def read_stored(path: Path) -> dict[str, Stored]:
    """All tensors of a safetensors file, by name, with their types in the file."""
    try:
        return _parsed(path)
    except (OSError, ValueError, RecursionError, MemoryError) as fault:
        raise ModelError(f"{path} is not a sound safetensors file ({fault}); export or copy it again") from None


def read_weights(path: Path, manifest: Manifest) -> F32:
    """The flat vector of the trained weights, from a file that may hold other tensors too."""
    try:
        tensors = _parsed(path)
        for tensor in manifest.weights:
            if tensor.name not in tensors:
                raise ValueError(f"{tensor.name} is missing")
            kind, values = tensors[tensor.name]
            if (kind, values.shape) != ("F32", tensor.shape):
                raise ValueError(f"{tensor.name} is {kind} of shape {values.shape}")
    except (OSError, ValueError, RecursionError, MemoryError) as fault:
        raise ModelError(f"{path} does not hold this model's weights ({fault}); export or copy it again") from None
    return np.concatenate([tensors[tensor.name].values.reshape(-1) for tensor in manifest.weights]).astype(np.float32)


def _parsed(path: Path) -> dict[str, Stored]:
    """The tensors, as views into one buffer. Lengths are checked against the size of the file before there is memory
    for them."""
    if not path.is_file():
        raise OSError("it is not a file")
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if length > min(size - 8, MOST_HEADER_BYTES):
            raise ValueError(f"expected a header of at most {min(size - 8, MOST_HEADER_BYTES)} bytes, got {length}")
        if size > MOST_BYTES:
            raise ValueError(f"expected at most {MOST_BYTES:,} bytes, got {size:,}")
        entries = _entries(file.read(length))
        _require_cover(entries, size - 8 - length)
        body = np.empty(size - 8 - length, np.uint8)
        if file.readinto(body.data) != len(body):
            raise ValueError("it was cut short while it was read")
    return {name: Stored(entry.dtype, _values(name, entry, body)) for name, entry in entries.items()}


def _entries(header: bytes) -> dict[str, Entry]:
    texts = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
    msgspec.json.decode(texts.pop(METADATA, b"{}"), type=dict[str, str])
    entries = {name: msgspec.json.decode(text, type=Entry) for name, text in texts.items()}
    for name, entry in entries.items():
        if entry.dtype not in KINDS:
            raise ValueError(f"{name} has the unknown type {entry.dtype}")
        start, stop = entry.data_offsets
        if stop - start != math.prod(entry.shape) * KINDS[entry.dtype].itemsize:
            raise ValueError(f"{name} has {stop - start} bytes, too few or too many for its shape")
    return entries


def _require_cover(entries: Mapping[str, Entry], size: int) -> None:
    """Require that the tensors follow each other without gaps up to the end of the file."""
    end = 0
    for start, stop in sorted(entry.data_offsets for entry in entries.values()):
        if start != end:
            raise ValueError(f"a tensor begins at byte {start}, expected {end}")
        end = stop
    if end != size:
        raise ValueError(f"tensors end at byte {end}, expected {size}")


def _values(name: str, entry: Entry, body: NDArray[np.uint8]) -> NDArray[Any]:
    start, stop = entry.data_offsets
    raw = body[start:stop]
    if entry.dtype == "BOOL" and raw.size and raw.max() > 1:
        raise ValueError(f"{name} holds bytes that are neither true nor false")
    return raw.view(KINDS[entry.dtype]).reshape(entry.shape)
