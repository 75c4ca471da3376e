"""Laws of the estimator: what it estimates, how well, and with how many forward passes."""

import math
from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from baffle.core.arrays import F32, F64
from baffle.core.directions import DISTRIBUTIONS, GAUSSIAN, RADEMACHER, Directions, Distribution, Support, dense
from baffle.core.ports import Batch
from baffle.core.probe import SCHEMES, Probed, Scheme, central_difference, forward_difference
from baffle.core.rebuild import gradient_from_scalars
from baffle.core.ring import Ring
from baffle.core.seeds import Seeds
from baffle.models.networks import lenet
from baffle.runtime.torch.loss import TorchLoss, weights_of

SEEDS = Seeds(11, bytes(32))
ALONE = Ring(clients=1, n_max=1, clip=1000.0)
BOTH_SCHEMES = pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
BOTH_DISTRIBUTIONS = pytest.mark.parametrize("distribution", DISTRIBUTIONS.values(), ids=DISTRIBUTIONS)


def directions_of(number: int, distribution: Distribution = GAUSSIAN) -> Directions:
    return Directions(SEEDS.key("directions", number, 0), distribution)


def moved_along(directions: Directions, k: int, n: int) -> F64:
    """What a probe moves along: K directions over n weights, each times its stretch."""
    rows = directions.draw(range(k), 0, n).astype(np.float64) * directions.distribution.unit
    return rows * directions.stretch(range(k), n)[:, None]


def double(values: object) -> F32:
    """Weights in float64. The probe keeps their type, so that rounding does not disturb the measurement."""
    return cast(F32, np.array(values, dtype=np.float64))


def estimate(probed: Probed[float], directions: Directions, n: int) -> F32:
    """The gradient as a server rebuilds it from one client's scalars."""
    k = len(probed.scalars)
    total = ALONE.decode(ALONE.encode(probed.scalars, k, 1, probed.base), 1)
    assert total.clipped == 0
    return gradient_from_scalars(total.totals, 1, directions, dense(n, k), n, ALONE)


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """The exponent of y ∝ xᵖ."""
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


WAVES = np.array([0.5, 1.0, 1.5, 2.0, 2.5])
WAVE_POINT = np.array([0.9, -0.4, 1.1, 0.5, -0.8])


def waves(weights: F32) -> float:
    """Σ cos(aᵢwᵢ), whose smoothed versions are known in closed form."""
    return float(np.sum(np.cos(WAVES * weights)))


@BOTH_SCHEMES
@pytest.mark.parametrize(
    ("distribution", "damping"),
    [
        # E cos(a(w + σz)) = cos(aw) · exp(−a²σ²/2) for a standard normal z.
        (GAUSSIAN, lambda a, sigma: np.exp(-((a * sigma) ** 2) / 2)),
        # E z·cos(a(w + σz))/σ = −a sin(aw) · sin(aσ)/(aσ) for z = ±1: the loss smoothed over [−σ, σ].
        (RADEMACHER, lambda a, sigma: np.sin(a * sigma) / (a * sigma)),
    ],
    ids=["gaussian", "rademacher"],
)
def test_the_mean_estimate_is_the_gradient_of_the_smoothed_loss(
    scheme: Scheme, distribution: Distribution, damping: Callable[[F64, float], F64]
) -> None:
    sigma, k, keys, n = 0.5, 40, 400, len(WAVES)
    estimates = np.empty((keys, n))
    for number in range(keys):
        directions = directions_of(number, distribution)
        probed = scheme(waves, double(WAVE_POINT), directions, dense(n, k), sigma)
        estimates[number] = estimate(probed, directions, n)
    error = estimates.std(axis=0, ddof=1) / math.sqrt(keys)
    gradient = -WAVES * np.sin(WAVES * WAVE_POINT)
    smoothed = gradient * damping(WAVES, sigma)
    assert np.all(np.abs(estimates.mean(axis=0) - smoothed) < 4.5 * error)
    assert np.max(np.abs(estimates.mean(axis=0) - gradient) / error) > 10


@BOTH_SCHEMES
@BOTH_DISTRIBUTIONS
def test_on_a_quadratic_the_mean_estimate_is_the_gradient_whatever_sigma(
    scheme: Scheme, distribution: Distribution
) -> None:
    n, k, keys = 6, 30, 300
    generator = np.random.default_rng(3)
    root, point = generator.normal(size=(n, n)), generator.normal(size=n)
    hessian = root @ root.T / n

    def loss(weights: F32) -> float:
        return float(weights @ hessian @ weights) / 2

    estimates = np.empty((keys, n))
    for number in range(keys):
        directions = directions_of(number, distribution)
        estimates[number] = estimate(scheme(loss, double(point), directions, dense(n, k), 0.25), directions, n)
    error = estimates.std(axis=0, ddof=1) / math.sqrt(keys)
    assert np.all(np.abs(estimates.mean(axis=0) - hessian @ point) < 4.5 * error)
    assert np.all(error < 0.05 * np.linalg.norm(hessian @ point))


