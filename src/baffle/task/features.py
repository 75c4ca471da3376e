"""A frozen backbone: what the front of a model says of a sample is computed once and kept.

The samples of a data set go through the front in fixed pieces, whoever asks for which of them, so that their features
have the same bits in every run.
"""

import tempfile
import threading
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

import numpy as np

from baffle.core.arrays import F32, I64
from baffle.data.sources import Dataset, Source
from baffle.errors import DataError
from baffle.runtime.model import Front

PIECE = 16
"""Samples that go through the front together: few enough for a convolutional front to stay in cache."""

TRAINING = 0.8
"""The part of the memory for features that training samples may fill; test samples may fill the rest."""


class Features:
    """The features of a data set's samples, each computed when it is first asked for.

    They are kept in memory if they take at most `budget` bytes, and else in a file that vanishes with the process.
    """

    def __init__(self, data: Dataset, front: Callable[[Any], F32], budget: int) -> None:
        self._data, self._front = data, front
        first = self._computed(0)
        shape = (len(data), *first.shape[1:])
        self._kept = _room(shape, budget)
        self._kept[: len(first)] = first
        self._known = np.zeros(-(-len(data) // PIECE), dtype=bool)
        self._known[0] = True
        self._lock = threading.Lock()

    def rows(self, indices: I64) -> F32:
        """The features of some samples, a row each."""
        pieces = np.unique(indices // PIECE)
        with self._lock:
            for piece in pieces[~self._known[pieces]].tolist():
                rows = self._computed(piece)
                self._kept[piece * PIECE : piece * PIECE + len(rows)] = rows
                self._known[piece] = True
        return np.asarray(self._kept[indices])

    def _computed(self, piece: int) -> F32:
        which = np.arange(piece * PIECE, min((piece + 1) * PIECE, len(self._data)))
        return self._front(self._data.batch(which).x)


def source_of_features(source: Source, front: Front, budget: int) -> Source:
    """The same data set, as the head of a model sees it. Either part is read when it is first needed."""

    def seen(data: Dataset, part: float) -> Dataset:
        kept = Features(data, front.features, round(budget * part))
        return replace(data, samples=np.arange(len(data)), prepare=kept.rows, augment=None)

    shape = front.features(source.example(1).x).shape[1:]
    return Source(
        lambda: seen(source.train, TRAINING),
        lambda: seen(source.test, 1 - TRAINING),
        source.classes,
        source.domains,
        shape=shape,
    )


class Backbones:
    """Remembers the newest data set as a front saw it, so that runs one after the other, on the same data behind the
    same front, compute its features once."""

    def __init__(self) -> None:
        self._newest: tuple[Hashable, Source] | None = None

    def source(self, key: Hashable, make: Callable[[], Source]) -> Source:
        """What `make` gives, or gave for the same key."""
        if self._newest is None or self._newest[0] != key:
            self._newest = None
            self._newest = key, make()
        return self._newest[1]


def _room(shape: tuple[int, ...], budget: int) -> F32:
    size = 4 * int(np.prod(shape))
    if size <= budget:
        return np.empty(shape, np.float32)
    try:
        with tempfile.TemporaryFile() as file:
            file.truncate(size)
            return np.memmap(file, np.float32, "r+", shape=shape)
    except OSError as fault:
        raise DataError(
            f"{size / 2**20:,.0f} MB of features need a file, and there is no room for it: {fault}; "
            "raise run.features_mb, or point TMPDIR to a larger disk"
        ) from None
