"""Data sets by name."""

import os
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from baffle.data.dataset import Dataset, Source
from baffle.errors import DataError, PlanError
from baffle.plan.functions import call_own

__all__ = ["SOURCES", "Dataset", "Reader", "Source", "data_folder", "load"]


class Reader(NamedTuple):
    """A function that reads a data set from a folder. One whose images can have any size takes `pixels` too."""

    module: str
    function: str
    sized: bool = False


SOURCES = {
    "digits": Reader("baffle.data.handwriting", "digits"),
    "mnist": Reader("baffle.data.handwriting", "mnist"),
    "usps": Reader("baffle.data.handwriting", "usps"),
    "cifar10": Reader("baffle.data.cifar", "cifar10"),
    "cifar100": Reader("baffle.data.cifar", "cifar100"),
    "pacs": Reader("baffle.data.images", "pacs", sized=True),
    "officehome": Reader("baffle.data.images", "officehome", sized=True),
}
"""Imported when they are needed: all readers together would take too much of a small client's memory."""


def load(name: str, folder: Path | None = None, pixels: int = 0) -> Source:
    """A data set by name, or a user's own as "package.module:function". `folder` defaults to $BAFFLE_DATA.

    With `pixels`, images have that size; without it, the one that is usual for the set.
    """
    sized = [known for known, reader in SOURCES.items() if reader.sized]
    if pixels and name not in sized:
        raise PlanError(f"task.pixels: only {' and '.join(sized)} can have a size, not {name}; leave it out")
    if ":" in name:
        own = call_own("task.data", name, data=data_folder(folder))
        if not isinstance(own, Source):
            raise DataError(f"task.data: {name} must return a baffle.Source, got {type(own).__name__}")
        return own
    if name not in SOURCES:
        raise DataError(f'task.data: expected one of {", ".join(SOURCES)} or "package.module:function", got {name!r}')
    reader = SOURCES[name]
    read = getattr(import_module(reader.module), reader.function)
    source: Source = read(data_folder(folder), *([pixels] if pixels else []))
    return source


def data_folder(given: str | Path | None) -> Path | None:
    """The folder of data sets: the given one, or else $BAFFLE_DATA."""
    name = given or os.environ.get("BAFFLE_DATA")
    return Path(name) if name else None
