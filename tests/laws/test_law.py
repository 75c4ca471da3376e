"""The law of an estimate, against estimates from real gaussian directions: mean, spread and cosines."""

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from baffle.core import law
from baffle.core.arrays import F32, F64
from baffle.core.directions import GAUSSIAN, Directions, Support, dense, grouped
from baffle.core.ports import Batch
from baffle.core.probe import SCHEMES
from baffle.core.rebuild import gradient_from_scalars
from baffle.core.ring import Ring
from baffle.core.seeds import Seeds
from baffle.core.update import adam
from baffle.models.networks import lenet
from baffle.runtime.torch.loss import TorchLoss, weights_of

SEEDS = Seeds(17, bytes(32))
K = 12
SURE = 5.0  # standard errors; chance reaches them once in a million


def directions_of(number: int, purpose: str = "law") -> Directions:
    return Directions(SEEDS.key("directions" if purpose == "law" else "local", number), GAUSSIAN)


def from_scalars(gradient: F32, number: int, supports: Sequence[Support]) -> F32:
    """An estimate from exact scalars along real directions, of keys that the law does not use."""
    directions, exact = directions_of(number, "real"), np.empty(len(supports))
    for support, numbers in grouped(supports).items():
        z = directions.over(support, numbers) * GAUSSIAN.unit
        exact[numbers] = sum(z[:, here] @ gradient[weights].astype(np.float64) for weights, here in support.parts())
    return rebuilt(exact, directions, supports, len(gradient))


def rebuilt(scalars: F64, directions: Directions, supports: Sequence[Support], n: int) -> F32:
    ring = Ring(clients=1, n_max=1, clip=float(np.abs(scalars).max()))
    totals = ring.decode(ring.encode(scalars, len(scalars), 1, 0.0), 1).totals
    return gradient_from_scalars(totals, 1, directions, supports, n, ring)


def drawn(gradient: F32, number: int, supports: Sequence[Support]) -> F32:
    return law.draw(gradient, directions_of(number), supports)


def gap(left: F64, right: F64) -> float:
    """Kolmogorov and Smirnov's distance of two samples of equal size, in units that chance exceeds once in a million
    at 2.7."""
    both = np.sort(np.concatenate([left, right]))
    shares = [np.searchsorted(np.sort(sample), both, side="right") / len(sample) for sample in (left, right)]
    return float(np.abs(shares[0] - shares[1]).max() * math.sqrt(len(left) / 2))


def along_and_cosines(estimates: F64, gradient: F32) -> tuple[F64, F64]:
    """How far each estimate reaches along the gradient, as a share of its length, and their cosines."""
    length = float(np.linalg.norm(gradient))
    along = estimates @ gradient / length
    return along / length, along / np.linalg.norm(estimates, axis=1)


def require_same_law(real: F64, law: F64, gradient: F32) -> None:
    for left, right in zip(along_and_cosines(real, gradient), along_and_cosines(law, gradient), strict=True):
        assert gap(left, right) < 2.7


GRADIENT = np.random.default_rng(1).normal(size=40).astype(np.float32)


@pytest.mark.parametrize("make", [from_scalars, drawn])
def test_mean_and_covariance_along_and_across_the_gradient(make: Callable[..., F32]) -> None:
    """ĝ/|g| has the mean e, the variance 2/K along e and 1/K in every direction across it, and no covariance."""
    keys, n = 2000, len(GRADIENT)
    length = float(np.linalg.norm(GRADIENT))
    basis = np.linalg.qr(np.column_stack([GRADIENT, np.eye(n)[:, 1:]]).astype(np.float64))[0]
    basis[:, 0] = GRADIENT / length
    found = np.array([make(GRADIENT, number, dense(n, K)) for number in range(keys)]) @ basis / length
    means, covariance = found.mean(axis=0), np.cov(found.T)
    expected = np.full(n, 1 / K)
    expected[0] = 2 / K
    assert np.all(np.abs(means - np.eye(n)[0]) < SURE * np.sqrt(expected / keys))
    # A variance has the relative error √(kurtosis / keys). S/K is χ²; across, mixing over S adds a little.
    errors = np.sqrt(np.where(np.arange(n) == 0, 2 + 12 / K, 2 + 6 / K) / keys)
    assert np.all(np.abs(np.diag(covariance) / expected - 1) < SURE * errors)
    assert abs(np.diag(covariance)[1:].mean() * K - 1) < 0.02
    off = covariance - np.diag(np.diag(covariance))
    assert np.abs(off).max() < 1.5 * SURE * math.sqrt(2) / K / math.sqrt(keys)


