"""Reads and writes files of tensors in the safetensors format. Files are untrusted, so sizes are checked first."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from baffle.core.state import FLOAT
from baffle.errors import ModelError

KINDS: Mapping[str, np.dtype[Any]] = {
    **{"F64": np.dtype("<f8"), "F32": FLOAT, "F16": np.dtype("<f2"), "C64": np.dtype("<c8"), "BOOL": np.dtype("?")},
    **{f"{sign}{8 * size}": np.dtype(f"<{sign.lower()}{size}") for sign in "IU" for size in (1, 2, 4, 8)},
    **{"BF16": np.dtype("<u2"), "F8_E4M3": np.dtype("u1"), "F8_E5M2": np.dtype("u1")},
}
"""The types of a safetensors file, and the NumPy type that holds each. NumPy has no bfloat16 and no 8-bit floats, so
unsigned integers hold their bits."""

METADATA = "__metadata__"  # the only entry of a safetensors header that is not a tensor

MOST_HEADER_BYTES = 1 << 24
"""The most bytes of a safetensors header or of a manifest: room for a hundred thousand tensors."""

MOST_BYTES = 1 << 33  # the most bytes of a file of weights

Size = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


class Stored(NamedTuple):
    """A tensor as a safetensors file holds it: `kind` is one of `KINDS`."""

    kind: str
    values: NDArray[Any]


class TensorEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor's entry in the header of a safetensors file."""

    dtype: str
    shape: Annotated[tuple[Size, ...], Meta(max_length=64)]
    data_offsets: tuple[Size, Size]


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
    `torch.from_numpy(bits).view(torch.bfloat16)` turns back into numbers. 8-bit floats come as uint8."""
    return {name: stored.values for name, stored in read_stored(path).items()}


def read_stored(path: Path) -> dict[str, Stored]:
    """All tensors of a safetensors file, by name, with their types in the file."""
    try:
        return parse_tensors(path)
    except (OSError, ValueError, RecursionError, MemoryError) as fault:
        raise ModelError(f"{path} is not a sound safetensors file ({fault}); export or copy it again") from None


def parse_tensors(path: Path) -> dict[str, Stored]:
    """The tensors, as views into one buffer. Lengths are checked before there is memory for them."""
    if not path.is_file():
        raise OSError("it is not a file")
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if length > min(size - 8, MOST_HEADER_BYTES):
            raise ValueError(f"expected a header of at most {min(size - 8, MOST_HEADER_BYTES)} bytes, got {length}")
        if size > MOST_BYTES:
            raise ValueError(f"expected at most {MOST_BYTES:,} bytes, got {size:,}")
        entries = _entries(file.read(length), size - 8 - length)
        body = np.empty(size - 8 - length, np.uint8)
        if file.readinto(body.data) != len(body):
            raise ValueError("it was cut short while it was read")
    tensors = dict[str, Stored]()
    for name, entry in entries.items():
        raw = body[slice(*entry.data_offsets)]
        if entry.dtype == "BOOL" and raw.size and raw.max() > 1:
            raise ValueError(f"{name} holds bytes that are neither true nor false")
        tensors[name] = Stored(entry.dtype, raw.view(KINDS[entry.dtype]).reshape(entry.shape))
    return tensors


def _entries(header: bytes, size: int) -> dict[str, TensorEntry]:
    """The entries of a header, whose tensors must follow each other without gaps up to the end of the file."""
    texts = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
    msgspec.json.decode(texts.pop(METADATA, b"{}"), type=dict[str, str])
    entries = {name: msgspec.json.decode(text, type=TensorEntry) for name, text in texts.items()}
    for name, entry in entries.items():
        if entry.dtype not in KINDS:
            raise ValueError(f"{name} has the unknown type {entry.dtype}")
        start, stop = entry.data_offsets
        if stop - start != math.prod(entry.shape) * KINDS[entry.dtype].itemsize:
            raise ValueError(f"{name} has {stop - start} bytes, too few or too many for its shape")
    end = 0
    for start, stop in sorted(entry.data_offsets for entry in entries.values()):
        if start != end:
            raise ValueError(f"a tensor begins at byte {start}, expected {end}")
        end = stop
    if end != size:
        raise ValueError(f"tensors end at byte {end}, expected {size}")
    return entries
