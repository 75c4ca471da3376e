"""The method alone: `baffle.estimate` on functions whose gradient is known."""

import doctest

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import baffle
from baffle.core import estimate as module
from baffle.core.arrays import F64
from baffle.core.directions import distribution_names
from baffle.core.probe import SCHEMES
from baffle.core.samples import Array

BOTH_SCHEMES = pytest.mark.parametrize("scheme", SCHEMES)
EVERY_DISTRIBUTION = pytest.mark.parametrize("distribution", distribution_names())


def test_the_example_in_its_docstring_runs() -> None:
    assert doctest.testmod(module) == (0, 6)


@BOTH_SCHEMES
@EVERY_DISTRIBUTION
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


def test_a_function_without_a_derivative_has_an_estimate() -> None:
    """Rounded to steps, a slope is still seen by moves larger than a step."""
    estimates = [
        baffle.estimate(lambda w: float(np.round(4 * w[0]) / 4), np.array([0.1]), key, 1, 2.0, scheme="central")
        for key in range(4)
    ]
    assert np.allclose(estimates, 1, atol=0.13)


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
