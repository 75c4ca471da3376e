"""Zip archives and NumPy's arrays in them, as strangers write them. Nothing is unpacked before its declared size was
checked, and no more than that is unpacked. What is wrong is a ValueError that names the file."""

import io
import math
import zipfile
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
"""How members may be packed. With other methods, zipfile unpacks more at once than it is asked for."""


def open_archive(path: Path, most_of_one: int, most: int) -> zipfile.ZipFile:
    """An archive whose members declare at most `most_of_one` bytes each and `most` together, and none of which has a
    name that reaches outside it."""
    try:
        archive = zipfile.ZipFile(path)
    except Exception as fault:  # a hostile archive can raise anything that parsing can
        raise ValueError(f"{path} is damaged or cannot be read ({fault})") from None
    try:
        _require_harmless(path, archive.infolist(), most_of_one, most)
    except ValueError:
        archive.close()
        raise
    return archive


def _require_harmless(path: Path, members: list[zipfile.ZipInfo], most_of_one: int, most: int) -> None:
    for member in members:
        # The archive's own spelling: zipfile turns other separators into "/" and cuts names at a NUL.
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
    """One member, if it has the size and the checksum that the archive declares."""
    try:
        member = archive.getinfo(name)
    except KeyError:
        raise ValueError(f"{archive.filename} holds no {name}") from None
    try:
        with archive.open(member) as file:
            data = file.read(member.file_size + 1)  # asked for everything, zipfile unpacks more than was declared
    except Exception as fault:
        raise ValueError(f"{archive.filename}: {name} is damaged or cannot be read ({fault})") from None
    if len(data) != member.file_size:
        raise ValueError(f"{archive.filename}: {name} is damaged: expected {member.file_size} bytes, got {len(data)}")
    return data


def read_array(archive: zipfile.ZipFile, name: str) -> NDArray[Any]:
    """An array of an npz file. Its header is checked against its size before anything is made of it."""
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
    except Exception as fault:  # a hostile header can raise anything that parsing can
        reason = fault or type(fault).__name__
        raise ValueError(f"{archive.filename}: {name} is damaged or cannot be read ({reason})") from None
    return array


def _too_large(what: str, size: int, limit: int) -> ValueError:
    return ValueError(f"{what} would unpack to {size:,} bytes, expected at most {limit:,}")
