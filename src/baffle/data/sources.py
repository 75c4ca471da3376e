"""Data sets by name."""

import os
from collections.abc import Callable
from pathlib import Path

from baffle.data.dataset import Dataset, Source
from baffle.data.handwriting import digits, mnist, usps
from baffle.errors import DataError
from baffle.plan import imported

__all__ = ["SOURCES", "Dataset", "Source", "load"]

SOURCES: dict[str, Callable[[Path | None], Source]] = {"digits": digits, "mnist": mnist, "usps": usps}


def load(name: str, folder: Path | None = None) -> Source:
    """A data set by name, or a user's own as "package.module:function". `folder` defaults to $BAFFLE_DATA."""
    if ":" in name:
        made = imported(name)()
        if not isinstance(made, Source):
            raise DataError(f"task.data: {name} must return a baffle.Source, got {type(made).__name__}")
        return made
    if name not in SOURCES:
        raise DataError(f'task.data: expected one of {", ".join(SOURCES)} or "package.module:function", got {name!r}')
    return SOURCES[name](folder or _folder_from_environment())


def _folder_from_environment() -> Path | None:
    return Path(os.environ["BAFFLE_DATA"]) if os.environ.get("BAFFLE_DATA") else None
