"""Files of data sets: how they are found, and how they are read without trusting them.

Nothing is ever unpacked to disk, nothing in a file is executed, and no file can make this process allocate more than
the size that it declares, or more than a limit.
"""

import gzip
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from baffle import archives, files
from baffle.core.arrays import I64
from baffle.errors import DataError

Found = TypeVar("Found")

LARGEST = 2**32
"""Bytes that a file or a whole archive may unpack to. No published set that is read here comes near."""

LARGEST_MEMBER = 2**28
"""Bytes that one member of an archive, or a single file, may have."""

DAMAGE = (OSError, EOFError, zlib.error)
"""What reading a damaged file can raise, gzipped or not."""


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


def open_file(path: Path) -> IO[bytes]:
    """A file for reading, gzipped or not."""
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")  # type: ignore[return-value]


def with_or_without_gz(path: Path) -> Path:
    return path if path.exists() else path.with_name(f"{path.name}.gz")


def damaged(path: Path | str, fault: object) -> DataError:
    return DataError(f"{path} is damaged or cannot be read ({fault}); download it again")


def read_file(path: Path) -> bytes:
    """A file of unknown size, which is refused if it is too large."""
    try:
        return files.read_file(path, LARGEST_MEMBER)
    except OSError as fault:
        raise damaged(path, fault) from None


def read_whole(path: Path, size: int) -> bytes:
    """A file that must have exactly `size` bytes."""
    try:
        raw = files.read_file(path, size)
    except OSError as fault:
        raise damaged(path, fault) from None
    if len(raw) != size:
        raise DataError(f"{path} is truncated or damaged: expected {size} bytes, got {len(raw)}; download it again")
    return raw


def within(labels: NDArray[Any], classes: int, path: Path | str) -> I64:
    """The labels, after a check that each of them names a class."""
    wrong = labels[(labels < 0) | (labels >= classes)]
    if len(wrong):
        raise DataError(f"{path} holds the label {wrong[0]}, expected 0 to {classes - 1}; download it again")
    return labels.astype(np.int64)


def open_zip(path: Path) -> zipfile.ZipFile:
    """An archive, after a check that no name reaches outside it and that its members declare plausible sizes."""
    with _as_data():
        return archives.open_archive(path, LARGEST_MEMBER, LARGEST)


def read_member(archive: zipfile.ZipFile, name: str) -> bytes:
    with _as_data():
        return archives.read_member(archive, name)


def read_npz(path: Path, shapes: Mapping[str, tuple[int | None, ...]]) -> dict[str, NDArray[Any]]:
    """Arrays of unsigned bytes from an npz file, each of the given shape (None stands for any size but 0)."""
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
    """Report what is wrong with an archive as a matter of the data set."""
    try:
        yield
    except ValueError as fault:
        raise DataError(f"{fault}; download it again from its publisher") from None
