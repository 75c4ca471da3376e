"""What happens to images before a model sees them."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from baffle.core.arrays import F32
from baffle.core.pixels import PixelScale
from baffle.core.seeds import keystream
from baffle.data.dataset import Prepare

MARGIN = 4
"""The most pixels by which an image is shifted."""


def bilinear(old: int, new: int) -> F32:
    """The matrix that resizes a line of `old` pixels to `new`, as image libraries do it (pixel centres aligned)."""
    centres = np.clip((np.arange(new) + 0.5) * old / new - 0.5, 0, old - 1)
    left = np.minimum(centres.astype(np.int64), old - 2)
    matrix = np.zeros((new, old), dtype=np.float32)
    matrix[np.arange(new), left] = 1 - (centres - left)
    matrix[np.arange(new), left + 1] = centres - left
    return matrix


def enlarged(old: int, new: int, scale: PixelScale) -> Prepare:
    """Resizes grey images of old × old bytes, takes their pixels to [0, 1], then applies the scale."""
    enlarge = bilinear(old, new)
    (mean,), (deviation,) = scale.mean, scale.deviation

    def prepare(samples: NDArray[Any]) -> F32:
        wide: F32 = enlarge @ samples.astype(np.float32) @ enlarge.T
        return ((wide / np.float32(255) - np.float32(mean)) / np.float32(deviation))[:, None]

    return prepare


def normalised(scale: PixelScale) -> Prepare:
    """Takes images of bytes, channels first, to [0, 1], then applies the scale to each channel."""
    mean, deviation = (np.array(numbers, np.float32)[:, None, None] for numbers in (scale.mean, scale.deviation))

    def prepare(samples: NDArray[Any]) -> F32:
        scaled: F32 = samples.astype(np.float32) / np.float32(255)
        return (scaled - mean) / deviation

    return prepare


def shifted_and_flipped(samples: NDArray[Any], key: bytes) -> NDArray[Any]:
    """Each image mirrored or not, and moved by up to four pixels each way, with reflected borders: the same as padding
    by reflection, then cropping at random.

    One block of the key's stream decides about one image.
    """
    count, channels, height, width = samples.shape
    noise = keystream(key, range(1), 0, count).reshape(count, 16)
    down, right = (noise[:, i : i + 4].copy().view("<u4").astype(np.int64) % (2 * MARGIN + 1) for i in (0, 4))
    rows = _reflected(np.arange(height) + down - MARGIN, height)
    columns = _reflected(np.arange(width) + right - MARGIN, width)
    mirrored = noise[:, 8] % 2 == 1
    columns[mirrored] = columns[mirrored, ::-1]
    which = np.arange(count)[:, None, None, None]
    moved: NDArray[Any] = samples[
        which, np.arange(channels)[:, None, None], rows[:, None, :, None], columns[:, None, None, :]
    ]
    return moved


def _reflected(places: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    inside: NDArray[np.int64] = (size - 1) - np.abs((size - 1) - np.abs(places))
    return inside
