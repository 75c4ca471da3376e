"""Writing files atomically and readable by their owner alone, and reading files from untrusted sources.

A folder that is written to may come from a stranger too. So nothing is written through a link in it, and a temporary
file is always a new one under a random name.
"""

import errno
import fcntl
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from secrets import token_hex
from typing import BinaryIO, Protocol, TypeVar

T = TypeVar("T")

ROOM = 1 << 16  # how many bytes must fit for a disk to count as not full

TEMPORARY = re.compile(r"\.baffle-[0-9a-f]{16}\.new")  # the name of a file before it takes the place of another


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
    killed or the disk is full. Only the file's owner can read it. A link in its place is replaced, not followed."""
    with _temporary(path.parent) as (folder, file, name):
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
        os.replace(name, path.name, src_dir_fd=folder, dst_dir_fd=folder)


def append(path: Path, data: bytes) -> None:
    """Append all of the data to a file, or nothing if the disk is full."""
    with open(path, "ab", buffering=0, opener=own_file) as file:
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
    longest = max((file.lstat().st_size for file in path.parent.glob(f"{path.name}*")), default=0)
    with _temporary(path.parent) as (_folder, file, _name):
        file.seek(longest)
        for _ in range(0, ROOM, 4096):
            file.write(bytes(4096))
            file.flush()
        os.fsync(file.fileno())


def own_file(path: str, flags: int) -> int:
    """An opener of files that are written in place: for their owner alone, and never through a link, which may lead
    from a stranger's folder to any file of the user."""
    try:
        return os.open(path, flags | os.O_NOFOLLOW, 0o600)
    except OSError as fault:
        if fault.errno != errno.ELOOP:
            raise
        raise OSError(errno.ELOOP, "it is a link, and nothing is written through links") from None


@contextmanager
def _temporary(path: Path) -> Iterator[tuple[int, BinaryIO, str]]:
    """A folder, opened, and a new file in it with its name there. The file is removed unless it was renamed. Its lock
    tells it from those that killed processes have left behind, which are removed."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for left in filter(TEMPORARY.fullmatch, os.listdir(folder)):  # noqa: PTH208  by descriptor
            with suppress(OSError):
                _remove_unlocked(folder, left)
        name = f".baffle-{token_hex(8)}.new"
        with open(name, "wb", opener=partial(_new_file, folder)) as file:
            try:
                yield folder, file, name
            finally:
                with suppress(OSError):
                    os.unlink(name, dir_fd=folder)
    finally:
        os.close(folder)


def _new_file(folder: int, name: str, flags: int) -> int:
    while True:
        handle = os.open(name, flags | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=folder)
        with suppress(OSError):  # some disks have no locks; then nothing counts as left behind
            fcntl.flock(handle, fcntl.LOCK_EX)
        if os.fstat(handle).st_nlink:
            return handle
        os.close(handle)  # another process took it for one left behind, before it was locked


def _remove_unlocked(folder: int, name: str) -> None:
    handle = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(name, dir_fd=folder)
    finally:
        os.close(handle)


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
