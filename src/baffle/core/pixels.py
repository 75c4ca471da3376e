"""The scale of an image's values, with which a model converts them to the scale that its weights expect."""

import math
from dataclasses import dataclass
from itertools import cycle, islice

from baffle.errors import DataError


@dataclass(frozen=True)
class PixelScale:
    """A value of an image is (pixel − mean) / deviation, where a pixel lies between 0 (dark) and 1 (bright).

    Mean and deviation have one number for every channel, or one number for all channels.
    """

    mean: tuple[float, ...] = (0.0,)
    deviation: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        mean, deviation = self.mean, self.deviation
        if not mean or len(mean) != len(deviation):
            given = f"{len(mean)} and {len(deviation)}"
            raise DataError(f"a PixelScale needs a mean and a deviation for every channel, got {given}")
        if not all(map(math.isfinite, mean)) or not all(0 < number < math.inf for number in deviation):
            raise DataError(f"a PixelScale needs finite means and positive deviations, got {mean} and {deviation}")

    @property
    def channels(self) -> int:
        """The number of channels; 1 stands for any number of channels."""
        return len(self.mean)

    def after(self, applied: "PixelScale") -> "PixelScale":
        """The scale that remains to be applied to values that `applied` has scaled already: with p = v·d' + m', (p − m)
        / d is (v − (m − m') / d') / (d / d')."""
        channels = max(self.channels, applied.channels)
        mean, deviation, mean_applied, deviation_applied = (
            tuple(islice(cycle(numbers), channels))
            for numbers in (self.mean, self.deviation, applied.mean, applied.deviation)
        )
        return PixelScale(
            tuple((m - m0) / d0 for m, m0, d0 in zip(mean, mean_applied, deviation_applied, strict=True)),
            tuple(d / d0 for d, d0 in zip(deviation, deviation_applied, strict=True)),
        )
