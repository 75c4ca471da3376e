"""The probe moves exactly the weights that it should, and a loss that is not finite stops nothing. `baffle.estimate`
gives the gradient of functions whose gradient is known."""

import doctest
import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, strategies as st

import baffle
from baffle.core import probe
from baffle.core.arrays import F32, F64
from baffle.core.directions import (
    DISTRIBUTIONS,
    GAUSSIAN,
    RADEMACHER,
    Directions,
    Distribution,
    Support,
    blocks,
    dense,
    distribution_names,
)
from baffle.core.probe import SCHEMES, InPlace, Scheme, central_difference, forward_difference
from baffle.core.samples import Array

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


def test_a_scheme_takes_the_loss_at_the_weights_or_on_both_sides_of_them() -> None:
    seen: list[F32] = []
    probed = forward_difference(remembering(seen), some_weights(), Directions(KEY, RADEMACHER), dense(N, 3), 0.5)
    assert (probed.base, probed.scalars.tolist()) == (1.0, [(2 - 1) / 0.5, (3 - 1) / 0.5, (4 - 1) / 0.5])
    assert seen[0].tobytes() == some_weights().tobytes()
    seen.clear()
    probed = central_difference(remembering(seen), some_weights(), Directions(KEY, RADEMACHER), dense(N, 3), 0.5)
    assert (probed.base, probed.scalars.tolist()) == (3.5, [-3.0, -3.0, -3.0])
    for ahead, behind in zip(seen[:3], seen[3:], strict=True):
        assert ahead + behind == pytest.approx(2 * some_weights(), abs=1e-6)


@BOTH_SCHEMES
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_loss_with_its_own_scratch_of_the_same_precision_is_moved_in_place(scheme: Scheme, dtype: type) -> None:
    weights, directions, copied = some_weights(), Directions(KEY, GAUSSIAN), list[bool]()

    class Copied(InPlace[float]):
        def __call__(self, weights: F32) -> float:
            copied.append(weights is not self.scratch)
            return super().__call__(weights)

    scratch: F32 = np.zeros(N, dtype)
    loss = Copied(scratch, lambda: float(np.sum(scratch.astype(np.float64) ** 3)))
    expected = scheme(lambda w: float(np.sum(w.astype(np.float64) ** 3)), weights, directions, dense(N, 7), 0.1)
    probed = scheme(loss, weights, directions, dense(N, 7), 0.1)
    assert probed.scalars.tobytes() == expected.scalars.tobytes()
    in_place = 1 if scheme is forward_difference else 0
    assert sum(copied) == (in_place if dtype is np.float32 else len(copied))


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


@BOTH_SCHEMES
@pytest.mark.parametrize("bad", [math.nan, -math.inf])
@pytest.mark.parametrize("when", [1, 5])
def test_a_loss_that_is_not_finite_shows_in_what_follows_and_stops_nothing(
    scheme: Scheme, bad: float, when: int
) -> None:
    """If a probe stopped early, its time would give the loss away."""
    calls = 0

    def loss(_: F32) -> float:
        nonlocal calls
        calls += 1
        return bad if calls == when else 0.0

    with np.errstate(invalid="ignore"):
        probed = scheme(loss, some_weights(), Directions(KEY, GAUSSIAN), dense(N, 4), 0.1)
    assert calls == probed.forwards
    assert not (math.isfinite(probed.base) and np.isfinite(probed.scalars).all())


# The estimator on its own


def test_the_example_in_its_docstring_runs() -> None:
    assert doctest.testmod(probe) == (0, 6)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("distribution", distribution_names())
def test_on_a_quadratic_it_is_unbiased(scheme: str, distribution: str) -> None:
    """The mean over many keys is the gradient, within three standard errors."""
    curvature, start = np.diag([1.0, 2.0, 3.0, 0.5]), np.array([0.3, -1.0, 0.7, 2.0])
    gradient: F64 = curvature @ start

    def bowl(weights: Array) -> float:
        return float(weights @ curvature @ weights) / 2

    estimates = np.array(
        [baffle.estimate(bowl, start, key, 4, 1e-4, scheme=scheme, distribution=distribution) for key in range(2000)]
    )
    error = estimates.std(0) / np.sqrt(len(estimates))
    assert (np.abs(estimates.mean(0) - gradient) < 3.5 * error + 1e-3).all()


@given(st.integers(1, 40), st.integers(1, 9), st.integers(0, 2**70), st.sampled_from(sorted(SCHEMES)))
def test_on_a_linear_function_sigma_does_not_matter_and_the_rest_is_projection(
    n: int, k: int, key: int, scheme: str
) -> None:
    """Then D_k is exactly z_k · a, so the estimate is the mean of (z_k · a) z_k, whatever σ is."""
    slope = np.random.default_rng(n).normal(size=n)
    small, large = (
        baffle.estimate(lambda w: float(slope @ w), np.zeros(n), key, k, sigma, scheme=scheme) for sigma in (1e-3, 10.0)
    )
    np.testing.assert_allclose(small, large, atol=1e-9)
    alone = baffle.estimate(lambda w: float(slope[0] * w[0]), np.zeros(1), key, k, 1.0, scheme=scheme)
    np.testing.assert_allclose(alone, slope[:1], atol=1e-12)


def test_the_estimate_has_the_shape_and_type_of_the_weights_and_follows_from_the_key() -> None:
    seen = set[tuple[int, ...]]()

    def loss(weights: Array) -> float:
        seen.add(weights.shape)
        return float(np.sum(weights**2))

    weights = np.ones((2, 3, 4), np.float32)
    one, same, other = (baffle.estimate(loss, weights, key, 5, 0.01) for key in (b"a", b"a", b"b"))
    assert one.dtype == np.float32
    assert {one.shape} == seen == {(2, 3, 4)}
    assert one.tobytes() == same.tobytes() != other.tobytes()
    assert baffle.estimate(loss, weights.astype(np.float64), bytes(32), 5, 0.01).dtype == np.float64
    assert (weights == 1).all()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"scheme": "backward"}, "scheme: expected one of 'forward', 'central', got 'backward'"),
        (
            {"distribution": "cauchy"},
            "distribution: expected one of 'gaussian', 'rademacher', 'sphere', 'outer', got 'cauchy'",
        ),
        ({"k": 0}, "expected at least one direction and a positive sigma, got k = 0"),
        ({"sigma": 0.0}, "and sigma = 0$"),
    ],
)
def test_what_makes_no_sense_is_refused(settings: dict[str, object], says: str) -> None:
    with pytest.raises(baffle.BaffleError, match=says):
        baffle.estimate(lambda _: 0.0, np.zeros(2), 0, **({"k": 1, "sigma": 1.0} | settings))  # type: ignore[arg-type]


def test_a_key_or_a_loss_of_another_kind_is_refused() -> None:
    with pytest.raises(baffle.BaffleError, match="key: expected bytes or a whole number, got 'abc'"):
        baffle.estimate(lambda _: 0.0, np.zeros(2), "abc", 1, 1.0)  # type: ignore[arg-type]
    with pytest.raises(baffle.BaffleError, match="loss: expected a function that returns one number, got ndarray"):
        baffle.estimate(lambda w: w, np.zeros(2), 0, 1, 1.0)  # type: ignore[arg-type, return-value]
    assert baffle.estimate(lambda w: w[:1].sum(), np.zeros(2), 0, 1, 1.0).shape == (2,)
