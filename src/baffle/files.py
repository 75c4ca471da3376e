"""Files that are replaced whole or not at all, and files that strangers wrote."""

import os
from pathlib import Path


def replace(path: Path, data: bytes) -> None:
    """A reader finds either the old contents or all of `data`, even if this process is killed or the disk is full."""
    new = path.with_name(f".{path.name}.new")
    with new.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


def read_file(path: Path, most: int) -> bytes:
    """All of a file, or an OSError if it is longer than `most` bytes or is no file: a pipe or a device never ends."""
    if path.exists() and not path.is_file():
        raise OSError("it is not a file")
    with path.open("rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(f"it is longer than {most:,} bytes")
    return data
