"""What a client must remember across restarts, for each run, so that no server can ask it the same thing twice."""

import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated

import msgspec
from msgspec import Meta

from baffle.errors import RunFolderError, unwritable
from baffle.files import read_file

MARKS = "marks.jsonl"
"""The file of a client's marks, in its folder for a run."""

MOST_BYTES = 1 << 30
"""Of a file of marks: room for millions of rounds."""

Mark = Annotated[int, Meta(ge=-1)]


class Marks(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How far a client has gone; −1 means not at all."""

    sealed: Mark = -1  # the newest slot that it has sealed shares for
    slot: Mark = -1  # the newest slot that it has sent a vector in
    round: Mark = -1  # the newest round that it has released shares for
    released: Mapping[str, tuple[int, ...]] = MappingProxyType({})  # weights' hash → rounds released about them
    agreed: Mark = -1  # the newest slot whose survivors it has signed


class MarksFile:
    """Marks on disk: one line for each change, durable before `remember` returns.

    A broken last line is dropped. It is left when a client was killed while writing or its disk was full, and then the
    client has not sent anything that this line would guard.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            data = read_file(path, MOST_BYTES) if path.exists() else b""
            *lines, rest = data.split(b"\n")
            known = [msgspec.json.decode(line, type=Marks) for line in lines]
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as fault:
            raise RunFolderError(
                f"{path} cannot be read: {fault}; without its marks this client could be asked twice, so it must join "
                "as a new client, with a new key"
            ) from None
        self._size = len(data) - len(rest)
        released = {weights: rounds for marks in known for weights, rounds in marks.released.items()}
        self.marks = msgspec.structs.replace(known[-1], released=released) if known else Marks()

    def remember(self, marks: Marks) -> None:
        fresh = {
            weights: rounds for weights, rounds in marks.released.items() if self.marks.released.get(weights) != rounds
        }
        line = msgspec.json.encode(msgspec.structs.replace(marks, released=fresh)) + b"\n"
        try:
            if not self._path.exists():
                self._path.touch(mode=0o600)
                _sync_folder(self._path.parent)
            with self._path.open("r+b") as file:
                file.truncate(self._size)
                file.seek(self._size)
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
        except OSError as fault:
            raise unwritable(self._path, fault, "this client takes no part until it can") from None
        self._size += len(line)
        self.marks = marks


def _sync_folder(folder: Path) -> None:
    """Make a new file's name durable. Its content is synced separately."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
