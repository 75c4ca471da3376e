"""Pickled batches of CIFAR, read without running any code in them.

A pickle is a program that may call any function. Here it can call none: the three names of NumPy that an array needs
stand for the two records below, and every other name is refused.
"""

import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from baffle.core.arrays import U8
from baffle.data.files import damaged, read_file
from baffle.errors import DataError


class _Record:
    """What a pickle describes: the arguments of a call that is not made, and the state that would be set."""

    __slots__ = ("arguments", "state")

    arguments: tuple[Any, ...]
    state: Any

    def __init__(self, *arguments: Any) -> None:
        self.arguments, self.state = arguments, ()

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Dtype(_Record):
    __slots__ = ()


class _Array(_Record):
    __slots__ = ()


KNOWN: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): "ndarray",
    ("numpy", "dtype"): _Dtype,
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
}


NEEDED = (
    *(pickle.PROTO, pickle.MARK, pickle.STOP, pickle.GLOBAL, pickle.REDUCE, pickle.BUILD),
    *(pickle.EMPTY_DICT, pickle.SETITEM, pickle.SETITEMS, pickle.EMPTY_LIST, pickle.APPEND, pickle.APPENDS),
    *(pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3),
    *(pickle.BINSTRING, pickle.SHORT_BINSTRING, pickle.BINUNICODE, pickle.BININT, pickle.BININT1, pickle.BININT2),
    *(pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE),
    *(pickle.BINPUT, pickle.LONG_BINPUT, pickle.BINGET, pickle.LONG_BINGET),
)
"""The operations that occur in CIFAR's batches."""


MOST_READS = 2_000_000
"""How many parts a pickle may have: each takes memory, however few bytes it has. CIFAR-100's have half a million."""


class _Few(io.BytesIO):
    """A pickle's bytes, of which only so many parts may be read."""

    reads = 0

    def read(self, size: int | None = -1, /) -> bytes:
        self.reads += 1
        if self.reads > MOST_READS:
            raise DataError(f"it has more than {MOST_READS:,} parts")
        return super().read(size)


# The unpickler written in Python: the one in C allocates whatever number of memo entries a pickle names.
class _Unpickler(pickle._Unpickler):
    dispatch = {code: pickle._Unpickler.dispatch[code] for (code,) in NEEDED}  # noqa: RUF012

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in KNOWN:
            raise DataError(f"it asks for {module}.{name}")
        return KNOWN[module, name]


def _refuse_other_keys(load: Callable[[Any], None], keys: Callable[[Any], list[Any]]) -> Callable[[Any], None]:
    """Keys of a dictionary must be strings: hashing tuples in tuples can overflow the stack of the interpreter."""

    def checked(unpickler: Any) -> None:
        if not all(isinstance(key, bytes | str) for key in keys(unpickler.stack)):
            raise DataError("it has a dictionary whose keys are not strings")
        load(unpickler)

    return checked


_SETITEM, _SETITEMS = pickle.SETITEM[0], pickle.SETITEMS[0]
_Unpickler.dispatch[_SETITEM] = _refuse_other_keys(_Unpickler.dispatch[_SETITEM], lambda stack: stack[-2:-1])
_Unpickler.dispatch[_SETITEMS] = _refuse_other_keys(_Unpickler.dispatch[_SETITEMS], lambda stack: stack[::2])


def read_batch(path: Path, labels_key: bytes) -> tuple[U8, list[int]]:
    """The pixels, a row per image, and the labels of one pickled batch."""
    raw = _Few(read_file(path))
    try:
        batch = _Unpickler(raw, encoding="bytes").load()
    except DataError as refused:
        raise DataError(f"{path} is not a batch of CIFAR, and may be meant to do harm: {refused}; delete it") from None
    except Exception as fault:  # a hostile pickle can raise anything
        raise damaged(path, fault or type(fault).__name__) from None
    if not isinstance(batch, dict) or b"data" not in batch or labels_key not in batch:
        raise DataError(f"{path} is not a batch of CIFAR: expected data and {labels_key.decode()} in it")
    labels = batch[labels_key]
    if not isinstance(labels, list) or not all(type(label) is int and abs(label) < 2**31 for label in labels):
        raise DataError(f"{path}: expected {labels_key.decode()} to be a list of numbers; download it again")
    return _bytes_of(batch[b"data"], path), labels


def _bytes_of(array: Any, path: Path) -> U8:
    match array:
        case _Array(state=(_, (rows, columns), _Dtype(arguments=("u1" | b"u1", *_)), False, bytes(content))):
            if type(rows) is type(columns) is int and rows >= 0 <= columns and rows * columns == len(content):
                return np.frombuffer(content, np.uint8).reshape(rows, columns)
    raise DataError(f"{path}: expected data to be an array of bytes, a row per image; download it again")
