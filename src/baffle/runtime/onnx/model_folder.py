"""A model as it leaves for devices without PyTorch: a folder with its graph, its weights and a manifest of both."""

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec import Meta

from baffle.core.arrays import F32
from baffle.core.state import FLOAT
from baffle.errors import ModelError

MODEL, WEIGHTS, AVERAGE, MANIFEST, PLAN = (
    "model.onnx",
    "weights.safetensors",
    "average.safetensors",
    "manifest.json",
    "plan.toml",
)

X, Y, LOSS, LOGITS = "x", "y", "loss", "logits"
"""What a graph calls samples and labels, their mean loss and what the model says of each."""

WEIGHT = "weight/"
"""Before a tensor's name, where it is an input of the graph."""

InputType = Literal["float32", "int64", "int32"]
Size = Annotated[int, Meta(ge=0)]
Digest = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]


class Tensor(msgspec.Struct, frozen=True):
    """A weight tensor. It is the graph's input `WEIGHT + name`."""

    name: str
    shape: tuple[Size, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a graph is: its weights in the order of the flat vector, its samples, its files. `trajectory` names the plan
    that the weights belong to, and `architecture` the model in it; both are empty where there was none."""

    format: Literal["baffle/model/1"] = "baffle/model/1"
    weights: tuple[Tensor, ...]
    n_weights: Annotated[int, Meta(ge=1)]
    dtype: Literal["float32"] = "float32"
    input_shape: tuple[Size, ...]
    input_dtype: InputType = "float32"
    classes: Annotated[int, Meta(ge=1)]
    loss: Literal["cross-entropy"] = "cross-entropy"
    opset: int
    rounds: Size
    model_sha256: Digest
    weights_sha256: Digest
    trajectory: Annotated[str, Meta(pattern="^([0-9a-f]{64})?$")]
    architecture: Annotated[str, Meta(pattern="^([0-9a-f]{64})?$")] = ""

    def split(self, weights: F32) -> dict[str, F32]:
        """Each tensor as a view into the flat vector."""
        if len(weights) != self.n_weights:
            raise ModelError(f"expected {self.n_weights} weights, got {len(weights)}; they belong to another model")
        views, start = dict[str, F32](), 0
        for tensor in self.weights:
            views[tensor.name] = weights[start : start + tensor.size].reshape(tensor.shape)
            start += tensor.size
        return views


def write_manifest(folder: Path, manifest: Manifest) -> None:
    (folder / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n")


def read_manifest(folder: Path) -> Manifest:
    """The manifest of an exported model, once it is sure that the graph beside it is the one it tells of."""
    try:
        manifest = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Manifest)
        with (folder / MODEL).open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as fault:
        raise ModelError(
            f"{folder} holds no exported model ({fault}); expected a folder that `baffle export` made"
        ) from None
    if found != manifest.model_sha256:
        raise ModelError(f"{folder / MODEL} is not the graph that {MANIFEST} tells of; export or copy both again")
    if sum(tensor.size for tensor in manifest.weights) != manifest.n_weights:
        raise ModelError(f"{folder / MANIFEST}: shapes do not add up to {manifest.n_weights} weights; export it again")
    return manifest


def write_tensors(path: Path, tensors: Mapping[str, F32]) -> None:
    """A file in the safetensors format: the length of a JSON header, the header, then all numbers."""
    header, end = dict[str, object](), 0
    for name, values in tensors.items():
        start, end = end, end + values.size * FLOAT.itemsize
        header[name] = {"dtype": "F32", "shape": list(values.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for values in tensors.values():
            file.write(values.astype(FLOAT).tobytes())


def read_weights(path: Path, manifest: Manifest) -> F32:
    """The flat weight vector from a file of these tensors."""
    try:
        raw = path.read_bytes()
        start = 8 + int.from_bytes(raw[:8], "little")
        header, body = json.loads(raw[8:start]), raw[start:]
        parts = list[F32]()
        for tensor in manifest.weights:
            entry = header[tensor.name]
            if (entry["dtype"], tuple(entry["shape"])) != ("F32", tensor.shape):
                raise ValueError(f"{tensor.name} is {entry['dtype']} of shape {entry['shape']}")
            first, last = entry["data_offsets"]
            part = np.frombuffer(body[first:last], FLOAT)
            if len(part) != tensor.size:
                raise ValueError(f"{tensor.name} has {len(part)} numbers")
            parts.append(part.astype(np.float32))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as fault:
        raise ModelError(f"{path} does not hold this model's weights ({fault}); export or copy it again") from None
    return np.concatenate(parts)
