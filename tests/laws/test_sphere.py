"""Directions on the sphere: their length, what they estimate, and a server that needs no norm."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from baffle.core import directions as directions_module
from baffle.core.arrays import F32, F64
from baffle.core.directions import GAUSSIAN, SPHERE, Directions, Support, dense
from baffle.core.probe import SCHEMES, Scheme, forward_difference
from baffle.core.rebuild import gradient_from_scalars, rebuild
from baffle.core.ring import Ring, add
from baffle.core.seeds import Seeds

SEEDS = Seeds(5, bytes(32))
BOTH_SCHEMES = pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)


def directions_of(number: int) -> Directions:
    return Directions(SEEDS.key("directions", number, 0), SPHERE)


@settings(max_examples=60)
@given(number=st.integers(0, 2**40), size=st.integers(3, 3000), tail=st.booleans())
def test_a_probe_moves_the_weights_by_sigma_times_the_root_of_n(number: int, size: int, tail: bool) -> None:
    support = Support(0, size - size // 3, (size, size + size // 3)) if tail else Support(0, size)
    lengths = list[float]()

    def loss(moved: F32) -> float:
        lengths.append(float(np.linalg.norm(moved.astype(np.float64))))
        return 0.0

    forward_difference(loss, np.zeros(2 * size, np.float32), directions_of(number), [support] * 2, 0.25)
    assert lengths == pytest.approx([0, *[0.25 * math.sqrt(size)] * 2], rel=1e-6)


def test_a_stretch_does_not_depend_on_how_many_numbers_are_drawn_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    before = directions_of(1).stretch(range(5), 1001)
    for at_once in (1, 7, 1000):
        monkeypatch.setattr(directions_module, "NUMBERS_AT_ONCE", at_once)
        directions_module._stretch.cache_clear()
        assert directions_of(1).stretch(range(5), 1001).tobytes() == before.tobytes()


def test_a_direction_of_zeros_stays_one() -> None:
    directions = directions_of(2)
    zeros = [k for k, (z,) in enumerate(directions.draw(range(50_000), 0, 1)) if z == 0]
    assert zeros
    assert directions.stretch(zeros, 1).tolist() == [1.0] * len(zeros)
    assert Directions(bytes(32), GAUSSIAN).stretch(range(3), 50).tolist() == [1.0] * 3  # others are not stretched


def test_directions_are_uniform_on_the_sphere() -> None:
    """Each coordinate has variance 1 and the kurtosis 3n/(n + 2) of the sphere, and any two are uncorrelated."""
    n, k = 8, 20_000
    directions = directions_of(3)
    u = directions.draw(range(k), 0, n) * SPHERE.unit * directions.stretch(range(k), n)[:, None]
    assert np.allclose((u**2).sum(1), n)
    assert np.all(np.abs(u.T @ u / k - np.eye(n)) < 5 * math.sqrt(2 / k))
    assert np.mean(u**4) == pytest.approx(3 * n / (n + 2), rel=0.02)


@BOTH_SCHEMES
def test_the_server_rebuilds_the_estimate_along_stretched_directions_from_integers(scheme: Scheme) -> None:
    """Σ (u_k · ∇L) u_k / K, from totals and the plain integers z_k."""
    n, k, ring = 40, 25, Ring(clients=1, n_max=1, clip=1000.0)
    slope, directions = np.random.default_rng(0).normal(size=n), directions_of(4)

    def loss(weights: F32) -> float:
        return float(weights.astype(np.float64) @ slope)

    probed = scheme(loss, np.zeros(n, np.float32), directions, dense(n, k), 0.5)
    total = ring.decode(ring.encode(probed.scalars, k, 1, probed.base), 1)
    gradient = gradient_from_scalars(total.totals, 1, directions, dense(n, k), n, ring)
    u: F64 = directions.draw(range(k), 0, n) * SPHERE.unit * directions.stretch(range(k), n)[:, None]
    np.testing.assert_allclose(gradient, (u @ slope) @ u / k, rtol=1e-3, atol=1e-4)
    plain = Directions(directions.key, GAUSSIAN)
    exact = rebuild(total.totals, plain, dense(n, k), n)
    assert rebuild(total.totals, directions, dense(n, k), n, chunk=3, block=7, threads=2).tobytes() == exact.tobytes()


@pytest.mark.slow
def test_with_tiers_and_supports_the_estimate_is_unbiased() -> None:
    """Two clients, one of which answers an eighth of the directions; some directions touch a part of the weights."""
    n, k, few, keys = 12, 32, 4, 1500
    slopes = np.random.default_rng(1).normal(size=(2, n))
    supports = tuple([Support(0, n), Support(0, 6, (8, 10)), Support(6, n), Support(0, n)] * (k // 4))
    ring = Ring(clients=2, n_max=30, clip=1000.0, tier_factor=Fraction(k, few))
    estimates = np.empty((keys, n))
    for number in range(keys):
        directions, vectors = directions_of(number), []
        for slope, tier, samples in zip(slopes, (few, k), (30, 10), strict=True):
            probed = forward_difference(
                lambda w, slope=slope: float(w.astype(np.float64) @ slope),  # type: ignore[misc]
                np.zeros(n, np.float32),
                directions,
                supports[:tier],
                0.25,
            )
            vectors.append(ring.encode(probed.scalars, k, samples, 0.0))
        total = ring.decode(add(vectors), 2)
        assert total.clipped == 0
        estimates[number] = gradient_from_scalars(total.totals, total.weight, directions, supports, n, ring)
    error = estimates.std(axis=0, ddof=1) / math.sqrt(keys)
    wanted = np.array([30, 10]) @ slopes / 40
    assert np.all(np.abs(estimates.mean(axis=0) - wanted) < 4.5 * error)
