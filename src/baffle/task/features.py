"""A frozen backbone: what the front of a model says of a sample is computed once and kept.

The samples of a data set go through the front in fixed pieces, whoever asks for which of them, so that their features
have the same bits in every run.
"""

import tempfile
import threading
from collections.abc import Callable, Hashable
from dataclasses import replace
from hashlib import sha256
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from baffle.core.arrays import F32, I64
from baffle.data.sources import Dataset, Source
from baffle.errors import DataError
from baffle.runtime.torch.fast_forward import Quick
from baffle.runtime.torch.stages import pipeline_of

PIECE = 16
"""Samples that go through the front together: few enough for a convolutional front to stay in cache."""


class Halves(NamedTuple):
    """A model in two: a front without trained weights, and the head behind it, which has them all."""

    front: nn.Module
    head: nn.Module


def halves(module: nn.Module, sample: F32) -> Halves | None:
    """A model's frozen front and its head; none where nothing worth keeping is frozen.

    The front must hold parameters, or keeping its output would save nothing, and treat every sample alone.
    """
    if all(parameter.requires_grad for parameter in module.parameters()):
        return None
    pipeline = pipeline_of(module.eval(), torch.from_numpy(sample))
    if pipeline is None:
        return None
    first = next((i for i, stage in enumerate(pipeline.stages) if stage.start < stage.stop), 0)
    front = nn.Sequential(*(stage.module for stage in pipeline.stages[:first]))
    if not all(stage.separate for stage in pipeline.stages[:first]) or not list(front.parameters()):
        return None
    head = nn.Sequential(*(stage.module for stage in pipeline.stages[first:]))
    return Halves(front, head)


class Features:
    """The features of a data set's samples, each computed when it is first asked for.

    They are kept in memory if they take at most `budget` bytes, and else in a file that vanishes with the process.
    """

    def __init__(self, data: Dataset, front: Callable[[F32], F32], budget: int) -> None:
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


def source_of_features(source: Source, front: nn.Module, budget: int, device: str = "cpu") -> Source:
    """The same data set, as the head of a model sees it."""
    quick, alone = Quick(front.to(device).eval(), plain=device != "cpu"), threading.Lock()
    share = len(source.test) / (len(source.train) + len(source.test))

    @torch.inference_mode()
    def features(x: F32) -> F32:
        with alone:
            return np.asarray(quick(quick.arranged(torch.from_numpy(x).to(device))).cpu().numpy())

    def seen(data: Dataset, part: float) -> Dataset:
        kept = Features(data, features, round(budget * part))
        return replace(data, samples=np.arange(len(data)), prepare=kept.rows, augment=None)

    return replace(source, train=seen(source.train, 1 - share), test=seen(source.test, share))


class Backbones:
    """Remembers the newest data set as a front saw it, so that runs one after the other, on the same data behind the
    same front, compute its features once."""

    def __init__(self) -> None:
        self._newest: tuple[Hashable, Source] | None = None

    def source(self, data: Hashable, front: nn.Module, make: Callable[[], Source]) -> Source:
        """What `make` gives, or gave for the same data (as its name tells) and the same front."""
        key = data, repr(front), _digest(front)
        if self._newest is None or self._newest[0] != key:
            self._newest = None
            self._newest = key, make()
        return self._newest[1]


def _digest(front: nn.Module) -> bytes:
    digest = sha256()
    for name, tensor in front.state_dict().items():
        digest.update(name.encode() + tensor.cpu().contiguous().numpy().tobytes())
    return digest.digest()


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