def images(count: int) -> Batch:
    generator = np.random.default_rng(0)
    return Batch(generator.normal(size=(count, 1, 8, 8)).astype(np.float32), generator.integers(0, 10, count))


@BOTH_DISTRIBUTIONS
def test_alignment_with_lenets_gradient_is_the_root_of_k_over_k_plus_n_plus_one(distribution: Distribution) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = lenet((1, 8, 8), 10, channels=(8, 16), head="flatten")
    weights = weights_of(module)
    n, k, keys = len(weights), 64, 16
    assert n == 5994
    runtime, batch = TorchLoss(module), images(16)
    _, gradient = runtime.gradient_on(batch)(weights)
    cosines = []
    for number in range(keys):
        directions = directions_of(number, distribution)
        probed = forward_difference(runtime.on(batch), weights, directions, dense(n, k), 1e-3)
        estimated = estimate(probed, directions, n)
        cosines.append(float(estimated @ gradient / np.linalg.norm(estimated) / np.linalg.norm(gradient)))
    assert np.mean(cosines) == pytest.approx(math.sqrt(k / (k + n + 1)), rel=0.1)


@BOTH_DISTRIBUTIONS
@pytest.mark.parametrize(("scheme", "order"), [(forward_difference, 1), (central_difference, 2)])
def test_the_error_of_a_scalar_falls_with_sigma_by_the_schemes_order(
    scheme: Scheme, order: int, distribution: Distribution
) -> None:
    n, k, directions = len(WAVES), 60, directions_of(0, distribution)
    exact = moved_along(directions, k, n) @ (-WAVES * np.sin(WAVES * WAVE_POINT)) * directions.stretch(range(k), n)
    sigmas = [2.0**-e for e in range(6, 12)]
    errors = [
        float(np.sqrt(np.mean((scheme(waves, double(WAVE_POINT), directions, dense(n, k), s).scalars - exact) ** 2)))
        for s in sigmas
    ]
    assert slope(sigmas, errors) == pytest.approx(order, abs=0.05)


class DeepLinear:
    """A network of two linear layers with one score, h = w₂ W₁ x. The loss is −h."""

    inner, inputs = 4, 3

    def __init__(self) -> None:
        generator = np.random.default_rng(8)
        self.n = self.inner * self.inputs + self.inner
        self.x = generator.normal(size=self.inputs)
        self.weights = double(generator.normal(size=self.n))

    def split(self, flat: NDArray[np.floating]) -> tuple[F64, F64]:
        """W₁ and w₂."""
        first, second = np.split(flat.astype(np.float64), [self.inner * self.inputs])
        return first.reshape(self.inner, self.inputs), second

    def loss(self, weights: F32) -> float:
        first, second = self.split(weights)
        return -float(second @ first @ self.x)

    def parts_along(self, z: F64) -> tuple[float, float]:
        """−(w₂ Z₁ x + z₂ W₁ x), linear in a direction, and −(z₂ Z₁ x), of second order."""
        (first, second), (z1, z2) = self.split(self.weights), self.split(z)
        return -float(second @ z1 @ self.x + z2 @ first @ self.x), -float(z2 @ z1 @ self.x)

    def expected(self, directions: Directions, k: int) -> F64:
        """For each of K directions what both parts contribute to a scalar: the second one still lacks σ."""
        parts = np.array([self.parts_along(z) for z in moved_along(directions, k, self.n)])
        return parts * directions.stretch(range(k), self.n)[:, None]


@BOTH_DISTRIBUTIONS
@pytest.mark.parametrize("sigma", [2.0**-10, 2.0**-4, 1.0, 8.0])
def test_in_a_deep_linear_network_central_differences_are_linear_and_forward_ones_add_sigma_times_the_layers_product(
    distribution: Distribution, sigma: float
) -> None:
    net, directions = DeepLinear(), directions_of(1, distribution)
    # Every step is rounded to float32. Only stretched steps lose bits by that: the others are powers of two.
    tolerance = 2e-6 * max(1.0, sigma) if distribution.on_sphere else 1e-10
    for scheme, second in ((central_difference, 0.0), (forward_difference, sigma)):
        probed = scheme(net.loss, net.weights, directions, dense(net.n, 30), sigma)
        assert probed.scalars == pytest.approx(net.expected(directions, 30) @ [1, second], abs=tolerance)


@BOTH_DISTRIBUTIONS
@pytest.mark.parametrize("layer", [Support(0, 12), Support(12, 16)])
def test_in_a_deep_linear_network_schemes_and_sigmas_agree_along_one_layer(
    distribution: Distribution, layer: Support
) -> None:
    net, directions = DeepLinear(), directions_of(2, distribution)
    first, *others = (
        scheme(net.loss, net.weights, directions, [layer] * 30, sigma).scalars
        for scheme in SCHEMES.values()
        for sigma in (2.0**-8, 1.0, 4.0)
    )
    assert all(scalars == pytest.approx(first, abs=1e-10) for scalars in others)


