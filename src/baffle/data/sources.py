"""Data sets by name."""

import os
from collections.abc import Callable
from pathlib import Path

from baffle.data.cifar import cifar10, cifar100
from baffle.data.dataset import Dataset, Source
from baffle.data.handwriting import digits, mnist, usps
from baffle.data.images import officehome, pacs
from baffle.errors import DataError, PlanError
from baffle.plan import imported

__all__ = ["SIZED", "SOURCES", "Dataset", "Source", "data_folder", "load"]

SOURCES: dict[str, Callable[[Path | None], Source]] = {
    "digits": digits,
    "mnist": mnist,
    "usps": usps,
    "cifar10": cifar10,
    "cifar100": cifar100,
    "pacs": pacs,
    "officehome": officehome,
}

SIZED: dict[str, Callable[[Path | None, int], Source]] = {"pacs": pacs, "officehome": officehome}
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
    where = data_folder(folder)
    return SIZED[name](where, pixels) if pixels else SOURCES[name](where)


def data_folder(given: Path | None) -> Path | None:
    """The folder of data sets: the one that was given, or else $BAFFLE_DATA."""
    return given or (Path(os.environ["BAFFLE_DATA"]) if os.environ.get("BAFFLE_DATA") else None)
