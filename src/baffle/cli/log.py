"""The log of `baffle serve` and `baffle join`: each line on stderr, and in a file that later starts append to."""

import json
import os
import sys
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from threading import Lock
from typing import Literal

from baffle.errors import one_line
from baffle.files import make_folder, own_file

Style = Literal["text", "json"]

MOST_CHARACTERS = 2_000  # a message is cut to this length
MOST_BYTES = 10_000_000  # a log file that has reached this size is moved away, and a new one begins


class Log:
    """Call it with a message to log one line. Times are UTC.

        text    2026-11-16 21:42:20Z client 3: takes part
        json    {"time": "2026-11-16T21:42:20.123Z", "who": "client 3", "says": "takes part"}

    The file has the same lines as stderr; with `quiet` only the file has them. A file that cannot be written never
    stops a run: stderr says so, once until the file can be written again. The file is open only while a line is
    written, so there is nothing to close, and it may be moved away at any time. Threads may share a log.
    """

    def __init__(self, style: Style, who: str, file: Path | None = None, *, quiet: bool = False) -> None:
        self._style, self._who, self._file, self._quiet = style, who, file, quiet
        self._lock = Lock()
        self._lost = 0
        """How many lines the file lacks since it could last be written."""

    def __call__(self, message: str) -> None:
        with self._lock:
            line = self._line(message)
            if not self._quiet:
                _print(line)
            if self._file:
                self._keep(line, self._file)

    def _line(self, message: str) -> str:
        now, says = datetime.now(UTC), one_line(message, MOST_CHARACTERS)
        if self._style == "text":
            return f"{now:%Y-%m-%d %H:%M:%S}Z {self._who}: {says}"
        time = now.isoformat(timespec="milliseconds").removesuffix("+00:00") + "Z"
        return json.dumps({"time": time, "who": self._who, "says": says})

    def _keep(self, line: str, file: Path) -> None:
        missed = (
            [self._line(f"{self._lost} lines are missing here: the file could not be written")] if self._lost else []
        )
        try:
            _append([*missed, line], file)
        except OSError as fault:
            if not self._lost:
                _print(self._line(f"{file} cannot be written: {fault.strerror or fault}; the run goes on without it"))
            self._lost += 1
        else:
            self._lost = 0


def older(file: Path) -> Path:
    """Where a log file is moved when it has grown too large."""
    return file.with_name(f"{file.name}.1")


def _append(lines: list[str], file: Path) -> None:
    make_folder(file.parent)  # it becomes the folder of a run or of a client's state
    with open(file, "a+b", opener=own_file) as opened:
        size = opened.seek(0, os.SEEK_END)
        torn = False
        if size:
            opened.seek(size - 1)
            torn = opened.read(1) != b"\n"  # a process was killed, or the disk was full, in the middle of a line
        opened.write("".join(f"{line}\n" for line in ([""] if torn else []) + lines).encode())
        size = opened.seek(0, os.SEEK_END)
    if size >= MOST_BYTES:
        file.replace(older(file))


def _print(line: str) -> None:
    """Print a line to stderr. It may be closed, or its reader may be gone: neither stops a run."""
    if sys.stderr is not None:
        with suppress(OSError, ValueError):
            sys.stderr.write(f"{line}\n")
            sys.stderr.flush()