def test_in_a_deep_linear_network_both_schemes_estimate_the_same_gradient_on_average() -> None:
    net, keys, k, sigma = DeepLinear(), 400, 20, 0.5
    differences = np.empty((keys, net.n))
    for number in range(keys):
        directions = directions_of(number)
        forward, central = (
            estimate(scheme(net.loss, net.weights, directions, dense(net.n, k), sigma), directions, net.n)
            for scheme in (forward_difference, central_difference)
        )
        differences[number] = forward - central
    error = differences.std(axis=0, ddof=1) / math.sqrt(keys)
    assert np.all(error > 0)
    assert np.all(np.abs(differences.mean(axis=0)) < 4.5 * error)


def covariance_error(distribution: Distribution, n: int, k: int) -> float:
    """‖Σ̂ − I‖₂, the mean over four keys."""
    errors = []
    for number in range(4):
        z = directions_of(number, distribution).draw(range(k), 0, n) * distribution.unit
        errors.append(np.linalg.norm(z.T @ z / k - np.eye(n), 2))
    return float(np.mean(errors))


@BOTH_DISTRIBUTIONS
def test_the_covariance_of_directions_nears_the_identity_like_the_root_of_n_over_k(distribution: Distribution) -> None:
    counts, sizes = [512, 1024, 2048, 4096], [40, 80]
    by_k = [covariance_error(distribution, 40, k) for k in counts]
    at_one_ratio = [covariance_error(distribution, n, 64 * n) for n in sizes]
    assert slope(counts, by_k) == pytest.approx(-0.5, abs=0.1)
    assert slope(sizes, at_one_ratio) == pytest.approx(0, abs=0.15)
    # For large n the constant is 2 (Bai and Yin), with corrections of order √(n/K) and n^(−2/3).
    errors = [e / math.sqrt(40 / k) for e, k in zip(by_k, counts, strict=True)]
    assert errors == pytest.approx([2.0] * len(counts), rel=0.2)


@pytest.mark.parametrize("k", [1, 2, 17])
def test_forward_takes_k_plus_one_forwards_and_central_two_k(k: int) -> None:
    calls = 0

    def loss(_: F32) -> float:
        nonlocal calls
        calls += 1
        return 0.0

    def forwards_of(scheme: Scheme, directions: int) -> int:
        nonlocal calls
        calls = 0
        probed = scheme(loss, np.zeros(5, np.float32), directions_of(0), dense(5, directions), 1e-3)
        assert probed.forwards == calls
        return calls

    assert forwards_of(forward_difference, k) == k + 1
    assert forwards_of(central_difference, k) == 2 * k
    twice = forwards_of(forward_difference, 2 * k)
    assert twice - 1 == forwards_of(central_difference, k)


@BOTH_SCHEMES
@BOTH_DISTRIBUTIONS
@pytest.mark.parametrize("at_once", [1, 7, 100, 1 << 30])
def test_scalars_do_not_depend_on_how_many_directions_are_drawn_at_once(
    scheme: Scheme, distribution: Distribution, at_once: int
) -> None:
    weights = np.linspace(-1, 1, 33, dtype=np.float32)
    supports = [*dense(33, 20), *[Support(5, 21)] * 9, Support(0, 1), *dense(33, 3)]

    def loss(w: F32) -> float:
        return float(np.sum(np.cos(w.astype(np.float64))))

    before = scheme(loss, weights, directions_of(0, distribution), supports, 1e-2)
    after = scheme(loss, weights, directions_of(0, distribution), supports, 1e-2, at_once)
    assert after.scalars.tobytes() == before.scalars.tobytes()


@BOTH_DISTRIBUTIONS
def test_scalars_do_not_depend_on_the_order_in_which_directions_are_drawn(distribution: Distribution) -> None:
    weights, k, sigma = np.linspace(-1, 1, 33, dtype=np.float32), 40, 2.0**-7

    def loss(w: F32) -> float:
        return float(np.sum(np.cos(w.astype(np.float64))))

    one_by_one: F64 = np.empty(k)
    directions = directions_of(0, distribution)
    stretch = directions.stretch(range(k), 33)
    for number in np.random.default_rng(0).permutation(k).tolist():
        (z,) = directions.draw(range(number, number + 1), 0, 33)
        moved = z.astype(np.float32) * np.float32(sigma * distribution.unit * stretch[number]) + weights
        one_by_one[number] = (loss(moved) - loss(weights)) / sigma * stretch[number]
    probed = forward_difference(loss, weights, directions, dense(33, k), sigma)
    assert probed.scalars.tobytes() == one_by_one.tobytes()


@BOTH_SCHEMES
def test_many_directions_leave_the_callers_weights_untouched(scheme: Scheme) -> None:
    weights = (np.random.default_rng(0).normal(size=200) * 10.0 ** np.linspace(-30, 3, 200)).astype(np.float32)
    before = weights.tobytes()
    shared: list[bool] = []

    def loss(w: F32) -> float:
        shared.append(np.shares_memory(w, weights))
        return float(np.sum(w))

    scheme(loss, weights, directions_of(0), dense(200, 500), 1e-3)
    assert weights.tobytes() == before
    assert sum(shared) == (1 if scheme is forward_difference else 0)
    weights.flags.writeable = False
    scheme(loss, weights, directions_of(0), [*dense(200, 3), Support(3, 9)], 1e-3)
