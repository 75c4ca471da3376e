"""Scales of pixels: one after another, and numbers that are none."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baffle.core.pixels import PixelScale
from baffle.errors import DataError

means = st.floats(-2, 2)
deviations = st.floats(0.05, 5)


def scales(channels: int) -> st.SearchStrategy[PixelScale]:
    return st.builds(PixelScale, st.tuples(*[means] * channels), st.tuples(*[deviations] * channels))


@given(scales(1) | scales(3), scales(1) | scales(3), st.floats(0, 1))
def test_what_is_left_to_do_after_a_scale_gives_the_wanted_one(
    wanted: PixelScale, applied: PixelScale, pixel: float
) -> None:
    def scaled(value: object, scale: PixelScale) -> object:
        return (np.asarray(value) - scale.mean) / scale.deviation

    once = np.broadcast_to(np.asarray(scaled(pixel, wanted)), 3)
    twice = np.broadcast_to(np.asarray(scaled(scaled(pixel, applied), wanted.after(applied))), 3)
    np.testing.assert_allclose(twice, once, atol=1e-6)


@given(scales(3))
def test_after_the_wanted_scale_nothing_is_left(scale: PixelScale) -> None:
    assert scale.after(scale) == PixelScale((0.0,) * 3, (1.0,) * 3)
    assert scale.after(PixelScale()) == scale


@pytest.mark.parametrize(
    ("mean", "deviation"),
    [((), ()), ((0.5,), (0.5, 0.5)), ((0.5,), (0.0,)), ((0.5,), (-1.0,)), ((float("nan"),), (1.0,))],
)
def test_numbers_that_are_no_scale_are_refused(mean: tuple[float, ...], deviation: tuple[float, ...]) -> None:
    with pytest.raises(DataError, match="a PixelScale needs"):
        PixelScale(mean, deviation)
