"""Writing files atomically and readable by their owner alone, and reading files from untrusted sources."""

import os
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol, TypeVar

T = TypeVar("T")

ROOM = 1 << 16  # how many bytes must fit for a disk to count as not full


class Attempt(Protocol):
    """Calls a function that writes files, and may retry it if the disk was full."""

    def __call__(self, write: Callable[[], T]) -> T: ...


def once(write: Callable[[], T]) -> T:
    """Write once, without retrying."""
    return write()


def make_folder(path: Path) -> None:
    """Make a folder that only its owner can enter, and the folders above it. An existing folder stays as it is."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)


def replace(path: Path, data: bytes) -> None:
    """Replace a file atomically: a reader finds either the old contents or all of `data`, even if this process is
    killed or the disk is full. Only the file's owner can read it."""
    new = path.with_name(f".{path.name}.new")
    with open(new, "wb", opener=_for_its_owner) as file:
        os.fchmod(file.fileno(), 0o600)  # an earlier attempt may have left it with another mode
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


def append(path: Path, data: bytes) -> None:
    """Append all of the data to a file, or nothing if the disk is full."""
    with open(path, "ab", buffering=0, opener=_for_its_owner) as file:
        before, rest = file.tell(), data
        try:
            while rest:
                rest = rest[file.write(rest) :]
        except OSError:
            with suppress(OSError):
                file.truncate(before)
            raise


def require_room(path: Path) -> None:
    """Raise an OSError if the file, or one in its folder whose name begins with its name, could not grow now."""
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


def sync_folder(folder: Path) -> None:
    """Make the names of a folder's files durable, so that no file returns with older contents after a crash."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def is_open_to_others(path: Path) -> bool:
    """Whether a file's mode lets users other than its owner read or change it."""
    return bool(path.stat().st_mode & 0o077)


def read_file(path: Path, most: int) -> bytes:
    """Read a whole file. Raises OSError if it is longer than `most` bytes, or if it is a pipe or a device, which may
    never end. Takes no more memory than the file has bytes."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError("it is not a file")
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise OSError(f"it is longer than {most:,} bytes")
        data = file.read(size + 1)
    if len(data) > size:
        raise OSError("it grows while it is read")
    return data


def _for_its_owner(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
