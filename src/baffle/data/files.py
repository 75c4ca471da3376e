"""Finding the files of data sets, and reading them without trusting them.

Nothing is unpacked to disk, nothing in a file is executed, and no file can make this process allocate more than the
size that it declares, or more than a limit.
"""

import gzip
import math
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from baffle import archives, files
from baffle.core.arrays import I64
from baffle.errors import DataError

Found = TypeVar("Found")

LARGEST = 2**32  # bytes that a whole archive may unpack to, far more than any data set that is read here
LARGEST_MEMBER = 2**28  # bytes that one member of an archive, or a single file, may have
LARGEST_IDX = 2**30  # bytes that an idx file may unpack to; MNIST's largest has 47 million
MOST_UNPACKED = 1032  # bytes that gzip can unpack from one byte

Kind = Literal["bytes", "ints"]

KINDS: dict[Kind, tuple[int, np.dtype[Any], str]] = {  # the type's number in the file, NumPy's type, and its name
    "bytes": (0x08, np.dtype(np.uint8), "unsigned bytes"),
    "ints": (0x0C, np.dtype(">i4"), "32-bit integers"),
}


def find(
    title: str, folder: Path | None, below: str, get_it: str, look: Callable[[Path], Found | None]
) -> tuple[Path, Found]:
    """The folder of a data set, which is `folder/below` or `folder` itself, and what `look` finds there."""
    get_it = f"{get_it} into a folder {below} and give its parent"
    if folder is None:
        raise DataError(f"{title} is not part of BAFFLE: {get_it} as --data FOLDER or $BAFFLE_DATA")
    for where in (folder / below, folder):
        found = look(where)
        if found is not None:
            return where, found
    raise DataError(f"no {title} in {folder}: {get_it}")


def with_or_without_gz(path: Path) -> Path:
    return path if path.exists() else path.with_name(f"{path.name}.gz")


def damaged(path: Path | str, fault: object) -> DataError:
    return DataError(f"{path} is damaged or cannot be read ({fault}); download it again")


def read_file(path: Path, most: int | None = None) -> bytes:
    """Read a file of unknown size, and refuse it if it is too large."""
    try:
        return files.read_file(path, LARGEST_MEMBER if most is None else most)
    except OSError as fault:
        raise damaged(path, fault) from None


def read_whole(path: Path, size: int) -> bytes:
    """Read a file that must have exactly `size` bytes."""
    raw = read_file(path, size)
    if len(raw) != size:
        raise DataError(f"{path} is truncated or damaged: expected {size} bytes, got {len(raw)}; download it again")
    return raw


def within(labels: NDArray[Any], classes: int, path: Path | str) -> I64:
    """The labels, checked to be class numbers."""
    wrong = labels[(labels < 0) | (labels >= classes)]
    if len(wrong):
        raise DataError(f"{path} holds the label {wrong[0]}, expected 0 to {classes - 1}; download it again")
    return labels.astype(np.int64)


def open_zip(path: Path) -> zipfile.ZipFile:
    """An archive whose names do not point outside it and whose members declare plausible sizes."""
    with _as_data():
        return archives.open_archive(path, LARGEST_MEMBER, LARGEST)


def read_member(archive: zipfile.ZipFile, name: str) -> bytes:
    with _as_data():
        return archives.read_member(archive, name)


def read_npz(path: Path, shapes: Mapping[str, tuple[int | None, ...]]) -> dict[str, NDArray[Any]]:
    """Read arrays of unsigned bytes from an npz file, each of the given shape (None: any size but 0)."""
    arrays = dict[str, NDArray[Any]]()
    with open_zip(path) as archive:
        for name, shape in shapes.items():
            with _as_data():
                array = archives.read_array(archive, name)
            fits = array.ndim == len(shape) and all(
                size > 0 if wanted is None else size == wanted for size, wanted in zip(array.shape, shape, strict=True)
            )
            if array.dtype != np.uint8 or not fits:
                wanted = " × ".join("n" if size is None else str(size) for size in shape)
                raise DataError(f"{path}: {name}: expected {wanted} bytes, got {array.dtype} of shape {array.shape}")
            arrays[name] = array
    return arrays


@contextmanager
def _as_data() -> Iterator[None]:
    """Turn faults of an archive into DataErrors."""
    try:
        yield
    except ValueError as fault:
        raise DataError(f"{fault}; download it again from its publisher") from None


def read_idx(path: Path, shape: tuple[int, ...], kind: Kind = "bytes") -> NDArray[Any]:
    """Read an idx file, gzipped or not, whose items have this shape. It holds a magic number, sizes, then items."""
    code, dtype, called = KINDS[kind]
    rank = 1 + len(shape)
    magic, size_of_header = bytes([0, 0, code, rank]), 4 + 4 * rank
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            header = file.read(size_of_header)
            if header[:4] != magic:
                raise DataError(
                    f"{path} is not an idx file of {called}: expected magic {magic.hex()}, got {header[:4].hex()}"
                )
            sizes = tuple(int.from_bytes(header[i : i + 4], "big") for i in range(4, size_of_header, 4))
            if sizes[1:] != shape:
                raise DataError(f"{path} holds items of shape {sizes[1:]}, expected {shape}; is it another data set?")
            expected = math.prod(sizes) * dtype.itemsize
            most = min(LARGEST_IDX, path.stat().st_size * (MOST_UNPACKED if path.suffix == ".gz" else 1))
            if expected > most:  # refused before memory is allocated for it
                raise DataError(
                    f"{path} is truncated or damaged: its header promises {expected:,} bytes, expected at most "
                    f"{most:,}; download it again"
                )
            body = file.read(expected + 1)  # one byte more, to notice a longer file or a wrong checksum
    except (OSError, EOFError, zlib.error) as fault:
        raise damaged(path, fault) from None
    if len(body) != expected or not sizes[0]:
        raise DataError(
            f"{path} is truncated or damaged: expected {size_of_header + expected} bytes for {sizes[0]} items, "
            f"got {'more' if len(body) > expected else len(header) + len(body)}; download it again"
        )
    return np.frombuffer(body, dtype=dtype).reshape(sizes)
