"""Tasks beyond classification, as plans name them: data sets, models, losses and metrics of a user's own."""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from baffle import Dataset, Source
from baffle.core.samples import PADDING, Array

HERE = __name__
SAMPLES, TESTED = 120, 40
WORDS, LENGTH, TAGS = 12, 6, 3


def _source(x: Any, y: Array, classes: int) -> Source:
    def rows(part: slice) -> Any:
        return {name: array[part] for name, array in x.items()} if isinstance(x, dict) else x[part]

    train, test = slice(TESTED, None), slice(TESTED)
    return Source(Dataset(rows(train), y[train]), Dataset(rows(test), y[test]), classes=classes)


def line() -> Source:
    """One number to predict: linear in five, with a little noise."""
    random = np.random.default_rng(0)
    x = random.normal(size=(SAMPLES, 5)).astype(np.float32)
    return _source(x, x @ np.array([1, -2, 0.5, 0, 1.5]) + 0.1 * random.normal(size=SAMPLES) + 1, classes=0)


def plane() -> Source:
    """Two numbers to predict."""
    random = np.random.default_rng(1)
    x = random.normal(size=(SAMPLES, 4)).astype(np.float32)
    return _source(x, x @ random.normal(size=(4, 2)), classes=0)


def marks() -> Source:
    """Three marks, each there (1) or not."""
    random = np.random.default_rng(2)
    x = random.normal(size=(SAMPLES, 4)).astype(np.float32)
    return _source(x, (x @ random.normal(size=(4, 3)) > 0).astype(np.float32), classes=0)


def blobs() -> Source:
    """Three classes around three points."""
    random = np.random.default_rng(3)
    y = np.arange(SAMPLES) % 3
    x = random.normal(size=(3, 4))[y] * 2 + random.normal(size=(SAMPLES, 4)) * 0.3
    return _source(x.astype(np.float32), y, classes=3)


def sentences() -> Source:
    """A tag for each word, which follows from the word; sentences of different lengths are padded."""
    random = np.random.default_rng(4)
    words = random.integers(0, WORDS, (SAMPLES, LENGTH))
    lengths = random.integers(2, LENGTH + 1, SAMPLES)
    padded = np.arange(LENGTH) >= lengths[:, None]
    return _source(words, np.where(padded, PADDING, words % TAGS), classes=TAGS)


def named() -> Source:
    """A dict of ids and of floats, for a model that takes both."""
    random = np.random.default_rng(5)
    ids, numbers = random.integers(0, WORDS, (SAMPLES, 2)), random.normal(size=(SAMPLES, 3)).astype(np.float32)
    return _source({"ids": ids, "numbers": numbers}, ids.sum(1) > 11 + 4 * numbers[:, 0], classes=2)


def paired() -> Source:
    """The same as a tuple, made by `prepare`."""
    source = named()

    def prepare(stored: dict[str, Array]) -> tuple[Array, ...]:
        return tuple(stored.values())

    train, test = (Dataset(part.samples, part.labels, prepare) for part in (source.train, source.test))
    return Source(train, test, classes=2)


class Tagger(nn.Module):
    """Logits for each word, in either order of axes."""

    def __init__(self, *, last: bool = True) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, TAGS)
        self.last = last

    def forward(self, words: Tensor) -> Tensor:
        logits: Tensor = self.table(words)
        return logits if self.last else logits.movedim(-1, 1)


def tagger() -> nn.Module:
    return Tagger()


def channels_first_tagger() -> nn.Module:
    return Tagger(last=False)


class Both(nn.Module):
    """A model of two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, 4)
        self.last = nn.Linear(7, 2)

    def forward(self, ids: Tensor, numbers: Tensor) -> Tensor:
        assert ids.dtype == torch.int64
        output: Tensor = self.last(torch.cat([self.table(ids).mean(1), numbers], 1))
        return output


def both() -> nn.Module:
    return Both()


def share_of_errors(output: Any, labels: Any) -> Any:
    """1 − accuracy, on PyTorch or NumPy: it has no derivative."""
    errors = output.argmax(1) != labels
    return errors.astype(np.float64) if isinstance(output, np.ndarray) else errors.double()


def in_numpy(output: Tensor, labels: Tensor) -> float:
    """A mean loss that leaves PyTorch."""
    return float(np.mean(output.numpy().argmax(1) != labels.numpy()))


def squared(output: Any, target: Any) -> Any:
    """A loss of the user's own with a derivative; one number for each sample."""
    return ((output[:, 0] - target) ** 2) / 1


def broken(_output: Any, _target: Any) -> float:
    raise ZeroDivisionError("no luck")


def largest_error(outputs: Array, targets: Array) -> float:
    assert isinstance(outputs, np.ndarray)
    return float(np.abs(outputs[:, 0] - targets).max())