@pytest.mark.parametrize(
    "supports",
    [
        dense(40, K),
        (Support(0, 10),) * 3 + (Support(10, 40),) * 9,
        (Support(0, 5, (30, 35)),) * 4 + (Support(5, 30),) * 6 + (Support(35, 40),) * 2,
        (Support(0, 40),) * 5 + (Support(10, 25),) * 7,  # one within the other
    ],
    ids=["dense", "layers", "tails", "overlapping"],
)
def test_each_block_has_the_law_of_its_own_directions(supports: tuple[Support, ...]) -> None:
    keys = 500
    real = np.array([from_scalars(GRADIENT, number, supports) for number in range(keys)], np.float64)
    ours = np.array([drawn(GRADIENT, number, supports) for number in range(keys)], np.float64)
    require_same_law(real, ours, GRADIENT)
    for support in set(supports):
        here = np.concatenate([np.arange(weights.start, weights.stop) for weights, _ in support.parts()])
        require_same_law(real[:, here], ours[:, here], GRADIENT[here])
    variances, own = real.var(axis=0), ours.var(axis=0)
    assert np.all(np.abs(own / variances - 1) < SURE * math.sqrt(2 * (2 + 12 / 3) / keys))  # of 3 directions or more


def test_a_gradient_of_zeros_and_weights_that_no_direction_touches_give_zeros() -> None:
    zeros = np.zeros(40, np.float32)
    assert not drawn(zeros, 0, dense(40, K)).any()
    assert not drawn(GRADIENT, 0, ()).any()
    half = GRADIENT.copy()
    half[:20] = 0
    estimate = drawn(half, 0, (Support(0, 20),) * 3 + (Support(20, 30),) * 3)
    assert not estimate[:20].any()
    assert estimate[20:30].all()
    assert not estimate[30:].any()


def test_the_law_scales_with_the_gradient_and_no_bit_depends_on_the_block() -> None:
    supports = (Support(0, 5, (30, 40)),) * 4 + (Support(5, 30),) * 60
    estimate = drawn(GRADIENT, 3, supports)
    for block in (1, 7, 64):
        assert law.draw(GRADIENT, directions_of(3), supports, block=block).tobytes() == estimate.tobytes()
    assert (drawn(GRADIENT * np.float32(2**-40), 3, supports) == estimate * np.float32(2**-40)).all()
    for tiny in (1e-44, 1e37):
        assert np.isfinite(drawn(np.full(40, tiny, np.float32), 3, supports)).all()
    assert (drawn(GRADIENT, 4, supports) != estimate).all()


def test_many_directions_lead_to_the_gradient_itself() -> None:
    estimate = drawn(GRADIENT, 0, dense(40, 1_000_000))
    np.testing.assert_allclose(estimate, GRADIENT, atol=SURE * 1e-3 * float(np.linalg.norm(GRADIENT)))


# Against probes of real nets


class Attention(nn.Module):
    """One layer of attention over four rows of an image of 8 × 8."""

    def __init__(self, activation: type[nn.Module]) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)
        self.attention, self.activation = nn.MultiheadAttention(8, 2, batch_first=True), activation()
        self.wide, self.narrow, self.last = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x[:, 0])
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        output: Tensor = self.last((x + self.narrow(self.activation(self.wide(x)))).mean(1))
        return output


def _lenet(activation: str) -> nn.Module:
    return lenet((1, 8, 8), 10, channels=(2, 4), head="flatten", activation=activation)


def _attention(activation: str) -> nn.Module:
    return Attention(nn.ReLU if activation == "relu" else nn.Hardswish)


NETS = {"lenet": _lenet, "transformer": _attention}


def compare(net: str, activation: str, steps: int, scheme: str, keys: int) -> None:
    """Estimates from forward passes, against those that the law draws around the gradient in evaluation mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = NETS[net](activation)
    random = np.random.default_rng(0)
    batch = Batch(random.normal(size=(16, 1, 8, 8)).astype(np.float32), random.integers(0, 10, 16))
    weights, runtime, step = weights_of(module), TorchLoss(module), adam(0.01)
    state = step.init(weights)
    for _ in range(steps):
        state, change = step.update(state, runtime.gradient_on(batch)(weights)[1], weights)
        weights = weights + change
    _, gradient = runtime.gradient_on(batch, None)(weights)
    n, loss = len(weights), runtime.on(batch)
    real, ours = np.empty((keys, n)), np.empty((keys, n))
    for number in range(keys):
        directions = directions_of(number, "real")
        probed = SCHEMES[scheme](loss, weights, directions, dense(n, K), 1e-3)
        real[number] = rebuilt(probed.scalars, directions, dense(n, K), n)
        ours[number] = drawn(gradient, number, dense(n, K))
    require_same_law(real, ours, gradient)
    lengths = [float((estimates**2).sum(axis=1).mean()) for estimates in (real, ours)]
    assert lengths[1] / lengths[0] == pytest.approx(1, abs=SURE * math.sqrt(2 * 2 / K / keys))


@pytest.mark.parametrize(("net", "activation", "steps"), [("lenet", "hardswish", 0), ("transformer", "relu", 20)])
def test_real_probes_of_a_net_have_this_law(net: str, activation: str, steps: int) -> None:
    compare(net, activation, steps, "forward", keys=80)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("steps", [0, 40])
@pytest.mark.parametrize("activation", ["hardswish", "relu"])
@pytest.mark.parametrize("net", NETS)
def test_real_probes_of_any_net_have_this_law(net: str, activation: str, steps: int, scheme: str) -> None:
    compare(net, activation, steps, scheme, keys=400)
