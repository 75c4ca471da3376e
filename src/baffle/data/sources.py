"""Data sets by name."""

import os
from pathlib import Path

from baffle.data.dataset import Dataset, Source
from baffle.errors import DataError, PlanError
from baffle.plan import imported

__all__ = ["SIZED", "SOURCES", "Dataset", "Source", "data_folder", "load"]

SOURCES = {
    "digits": "baffle.data.handwriting:digits",
    "mnist": "baffle.data.handwriting:mnist",
    "usps": "baffle.data.handwriting:usps",
    "cifar10": "baffle.data.cifar:cifar10",
    "cifar100": "baffle.data.cifar:cifar100",
    "pacs": "baffle.data.images:pacs",
    "officehome": "baffle.data.images:officehome",
}
"""Imported when they are asked for: what reads the others would take a small client's memory."""

SIZED = ("pacs", "officehome")
"""Those whose images can have any size."""


def load(name: str, folder: Path | None = None, pixels: int = 0) -> Source:
    """A data set by name, or a user's own as "package.module:function". `folder` defaults to $BAFFLE_DATA.

    With `pixels`, images have that size; without it, the one that is usual for the set.
    """
    if pixels and name not in SIZED:
        raise PlanError(f"task.pixels: only {' and '.join(SIZED)} can have a size, not {name}; leave it out")
    if ":" in name:
        made = imported(name)()
        if not isinstance(made, Source):
            raise DataError(f"task.data: {name} must return a baffle.Source, got {type(made).__name__}")
        return made
    if name not in SOURCES:
        raise DataError(f'task.data: expected one of {", ".join(SOURCES)} or "package.module:function", got {name!r}')
    sized = (pixels,) if pixels else ()
    found: Source = imported(SOURCES[name])(data_folder(folder), *sized)
    return found


def data_folder(given: Path | None) -> Path | None:
    """The folder of data sets: the one that was given, or else $BAFFLE_DATA."""
    return given or (Path(os.environ["BAFFLE_DATA"]) if os.environ.get("BAFFLE_DATA") else None)
