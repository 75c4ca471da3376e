"""A run's folder: `plan.toml`, `journal.sqlite`, `metrics.jsonl`, `summary.json`. One process uses it at a time, and
only its owner can read the files. Without --out it is named after the plan and the time."""

import fcntl
import json
import os
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Any

from baffle.errors import PlanError, RunFolderError, unwritable
from baffle.files import TEMPORARY, Attempt, append, make_folder, once, read_file, replace
from baffle.journal.database import remedy

PLAN = "plan.toml"  # the first file that a run writes. A process killed while writing it leaves only a temporary file
LOG = "serve.log"  # a server's log, which it may write before its plan
SUMMARY_BYTES = 1 << 20  # no summary is longer than this; a real one takes about a kilobyte
NOT_YET_A_RUN = {f".{PLAN}.new", LOG, f"{LOG}.1"}  # files that a new run's folder may already hold; 0.2 left the first

ANOTHER_FOLDER = "give another folder (--out, in Python out=…)"

LONGEST_NAME = 200
"""Bytes of a plan's name that a folder takes over: file systems allow 255, and the time is added to it."""

SHOWN_NAME = 60  # characters of a longer name that an error shows


class RunFolder:
    """The files of a run. While it is open, the folder is locked. Files are replaced whole or not at all. `attempt`
    makes every write, and may wait for room."""

    def __init__(self, path: Path, attempt: Attempt = once) -> None:
        self.path = path
        self.attempt = attempt
        self.plan = path / PLAN
        self.journal = path / "journal.sqlite"
        self.metrics = path / "metrics.jsonl"
        self.summary = path / "summary.json"
        self._lock = -1

    @classmethod
    def new(cls, path: Path, attempt: Attempt = once) -> "RunFolder":
        """A folder for a new run, which must be missing or empty but for a log. It is created on entering."""
        try:
            names = {entry.name for entry in path.iterdir()} if path.exists() else set()
            taken = sorted(name for name in names - NOT_YET_A_RUN if not TEMPORARY.fullmatch(name))
        except OSError as fault:
            raise RunFolderError(
                f"{path} cannot be used for a run: {fault.strerror or fault}; {ANOTHER_FOLDER}"
            ) from None
        if PLAN in taken:
            raise RunFolderError(
                f"{path} holds another run; go on with it by --resume {shlex.quote(str(path))} (in Python "
                f"baffle.resume), or {ANOTHER_FOLDER}"
            )
        if taken:
            raise RunFolderError(f"{path} is not empty (it holds {taken[0]}); {ANOTHER_FOLDER}")
        return cls(path, attempt)

    @classmethod
    def existing(cls, path: Path, attempt: Attempt = once) -> "RunFolder":
        try:
            has_plan = (path / PLAN).is_file()
        except OSError as fault:
            raise RunFolderError(f"{path / PLAN} cannot be read: {fault.strerror or fault}") from None
        if not has_plan:
            raise RunFolderError(f"{path} holds no run: expected a folder with plan.toml that `baffle run --out` made")
        return cls(path, attempt)

    def __enter__(self) -> "RunFolder":
        try:
            make_folder(self.path)
            self._lock = os.open(self.path, os.O_RDONLY)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise RunFolderError(f"{self.path} is in use by another process; wait for it or stop it") from None
        except OSError as fault:
            raise RunFolderError(f"{self.path} cannot be used for a run: {fault.strerror or fault}") from None
        return self

    def __exit__(self, *_fault: object) -> None:
        os.close(self._lock)

    def write_plan(self, text: str) -> None:
        self._replace(self.plan, text)

    def write_metrics(self, records: Iterable[Mapping[str, Any]]) -> None:
        self._replace(self.metrics, "".join(json.dumps(record) + "\n" for record in records))

    def add_metrics(self, record: Mapping[str, Any]) -> None:
        line = f"{json.dumps(record)}\n".encode()
        self._write(self.metrics, lambda: append(self.metrics, line))

    def remove_summary(self) -> None:
        """A run that goes on has no summary until it ends."""
        self._write(self.summary, lambda: self.summary.unlink(missing_ok=True))

    def read_summary(self) -> dict[str, Any]:
        try:
            summary = json.loads(read_file(self.summary, SUMMARY_BYTES))
            if not isinstance(summary, dict):
                raise ValueError(f"expected a table, got {type(summary).__name__}")  # noqa: TRY004
        except (OSError, ValueError, RecursionError) as fault:
            raise RunFolderError(f"{self.summary} cannot be read: {fault}; has the run ended?") from None
        return summary

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        self._replace(self.summary, json.dumps(summary, indent=2) + "\n")

    def _replace(self, path: Path, text: str) -> None:
        self._write(path, lambda: replace(path, text.encode()))

    def _write(self, path: Path, write: Callable[[], None]) -> None:
        def translated() -> None:
            try:
                write()
            except OSError as fault:
                raise unwritable(path, fault, remedy(self.path)) from None

        self.attempt(translated)


@contextmanager
def new_folder(name: str) -> Iterator[Path]:
    """A new folder under runs/, named after the plan and the time. It is made at once, so runs that start in the same
    second get one each; if it is still empty at the end, it is removed."""
    require_folder_name(name)
    stem = f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    candidates = (Path("runs") / (f"{stem}-{i}" if i else stem) for i in count())
    path = next(path for path in candidates if _made(path))
    try:
        yield path
    finally:
        with suppress(OSError):  # it holds a run
            path.rmdir()
            path.parent.rmdir()


def _made(path: Path) -> bool:
    """Make a folder. False if there is one already."""
    try:
        make_folder(path.parent)
        path.mkdir(mode=0o700)
    except FileNotFoundError:  # another run has just removed the folder above, which was empty
        return False
    except OSError as fault:
        if path.exists():
            return False
        raise RunFolderError(f"{path} cannot be made: {fault.strerror or fault}; {ANOTHER_FOLDER}") from None
    return True


def require_folder_name(name: str) -> None:
    """Refuse a name that leads out of runs/, hides there, or does not fit a file system.

    A plan itself may have any name: the trajectory does not depend on it, and with --out no folder is named after it.
    """
    visible = name.strip() and name.isprintable() and not name.startswith(".")
    if visible and not set(name) & set("/\\") and len(name.encode()) <= LONGEST_NAME:
        return
    shown = repr(name) if len(name) <= SHOWN_NAME else f"{name[:SHOWN_NAME]!r}… ({len(name):,} characters)"
    raise PlanError(
        "name: expected one that can name a folder under runs/ (printable, without / or \\, not beginning with a dot, "
        f"at most {LONGEST_NAME} bytes), got {shown}; change it with --set name=NAME, or choose the folder: "
        "--out, in Python out=…"
    )
