"""The probe moves exactly the weights that it should, counts its forwards, and refuses a loss that is not finite."""

import math
from collections.abc import Callable

import numpy as np
import pytest

from baffle.core.arrays import F32
from baffle.core.directions import DISTRIBUTIONS, GAUSSIAN, RADEMACHER, Directions, Distribution, Support, blocks, dense
from baffle.core.probe import SCHEMES, Scheme, central_difference, forward_difference, losses_along, moves

KEY = bytes(range(32))
N = 11
BOTH_SCHEMES = pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
BOTH_DISTRIBUTIONS = pytest.mark.parametrize("distribution", DISTRIBUTIONS.values(), ids=DISTRIBUTIONS)


def some_weights(n: int = N) -> F32:
    weights = np.linspace(-1.3, 1.7, n, dtype=np.float32)
    weights.flags.writeable = False
    return weights


def remembering(seen: list[F32]) -> Callable[[F32], float]:
    """A loss that appends a copy of the weights to `seen` and returns how many it has seen."""

    def loss(weights: F32) -> float:
        seen.append(weights.copy())
        return float(len(seen))

    return loss


@BOTH_DISTRIBUTIONS
def test_a_linear_loss_gives_its_slope_along_every_direction(distribution: Distribution) -> None:
    slope = np.arange(-5, 6) / 8
    directions = Directions(KEY, distribution)
    stretch = directions.stretch(range(20), N)
    expected = (directions.draw(range(20), 0, N) * distribution.unit @ slope) * stretch**2
    for scheme in SCHEMES.values():
        probed = scheme(
            lambda w: float(w.astype(np.float64) @ slope), some_weights(), directions, dense(N, 20), 2.0**-6
        )
        assert probed.scalars == pytest.approx(expected, abs=4e-4)
        assert probed.scalars.dtype == np.float64


def test_scalars_do_not_depend_on_sigma_when_the_loss_is_linear() -> None:
    slope, weights = np.ones(N), np.zeros(N, np.float32)
    coarse, fine = (
        forward_difference(lambda w: float(w @ slope), weights, Directions(KEY, GAUSSIAN), dense(N, 5), sigma).scalars
        for sigma in (2.0**-2, 2.0**-12)
    )
    assert coarse == pytest.approx(fine, rel=1e-6)


def test_forward_difference_takes_the_loss_at_the_weights_and_once_along_each_direction() -> None:
    seen: list[F32] = []
    probed = forward_difference(remembering(seen), some_weights(), Directions(KEY, RADEMACHER), dense(N, 3), 0.5)
    assert probed.forwards == len(seen) == 4
    assert probed.base == 1.0
    assert probed.scalars.tolist() == [(2 - 1) / 0.5, (3 - 1) / 0.5, (4 - 1) / 0.5]
    assert seen[0].tobytes() == some_weights().tobytes()


def test_central_difference_takes_the_loss_on_both_sides_of_the_weights() -> None:
    seen: list[F32] = []
    probed = central_difference(remembering(seen), some_weights(), Directions(KEY, RADEMACHER), dense(N, 3), 0.5)
    assert probed.forwards == len(seen) == 6
    assert probed.base == pytest.approx(3.5)
    assert probed.scalars.tolist() == [-3.0, -3.0, -3.0]
    for ahead, behind in zip(seen[:3], seen[3:], strict=True):
        assert ahead + behind == pytest.approx(2 * some_weights(), abs=1e-6)


class OwnScratch:
    """A loss with its own memory for weights, which notes whether it was called with another array."""

    def __init__(self, dtype: type = np.float32) -> None:
        self.scratch: F32 = np.zeros(N, dtype)
        self.copied = list[bool]()

    def __call__(self, weights: F32) -> float:
        self.copied.append(weights is not self.scratch)
        return float(np.sum(weights.astype(np.float64) ** 3))


@BOTH_SCHEMES
def test_a_loss_with_its_own_scratch_copies_nothing_along_the_directions(scheme: Scheme) -> None:
    loss, weights, directions = OwnScratch(), some_weights(), Directions(KEY, GAUSSIAN)
    expected = scheme(lambda w: float(np.sum(w.astype(np.float64) ** 3)), weights, directions, dense(N, 7), 0.1)
    probed = scheme(loss, weights, directions, dense(N, 7), 0.1)
    assert probed.scalars.tobytes() == expected.scalars.tobytes()
    assert sum(loss.copied) == (1 if scheme is forward_difference else 0)
    assert loss.scratch.tobytes() == weights.tobytes()


def test_a_scratch_of_another_precision_is_left_alone() -> None:
    loss, weights = OwnScratch(np.float64), some_weights()
    losses_along(loss, weights, Directions(KEY, GAUSSIAN), dense(N, 3), 0.1)
    assert all(loss.copied)
    assert not loss.scratch.any()


@BOTH_DISTRIBUTIONS
def test_the_loss_sees_exactly_the_weights_plus_one_direction(distribution: Distribution) -> None:
    seen: list[F32] = []
    supports = [*dense(N, 40), Support(3, 8), Support(3, 8), Support(0, 2), Support(1, 4, (5, 7)), *dense(N, 2)]
    weights, directions, sigma = some_weights(), Directions(KEY, distribution), 1e-3
    forward_difference(remembering(seen), weights, directions, supports, sigma)
    order = [k for numbers, _ in blocks(supports) for k in numbers]
    for moved, k in zip(seen[1:], order, strict=True):
        support, expected = supports[k], weights.copy()
        (z,), (stretch,) = directions.draw([k], 0, support.size), directions.stretch([k], support.size)
        scale = np.float32(sigma * distribution.unit * stretch)
        expected[[*range(support.start, support.stop), *range(*support.tail)]] += z.astype(np.float32) * scale
        assert moved.dtype == np.float32
        assert moved.tobytes() == expected.tobytes()


@pytest.mark.parametrize("block", [1, 7, N, 3 * N + 1])
def test_the_size_of_a_block_changes_no_bit_of_the_moved_weights(block: int) -> None:
    supports = [*dense(N, 5), Support(3, 8), Support(1, 4, (5, 7)), *dense(N, 2)]
    weights, directions = some_weights(), Directions(KEY, GAUSSIAN)

    def moved(block: int) -> dict[int, bytes]:
        scratch = weights.copy()
        return {k: scratch.tobytes() for k in moves(scratch, weights, directions, supports, 1e-3, block)}

    assert moved(block) == moved(1000 * N)


@BOTH_SCHEMES
def test_a_prefix_of_the_directions_gives_a_prefix_of_the_scalars(scheme: Scheme) -> None:
    def loss(weights: F32) -> float:
        return float(np.sum(np.cos(weights.astype(np.float64))))

    whole, part = (scheme(loss, some_weights(), Directions(KEY, GAUSSIAN), dense(N, k), 0.1).scalars for k in (30, 7))
    assert np.array_equal(whole[:7], part)


@BOTH_SCHEMES
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("when", [1, 2, 5])
def test_a_loss_that_is_not_finite_shows_in_what_follows_and_stops_nothing(
    scheme: Scheme, bad: float, when: int
) -> None:
    """A probe that stopped early would tell by its time."""
    calls = 0

    def loss(_: F32) -> float:
        nonlocal calls
        calls += 1
        return bad if calls == when else 0.0

    with np.errstate(invalid="ignore"):
        probed = scheme(loss, some_weights(), Directions(KEY, GAUSSIAN), dense(N, 4), 0.1)
    assert calls == probed.forwards
    assert not (math.isfinite(probed.base) and np.isfinite(probed.scalars).all())
