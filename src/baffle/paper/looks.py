"""A small data set with four domains that needs no files, for smoke tests: a part of the digits, in four looks.

Smoke plans of table3 name this module, so renaming it would change their digests.
"""

import numpy as np

from baffle.core.arrays import F32, I64
from baffle.core.pixels import PixelScale
from baffle.data.sources import Dataset, Source, load

LOOKS = ("plain", "mirrored", "negative", "turned")

SCALE = PixelScale((0.5,), (0.27,))  # takes the digits' values and their negatives, -1.85 to 1.85, to [0, 1]
SIDE = 32  # pixels a side: the smallest images that a MobileNet takes


def digits_in_four_looks() -> Source:
    """160 digits for training and 80 for testing, a quarter of them in each look, in three channels."""
    digits = load("digits")
    return Source(_part(digits.train, 160), _part(digits.test, 80), digits.classes, LOOKS, SCALE)


def _part(digits: Dataset, count: int) -> Dataset:
    domain_of: I64 = np.arange(count) % len(LOOKS)
    batch = digits.batch(np.arange(count))
    looks = (
        (image, image[:, ::-1], -image, np.rot90(image))[look]  # in the order of LOOKS
        for image, look in zip(batch.x[:, 0], domain_of, strict=True)
    )
    return Dataset(np.stack(list(looks)), batch.y, _enlarged, domain_of=domain_of)


def _enlarged(images: F32) -> F32:
    times = SIDE // images.shape[-1]
    large = images.repeat(times, axis=1).repeat(times, axis=2)
    return np.ascontiguousarray(np.repeat(large[:, None], 3, axis=1))
