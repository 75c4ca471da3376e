"""The idx format of MNIST: a magic number, sizes, then items."""

import math
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from baffle.data.files import DAMAGE, damaged, open_file
from baffle.errors import DataError

Kind = Literal["bytes", "ints"]

KINDS: dict[Kind, tuple[int, np.dtype[Any], str]] = {
    "bytes": (0x08, np.dtype(np.uint8), "unsigned bytes"),
    "ints": (0x0C, np.dtype(">i4"), "32-bit integers"),
}
"""The type's number in the file, NumPy's type, and its name in messages."""

LARGEST = 2**30
"""Bytes that a file may unpack to; MNIST's largest has 47 million."""

MOST_UNPACKED = 1032
"""Bytes that gzip can make of one byte."""


def read_idx(path: Path, shape: tuple[int, ...], kind: Kind = "bytes") -> NDArray[Any]:
    """An idx file, gzipped or not, whose items have the given shape."""
    code, dtype, called = KINDS[kind]
    rank = 1 + len(shape)
    magic, size_of_header = bytes([0, 0, code, rank]), 4 + 4 * rank
    try:
        with open_file(path) as file:
            header = file.read(size_of_header)
            if header[:4] != magic:
                raise DataError(
                    f"{path} is not an idx file of {called}: expected magic {magic.hex()}, got {header[:4].hex()}"
                )
            sizes = tuple(int.from_bytes(header[i : i + 4], "big") for i in range(4, size_of_header, 4))
            if sizes[1:] != shape:
                raise DataError(f"{path} holds items of shape {sizes[1:]}, expected {shape}; is it another data set?")
            expected = math.prod(sizes) * dtype.itemsize
            _require_plausible(path, expected)
            # One byte more, so that a longer file or a wrong checksum is noticed.
            body = file.read(expected + 1)
    except DAMAGE as fault:
        raise damaged(path, fault) from None
    if len(body) != expected or not sizes[0]:
        raise DataError(
            f"{path} is truncated or damaged: expected {size_of_header + expected} bytes for {sizes[0]} items, "
            f"got {'more' if len(body) > expected else len(header) + len(body)}; download it again"
        )
    return np.frombuffer(body, dtype=dtype).reshape(sizes)


def _require_plausible(path: Path, expected: int) -> None:
    """Refuse a header that promises more than the file can hold, before there is memory for it."""
    most = min(LARGEST, path.stat().st_size * (MOST_UNPACKED if path.suffix == ".gz" else 1))
    if expected > most:
        raise DataError(
            f"{path} is truncated or damaged: its header promises {expected:,} bytes, expected at most {most:,}; "
            "download it again"
        )
