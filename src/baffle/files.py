"""Files that are replaced whole or not at all, and files that strangers wrote."""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol, TypeVar

T = TypeVar("T")

ROOM = 1 << 16
"""How many bytes must fit if there is to be room on a disk."""


class Attempt(Protocol):
    """Calls a function that writes files and returns its result. It may call it again if there was no room."""

    def __call__(self, write: Callable[[], T]) -> T: ...


def once(write: Callable[[], T]) -> T:
    """The attempt of somebody who does not wait for room."""
    return write()


def replace(path: Path, data: bytes) -> None:
    """A reader finds either the old contents or all of `data`, even if this process is killed or the disk is full."""
    new = path.with_name(f".{path.name}.new")
    with new.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


def append(path: Path, data: bytes) -> None:
    """Add data to the end of a file: all of it, or nothing if the disk is full."""
    with path.open("ab", buffering=0) as file:
        before, rest = file.tell(), data
        try:
            while rest:
                rest = rest[file.write(rest) :]
        except OSError:
            with suppress(OSError):
                file.truncate(before)
            raise


def require_room(path: Path) -> None:
    """An OSError if a file, or one beside it whose name begins in the same way, could not grow now."""
    probe = path.with_name(f".{path.name}.room")
    probe.unlink(missing_ok=True)
    try:
        longest = max((file.stat().st_size for file in path.parent.glob(f"{path.name}*")), default=0)
        with probe.open("xb", buffering=0) as file:
            file.seek(longest)
            for _ in range(0, ROOM, 4096):
                file.write(bytes(4096))
            os.fsync(file.fileno())
    finally:
        probe.unlink(missing_ok=True)


def read_file(path: Path, most: int) -> bytes:
    """All of a file, or an OSError if it is longer than `most` bytes or is no file: a pipe or a device never ends."""
    if path.exists() and not path.is_file():
        raise OSError("it is not a file")
    with path.open("rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(f"it is longer than {most:,} bytes")
    return data
