"""The data of benchmarks/privacy.py: whole, and with training samples in the place of the test samples, for choices."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from baffle import Dataset, Source
from baffle.core.arrays import F32, I64
from baffle.core.seeds import permutation
from baffle.data.handwriting import MNIST, digits, mnist

HELD_OUT = 5
"""One in so many training samples judges the choices."""


def writers(data: Path | None) -> Source:
    """MNIST in 14 × 14 pixels, the means of four each, so that softmax regression has 1,970 weights instead of 10,250:
    noise costs less on fewer weights. Nothing about the samples decides how."""
    return Source(
        lambda: _smaller(mnist(data).train),
        lambda: _smaller(mnist(data).test),
        classes=10,
        scale=MNIST,
        shape=(1, 14, 14),
    )


def digits_to_choose_on(data: Path | None) -> Source:
    return _to_choose_on(digits(data))


def writers_to_choose_on(data: Path | None) -> Source:
    return _to_choose_on(writers(data))


def _to_choose_on(source: Source) -> Source:
    whole = source.train
    held_out, rest = np.split(permutation(bytes([1]) * 32, len(whole)), [len(whole) // HELD_OUT])

    def part(chosen: I64) -> Dataset:
        return whole.rows(chosen)

    return Source(
        lambda: part(rest),
        lambda: part(held_out),
        classes=10,
        scale=source.scale,
        shape=source.shape,
    )


def _smaller(whole: Dataset) -> Dataset:
    def prepare(samples: NDArray[Any]) -> F32:
        pixels = samples.reshape(-1, 1, 14, 2, 14, 2).mean((3, 5), dtype=np.float32) / np.float32(255)
        scaled: F32 = (pixels - np.float32(MNIST.mean[0])) / np.float32(MNIST.deviation[0])
        return scaled

    return Dataset(whole.samples, whole.labels, prepare, writer_of=whole.writer_of)
