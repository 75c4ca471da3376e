"""ONNX models as bytes, written and checked without the `onnx` package, which clients do not have.

ONNX files are protobuf messages. Numbers of fields and types are those of onnx.proto.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from struct import pack

import numpy as np
from numpy.typing import NDArray

from baffle.errors import ModelError

FLOAT, INT64, DOUBLE = 1, 7, 11
"""Types of tensors."""

KINDS = {"float32": FLOAT, "int64": INT64, "float64": DOUBLE}

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5  # how a field is stored
MOST_DEPTH = 64  # messages inside messages; branches and loops in each other reach a third of this
LARGEST_TAG = (1 << 32) - 1

Attribute = int | float | str | bytes | Sequence[int]  # bytes are a tensor
Shape = Iterable[int | str | None]  # sizes of a tensor: a number, a name, or unknown


def message(*fields: tuple[int, int | float | bytes | str]) -> bytes:
    """A message of fields, each with its number."""
    return b"".join(_field(number, value) for number, value in fields)


def _field(number: int, value: float | bytes | str) -> bytes:
    if isinstance(value, int):
        return _varint(number << 3 | VARINT) + _varint(value)
    if isinstance(value, float):
        return _varint(number << 3 | FIXED32) + pack("<f", value)
    data = value.encode() if isinstance(value, str) else value
    return _varint(number << 3 | BYTES) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    """Seven bits a byte, the lowest first. Negative numbers are those of 64 bits."""
    value &= (1 << 64) - 1
    digits = bytearray()
    while value > 127:
        digits.append(value & 127 | 128)
        value >>= 7
    return bytes([*digits, value])


def node(
    operator: str, inputs: Sequence[str], outputs: Sequence[str], name: str | None = None, /, **attributes: Attribute
) -> bytes:
    ends: list[tuple[int, str]] = [*((1, value) for value in inputs), *((2, value) for value in outputs)]
    named = ends if name is None else [*ends, (3, name)]
    return message(*named, (4, operator), *((5, _attribute(*each)) for each in sorted(attributes.items())))


def _attribute(name: str, value: Attribute) -> bytes:
    match value:
        case float():
            return message((1, name), (2, value), (20, 1))
        case int():
            return message((1, name), (3, value), (20, 2))
        case str():
            return message((1, name), (4, value), (20, 3))
        case bytes():
            return message((1, name), (5, value), (20, 4))
        case _:
            return message((1, name), *((8, int(number)) for number in value), (20, 7))


def tensor(name: str, values: "NDArray[np.float32 | np.float64 | np.int64]") -> bytes:
    raw = values.astype(values.dtype.newbyteorder("<")).tobytes()
    sizes = [(1, size) for size in values.shape]
    return message(*sizes, (2, KINDS[values.dtype.name]), (8, name), (9, raw))


def described(name: str, kind: int, shape: Shape) -> bytes:
    """An input or output of a graph."""
    sizes = (message() if size is None else message((1 if isinstance(size, int) else 2, size)) for size in shape)
    tensor_type = message((1, kind), (2, message(*((1, size) for size in sizes))))
    return message((1, name), (2, message((1, tensor_type))))


def model(
    nodes: Iterable[bytes],
    constants: Iterable[bytes],
    inputs: Iterable[bytes],
    outputs: Iterable[bytes],
    *,
    opset: int,
    ir_version: int,
) -> bytes:
    parts = {1: nodes, 5: constants, 11: inputs, 12: outputs}
    graph = [(number, part) for number, repeated in parts.items() for part in repeated]
    named = sorted([*graph, (2, b"model")], key=lambda field: field[0])
    return message((1, ir_version), (7, message(*named)), (8, message((1, ""), (2, opset))))


PARTS: Mapping[str, Mapping[int, str]] = {
    "ModelProto": {7: "GraphProto", 20: "TrainingInfoProto", 25: "FunctionProto"},
    "TrainingInfoProto": {1: "GraphProto", 2: "GraphProto"},
    "FunctionProto": {7: "NodeProto", 11: "AttributeProto"},
    "GraphProto": {1: "NodeProto", 5: "TensorProto", 15: "SparseTensorProto"},
    "NodeProto": {5: "AttributeProto"},
    "AttributeProto": {
        **{5: "TensorProto", 6: "GraphProto", 10: "TensorProto", 11: "GraphProto"},
        **{22: "SparseTensorProto", 23: "SparseTensorProto"},
    },
    "SparseTensorProto": {1: "TensorProto", 2: "TensorProto"},
    "TensorProto": {},
}
"""The fields of each message that hold tensors, or messages with tensors inside."""

ELSEWHERE = (13, 14)  # the fields of a tensor that say where else its numbers are


def require_whole(data: bytes) -> None:
    """Refuse a model that takes numbers from anywhere but its own bytes. Whatever the bytes are, this ends soon, or
    with a ModelError."""
    _require_whole(memoryview(data), "ModelProto", 0)


def _require_whole(data: memoryview, kind: str, depth: int) -> None:
    if depth > MOST_DEPTH:
        raise ModelError(f"the graph has parts in more than {MOST_DEPTH} others; expected a graph that `baffle` made")
    for number, value in read_fields(data):
        if kind == "TensorProto" and number in ELSEWHERE and value != 0:
            raise ModelError("the graph takes numbers from other files, whose bytes no hash covers; export it again")
        if (inner := PARTS[kind].get(number)) and not isinstance(value, int):
            _require_whole(value, inner, depth + 1)


def read_fields(data: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """The fields of a message, each with its number. Readers cut a number that is too large, so that none is taken
    here: to them it would be another field."""
    at = 0
    while at < len(data):
        tag, at = _read_varint(data, at)
        if tag > LARGEST_TAG:
            raise ModelError("the graph is damaged: a field's number is too large; copy it again")
        kind = tag & 7
        if kind == VARINT:
            value, at = _read_varint(data, at)
            yield tag >> 3, value
            continue
        if kind == BYTES:
            size, at = _read_varint(data, at)
        elif kind in (FIXED32, FIXED64):
            size = 4 if kind == FIXED32 else 8
        else:
            raise ModelError("the graph is damaged: a field is stored in no known way; copy it again")
        if at + size > len(data):
            raise ModelError("the graph is damaged: it ends within a field; copy it again")
        yield tag >> 3, data[at : at + size]
        at += size


def _read_varint(data: memoryview, at: int) -> tuple[int, int]:
    """A number, and where it ends."""
    value = 0
    for place, byte in enumerate(data[at : at + 10]):
        value |= (byte & 127) << 7 * place
        if byte < 128:
            return value, at + place + 1
    raise ModelError("the graph is damaged: it ends within a number; copy it again")
