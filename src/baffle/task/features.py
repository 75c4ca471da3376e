"""Frozen backbones: the features that the front of a model computes for a sample are computed once and kept.

The samples of a data set run through the front in fixed pieces, no matter which samples are asked for, so that their
features have the same bits in every run.
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

PIECE = 16  # samples that run through the front together: few enough for a convolutional front to stay in cache
TRAINING = 0.8  # the share of the memory for features that training samples may fill; the rest is for test samples


class Features:
    """The features of a data set's samples, each computed on first use. They are kept in memory if all of them fit into
    `budget` bytes, otherwise in a file that is gone when the process ends."""

    def __init__(self, data: Dataset, front: Callable[[Any], F32], budget: int) -> None:
        self._data, self._front, self._lock = data, front, threading.Lock()
        first = self._computed(0)
        self._kept = _allocate((len(data), *first.shape[1:]), budget)
        self._kept[: len(first)] = first
        self._known = np.zeros(-(-len(data) // PIECE), dtype=bool)
        self._known[0] = True

    def rows(self, indices: I64) -> F32:
        """The features of these samples, one row each."""
        pieces = np.unique(indices // PIECE)
        with self._lock:
            for piece in pieces[~self._known[pieces]].tolist():
                rows = self._computed(piece)
                self._kept[piece * PIECE : piece * PIECE + len(rows)] = rows
                self._known[piece] = True
        return np.asarray(self._kept[indices])

    def _computed(self, piece: int) -> F32:
        indices = np.arange(piece * PIECE, min((piece + 1) * PIECE, len(self._data)))
        return self._front(self._data.batch(indices).x)


def source_of_features(source: Source, front: Front, budget: int) -> Source:
    """The same data set with features instead of samples, for the head of a model. Each part is read on first use."""

    def with_features(data: Dataset, share: float) -> Dataset:
        features = Features(data, front.features, round(budget * share))
        return replace(data, samples=np.arange(len(data)), prepare=features.rows, augment=None)

    shape = front.features(source.example(1).x).shape[1:]
    train, test = (lambda: with_features(source.train, TRAINING)), (lambda: with_features(source.test, 1 - TRAINING))
    labels = source.label_shape
    return Source(train, test, source.classes, source.domains, shape=shape, width=source.width, label_shape=labels)


class Backbones:
    """Remembers the latest data set of features, so that successive runs on the same data with the same front compute
    features once."""

    def __init__(self) -> None:
        self._latest: tuple[Hashable, Source] | None = None

    def source(self, key: Hashable, make: Callable[[], Source]) -> Source:
        """The result of `make`, or its earlier result if the key is the same as last time."""
        if self._latest is None or self._latest[0] != key:
            self._latest = None  # frees the memory of the old features first
            self._latest = key, make()
        return self._latest[1]


def _allocate(shape: tuple[int, ...], budget: int) -> F32:
    size = 4 * int(np.prod(shape))
    if size <= budget:
        return np.empty(shape, np.float32)
    try:
        with tempfile.TemporaryFile() as file:
            file.truncate(size)
            return np.memmap(file, np.float32, "r+", shape=shape)
    except OSError as fault:
        raise DataError(
            f"{size / 2**20:,.0f} MB of features need a file, but there is no space for it: {fault}; "
            "raise run.features_mb, or point TMPDIR to a larger disk"
        ) from None
