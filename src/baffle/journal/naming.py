"""The names of run folders."""

from datetime import datetime
from itertools import count
from pathlib import Path

from baffle.errors import PlanError

LONGEST_NAME = 200
"""Bytes of a plan's name that a folder takes over: file systems allow 255, and the time is added to it."""

SHOWN_NAME = 60
"""Characters of a longer name that an error shows."""


def new_folder(name: str) -> Path:
    """A folder under runs/ that does not exist yet, named after the plan and the time."""
    require_folder_name(name)
    stem = f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    candidates = (Path("runs") / (f"{stem}-{i}" if i else stem) for i in count())
    return next(path for path in candidates if not path.exists())


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
        f"at most {LONGEST_NAME} bytes), got {shown}; change it with --set name=NAME, or choose the folder with --out"
    )
