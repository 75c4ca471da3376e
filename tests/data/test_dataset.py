"""The pixel scale of a source, checked against its samples."""

import numpy as np
import pytest

from baffle.core.arrays import F32
from baffle.core.pixels import PixelScale
from baffle.data.dataset import Dataset, Source

PIXELS = np.random.default_rng(0).random((20, 3, 4, 4), dtype=np.float32)
PIXELS[0, 0, 0] = 0, 0.5, 1, 1


def source_of(x: F32, scale: PixelScale | None = None) -> Source:
    data = Dataset(x, np.zeros(len(x), np.int64), lambda samples: samples)
    return Source(data, data, classes=2, scale=scale)


def test_a_source_that_states_no_scale_has_pixels_from_0_to_1() -> None:
    assert source_of(PIXELS).pixel_scale == PixelScale()


@pytest.mark.parametrize("scale", [PixelScale((0.5,), (0.25,)), PixelScale((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))])
def test_a_stated_scale_is_accepted_if_it_gives_pixels_from_0_to_1(scale: PixelScale) -> None:
    mean, deviation = (np.array(numbers, np.float32)[:, None, None] for numbers in (scale.mean, scale.deviation))
    assert source_of((PIXELS - mean) / deviation, scale).pixel_scale == scale


@pytest.mark.parametrize(
    ("x", "scale"),
    [
        (PIXELS * 2 - 1, None),
        (PIXELS * 255, None),
        (PIXELS * 2 - 1, PixelScale((127.5,), (127.5,))),
        (PIXELS, PixelScale((0.5, 0.5), (0.5, 0.5))),
        (PIXELS[:, 0, 0], None),
    ],
    ids=["centred, not said", "bytes", "in bytes", "another number of channels", "vectors"],
)
def test_a_scale_that_the_samples_contradict_is_ignored(x: F32, scale: PixelScale | None) -> None:
    assert source_of(x, scale).pixel_scale is None
