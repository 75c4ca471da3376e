"""The window of steps that measure a derivative: between rounding below and curvature above."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baffle.core.arrays import F32
from baffle.core.directions import DISTRIBUTIONS, Directions, dense
from baffle.core.probe import SCHEMES, Loss
from baffle.task.window import TOLERANCE, Window, find_window

N = 50
WEIGHTS = np.linspace(-1, 1, N).astype(np.float32)
DIRECTIONS = Directions(bytes(32), DISTRIBUTIONS["rademacher"])


def window_of(loss: Loss, scheme: str = "forward") -> Window:
    return find_window(loss, WEIGHTS, SCHEMES[scheme], DIRECTIONS, dense(N, 16))


def bowl(curvature: float, grain: float = 0.0) -> Loss:
    """A slope of 1 in every weight, this curvature, and losses that are rounded to multiples of `grain`."""

    def loss(weights: F32) -> float:
        move = weights.astype(np.float64) - WEIGHTS
        exact = float(np.sum(move) + curvature / 2 * np.sum(move**2))
        return round(exact / grain) * grain if grain else exact

    return loss


@settings(max_examples=30)
@given(st.floats(-2, 2))
def test_ten_times_the_curvature_means_a_tenth_of_the_step(exponent: float) -> None:
    """Two steps fewer, or one more or less where the bound lies next to a step."""
    low, high = window_of(bowl(10**exponent)), window_of(bowl(10 ** (exponent + 1)))
    assert 3 <= low.high / high.high <= 32


@settings(max_examples=30)
@given(st.floats(-6, -3))
def test_ten_times_the_grain_means_ten_times_the_least_step(exponent: float) -> None:
    fine, coarse = window_of(bowl(0.0, 10**exponent)), window_of(bowl(0.0, 10 ** (exponent + 1)))
    assert 3 <= coarse.low / fine.low <= 32
    assert coarse.high == fine.high == 1


def test_outside_the_window_scalars_are_off_and_inside_they_are_not() -> None:
    window = window_of(bowl(1.0, 1e-6))
    for sigma, error in window.errors.items():
        assert (error <= TOLERANCE) == (window.low <= sigma <= window.high)
    assert window.low < window.middle < window.high


def test_central_differences_see_no_even_curvature() -> None:
    assert window_of(bowl(100.0), "central").high == 1
    assert window_of(bowl(100.0), "forward").high < 0.01


@pytest.mark.parametrize(
    "loss",
    [lambda weights: float(np.count_nonzero(weights > WEIGHTS + 0.5)), lambda _weights: 1.0, lambda _weights: np.nan],
    ids=["a count", "a constant", "not a number"],
)
def test_a_loss_without_derivatives_has_no_window(loss: Callable[[F32], float]) -> None:
    assert not window_of(loss).smooth


def test_two_windows_meet_where_both_allow() -> None:
    both = Window(1e-6, 1e-3, 1.0).meet(Window(1e-5, 1e-2, 2.0))
    assert (both.low, both.high, both.typical) == (1e-5, 1e-3, 2.0)


def test_windows_that_do_not_meet_leave_the_gap_between_them() -> None:
    apart = Window(1e-6, 1e-5, 1.0).meet(Window(1e-3, 1e-2, 2.0))
    assert (apart.low, apart.high) == (1e-5, 1e-3)
