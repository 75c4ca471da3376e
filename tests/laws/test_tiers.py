"""Clients that evaluate fewer directions: the estimate stays unbiased, and no sum leaves the ring."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from baffle.core.arrays import F32, F64
from baffle.core.directions import GAUSSIAN, Directions, dense
from baffle.core.probe import forward_difference
from baffle.core.rebuild import gradient_from_scalars
from baffle.core.ring import EXTRAS, GUARD, LOSS_MAX, Ring, RingVector, add
from baffle.core.seeds import Seeds

SEEDS = Seeds(3, bytes(32))
N = 6
K = 40
SLOPES = np.array([[1.0, -2.0, 0.5, 0.0, 3.0, -1.0], [-1.0, 1.0, 2.0, 1.5, -0.5, 0.0], [0.5, 0.5, -1.0, 2.0, 0.0, 4.0]])
TIERS = [8, 20, 40]
SAMPLES = [900, 60, 40]
RING = Ring(clients=3, n_max=900, clip=100.0, tier_factor=Fraction(K, min(TIERS)))


def scalars_of(client: int, directions: Directions) -> F64:
    """What a client with a linear loss measures on its first directions."""

    def loss(weights: F32) -> float:
        return float(weights.astype(np.float64) @ SLOPES[client])

    return forward_difference(loss, np.zeros(N, np.float32), directions, dense(N, TIERS[client]), 0.25).scalars


def by_the_ring(directions: Directions) -> F32:
    vectors = [RING.encode(scalars_of(client, directions), K, weight, 0.0) for client, weight in enumerate(SAMPLES)]
    total = RING.decode(add(vectors), 3)
    assert total.clipped == 0
    return gradient_from_scalars(total.totals, total.weight, directions, dense(N, K), N, RING)


def by_direction(directions: Directions) -> F64:
    """The tempting alternative: each direction averaged over those who evaluated it."""
    sums, weights = np.zeros(K), np.zeros(K)
    for client, weight in enumerate(SAMPLES):
        sums[: TIERS[client]] += weight * scalars_of(client, directions)
        weights[: TIERS[client]] += weight
    z = directions.draw(range(K), 0, N).astype(np.float64) * GAUSSIAN.unit
    mean: F64 = (sums / weights) @ z / K
    return mean


@pytest.mark.slow
def test_a_slow_majority_of_the_data_keeps_its_say() -> None:
    keys = 600
    ours, theirs = np.empty((keys, N)), np.empty((keys, N))
    for number in range(keys):
        directions = Directions(SEEDS.key("directions", number, 0), GAUSSIAN)
        ours[number], theirs[number] = by_the_ring(directions), by_direction(directions)
    wanted = np.array(SAMPLES) @ SLOPES / sum(SAMPLES)
    error = ours.std(axis=0, ddof=1) / math.sqrt(keys)
    assert np.all(np.abs(ours.mean(axis=0) - wanted) < 4.5 * error)
    error = theirs.std(axis=0, ddof=1) / math.sqrt(keys)
    assert np.median(np.abs(theirs.mean(axis=0) - wanted) / error) > 10


@st.composite
def rings(draw: st.DrawFn) -> tuple[Ring, int, list[int]]:
    """A ring, its K, and tiers that fit into it."""
    clients = draw(st.integers(1, 30) | st.integers(1, 10**6))
    n_max = draw(st.integers(1, (GUARD - 1) // clients))
    clip = draw(st.floats(1e-6, 1e6) | st.sampled_from([1.0, 100.0, 2.0**-10, math.nextafter(2.0, 0)]))
    tiers = draw(st.lists(st.integers(1, 300), min_size=1, max_size=4))
    return Ring(clients, n_max, clip, Fraction(max(tiers), min(tiers))), max(tiers), tiers


def signed(vector: RingVector) -> list[int]:
    return [int(element) for element in vector.view(np.int32)]


@settings(deadline=None, max_examples=300)
@given(case=rings())
def test_the_scale_is_the_largest_power_of_two_within_the_guard(case: tuple[Ring, int, list[int]]) -> None:
    ring, _, _ = case
    room = Fraction(GUARD - ring.clients) / (Fraction(ring.clip) * ring.tier_factor * ring.clients * ring.n_max)
    assert Fraction(2) ** ring.exponent <= room < Fraction(2) ** (ring.exponent + 1)
    assert Fraction(ring.scale) == Fraction(2) ** ring.exponent


@settings(deadline=None, max_examples=300)
@given(case=rings(), sign=st.sampled_from([1.0, -1.0]), beyond=st.sampled_from([1.0, 1.001, 1e200]))
def test_no_roster_at_its_bounds_can_leave_the_guard(
    case: tuple[Ring, int, list[int]], sign: float, beyond: float
) -> None:
    ring, k, tiers = case
    largest = [0] * (k + EXTRAS)
    for tier in tiers:
        vector = signed(ring.encode(np.full(tier, sign * beyond * ring.clip), k, ring.n_max, sign * beyond * LOSS_MAX))
        largest = [max(old, abs(new)) for old, new in zip(largest, vector, strict=True)]
    clipped = largest.pop(-2)
    assert clipped <= k
    assert max(largest) * ring.clients <= GUARD


@settings(deadline=None, max_examples=60)
@given(case=rings().filter(lambda case: case[0].clients <= 30), sign=st.sampled_from([1.0, -1.0]))
def test_the_sum_of_a_roster_at_its_bounds_is_read(case: tuple[Ring, int, list[int]], sign: float) -> None:
    ring, k, tiers = case
    each = [tiers[client % len(tiers)] for client in range(ring.clients)]
    vectors = [ring.encode(np.full(tier, sign * ring.clip), k, ring.n_max, LOSS_MAX) for tier in each]
    total = ring.decode(add(vectors), ring.clients)
    assert total.weight == ring.clients * ring.n_max
    assert total.clipped == 0
    exact = [sum(Fraction(k, tier) for tier in each if i < tier) * ring.n_max * Fraction(ring.clip) for i in range(k)]
    for number, wanted in zip(total.totals.tolist(), exact, strict=True):
        assert abs(number - sign * wanted * Fraction(ring.scale)) <= ring.clients
