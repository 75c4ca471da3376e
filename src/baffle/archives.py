"""Zip archives from untrusted sources, and NumPy arrays in them. A member is unpacked only after its declared size was
checked, and only up to that size. Faults are ValueErrors that name the file."""

import io
import math
import zipfile
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
"""Accepted compression methods. With others, zipfile unpacks more at once than requested."""


def open_archive(path: Path, most_of_one: int, most: int) -> zipfile.ZipFile:
    """Open an archive whose members declare at most `most_of_one` bytes each and `most` together, and whose names do
    not point outside it."""
    try:
        archive = zipfile.ZipFile(path)
    except Exception as fault:  # parsing a hostile archive can raise anything
        raise ValueError(f"{path} is damaged or cannot be read ({fault})") from None
    try:
        _require_harmless(path, archive.infolist(), most_of_one, most)
    except ValueError:
        archive.close()
        raise
    return archive


def _require_harmless(path: Path, members: list[zipfile.ZipInfo], most_of_one: int, most: int) -> None:
    for member in members:
        # The original name: zipfile turns other separators into "/" and cuts names at a NUL.
        name = PurePosixPath(member.orig_filename.replace("\\", "/"))
        if name.is_absolute() or ".." in name.parts or ":" in "".join(name.parts[:1]) or "\0" in member.orig_filename:
            raise ValueError(f"{path} holds a member that reaches outside it, {member.orig_filename!r}")
        if member.compress_type not in METHODS:
            raise ValueError(f"{path}: {member.filename} is packed in another way than by deflate")
        if member.file_size > most_of_one:
            raise _too_large(f"{path}: {member.filename}", member.file_size, most_of_one)
    total = sum(member.file_size for member in members)
    if total > most:
        raise _too_large(str(path), total, most)


def read_member(archive: zipfile.ZipFile, name: str) -> bytes:
    """Read a member and check its size and checksum against the archive's declaration."""
    try:
        member = archive.getinfo(name)
    except KeyError:
        raise ValueError(f"{archive.filename} holds no {name}") from None
    try:
        with archive.open(member) as file:
            data = file.read(member.file_size + 1)  # without a limit, zipfile unpacks more than was declared
    except Exception as fault:
        raise ValueError(f"{archive.filename}: {name} is damaged or cannot be read ({fault})") from None
    if len(data) != member.file_size:
        raise ValueError(f"{archive.filename}: {name} is damaged: expected {member.file_size} bytes, got {len(data)}")
    return data


def read_array(archive: zipfile.ZipFile, name: str) -> NDArray[Any]:
    """Read an array of an npz file. Its header is checked against its size first."""
    data = read_member(archive, f"{name}.npy")
    file = io.BytesIO(data)
    try:
        header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        shape, _, dtype = header[np.lib.format.read_magic(file)](file)
        numbers = len(data) - file.tell()
        if dtype.hasobject or any(size < 0 for size in shape) or math.prod(shape) * dtype.itemsize != numbers:
            raise ValueError(f"expected {dtype} of shape {shape}, got {numbers} bytes")
        file.seek(0)
        array: NDArray[Any] = np.lib.format.read_array(file, allow_pickle=False)
    except Exception as fault:  # parsing a hostile header can raise anything
        reason = fault or type(fault).__name__
        raise ValueError(f"{archive.filename}: {name} is damaged or cannot be read ({reason})") from None
    return array


def _too_large(what: str, size: int, limit: int) -> ValueError:
    return ValueError(f"{what} would unpack to {size:,} bytes, expected at most {limit:,}")
