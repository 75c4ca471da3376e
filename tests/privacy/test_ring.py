"""The ring of a private run: exact clipping, constant extras, room for the noise, and never too little noise."""

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from baffle.core.arrays import I64
from baffle.core.ring import EXTRAS, GUARD, add
from baffle.errors import MessageError
from baffle.privacy.accounting import bound_l1
from baffle.privacy.ring import LARGEST, PrivateRing, clip_encoded, squared_norm

RING = PrivateRing(clients=10, norm=2.0, noise=4.0, sharers=6, length=30)


def integers(vector: np.ndarray[tuple[int], np.dtype[np.uint32]]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return vector.view(np.int32)[:-EXTRAS].astype(np.int64)


@st.composite
def rings(draw: st.DrawFn) -> PrivateRing:
    clients, norm, noise = draw(st.integers(1, 1000)), draw(st.floats(1e-6, 1e6)), draw(st.floats(0.01, 100))
    return PrivateRing(clients, norm, noise, draw(st.integers(1, clients)), draw(st.integers(1, 200)))


@given(rings(), st.data())
def test_no_values_become_a_vector_longer_than_the_bound(ring: PrivateRing, data: st.DataObject) -> None:
    """Nor do they with the numbers of an exact head, which are clipped together with them."""
    anything = st.floats(allow_nan=True, allow_infinity=True)
    head = data.draw(st.integers(0, ring.length))
    ring, most = replace(ring, head=head, head_factor=data.draw(st.floats(0.01, 100))), ring.length - head
    values = np.array(data.draw(st.lists(anything, min_size=min(1, most), max_size=most)), float)
    numbers = np.array(data.draw(st.lists(anything, min_size=head, max_size=head)), float)
    loss = data.draw(anything)
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        vector = ring.encode(values, ring.length, 1, loss, head=numbers)
    assert squared_norm(integers(vector)) <= ring.delta_2**2
    assert vector[ring.length :].tolist() == [1, 1, 0, 0]
    assert not integers(vector)[len(values) : most].any()
    if not all(np.isfinite(array).all() for array in (loss, values, numbers)):
        assert not integers(vector).any()


def test_a_head_counts_as_often_as_its_factor_says_and_is_read_at_its_scale() -> None:
    ring = replace(RING, head=10, head_factor=4.0)
    sent = integers(ring.encode(np.full(20, 0.05), 30, 1, 0.5, head=np.full(10, 0.05)))
    assert (sent[20:] == 4 * sent[0]).all()
    assert np.allclose(sent[:20] / ring.scale, 0.05, atol=1 / ring.scale)
    assert np.allclose(sent[20:] / ring.head_scale, 0.05, atol=1 / ring.head_scale)
    long = integers(ring.encode(np.full(20, 5.0), 30, 1, 0.5, head=np.full(10, 5.0)))
    assert np.allclose(long[20:] / long[0], 4, rtol=1e-5)  # both parts are shrunk alike
    assert math.isqrt(squared_norm(long)) == pytest.approx(ring.delta_2, rel=1e-5)


@given(rings(), st.integers(2, 5), st.data())
def test_no_steps_of_a_round_become_a_vector_longer_than_the_bound(
    ring: PrivateRing, steps: int, data: st.DataObject
) -> None:
    """Each step is within the bound by itself; what a client sends is all of them."""
    whole = replace(ring, length=steps * ring.length, steps=steps)
    numbers = st.lists(st.floats(-1e30, 1e30), min_size=1, max_size=ring.length)
    vectors = [whole.encode(np.array(data.draw(numbers)), ring.length, 1, 0.0) for _ in range(steps)]
    joined = whole.joined(vectors, whole.length)
    assert squared_norm(integers(joined)) <= whole.delta_2**2
    assert joined[whole.length :].tolist() == [1, 1, 0, 0]


def test_every_value_of_every_step_has_its_noise_and_all_are_one_release() -> None:
    whole, one = replace(RING, length=3 * RING.length, steps=3), replace(RING, length=3 * RING.length)
    assert whole.nothing(90, 1).tolist() == [0] * 90 + [1, 1, 0, 0]
    noise = integers(whole.noised(whole.nothing(90, 1), np.random.default_rng(3).bytes)).reshape(3, -1)
    assert np.allclose((noise.astype(float) ** 2).mean(axis=1), float(whole.share), rtol=0.6)
    assert whole.release == one.release
    assert whole.release.delta_1 == bound_l1(whole.delta_2, 90)


@given(rings())
def test_everybody_at_the_bound_and_the_noise_of_all_stay_below_the_guard(ring: PrivateRing) -> None:
    assert ring.most(ring.clients) <= GUARD
    assert ring.share * ring.sharers == (Fraction(ring.noise) * ring.delta_2) ** 2
    if ring.delta_2:  # the next finer scale would have no room
        doubled = PrivateRing(ring.clients, 2 * ring.norm, ring.noise, ring.sharers, ring.length)
        assert doubled.exponent == ring.exponent - 1
        deviation = math.sqrt(ring.clients * float(ring.share))
        assert 2 * (ring.clients * ring.delta_2 + 12 * deviation + 100) > GUARD / 3


def test_a_short_vector_is_kept_and_a_long_one_keeps_its_direction() -> None:
    random = np.random.default_rng(0)
    values = random.normal(size=30)
    values /= np.linalg.norm(values)
    short, long = (integers(RING.encode(factor * values, 30, 1, 0.5)) for factor in (1.9, 1e9))
    assert np.allclose(short / RING.scale, 1.9 * values, atol=1 / RING.scale)
    assert np.allclose(long / RING.scale, 2.0 * values, atol=2 / RING.scale)


def test_a_client_of_few_directions_counts_each_more_and_is_clipped_after_that() -> None:
    values = np.full(10, 0.1)
    assert np.allclose(integers(RING.encode(values, 30, 1, 0.0))[:10] / RING.scale, 0.3, atol=1e-5)
    longer = integers(RING.encode(values * 4, 30, 1, 0.0)) / RING.scale
    assert np.linalg.norm(longer) == pytest.approx(2.0, abs=1e-4)  # 3 · 0.4 · √10 is longer


def test_the_sum_of_noised_vectors_is_read_without_a_loss() -> None:
    random = np.random.default_rng(1)
    vectors = [RING.noised(RING.encode(random.normal(size=30), 30, 1, 0.1), random.bytes) for _ in range(10)]
    total = RING.decode(add(vectors), 10)
    assert (total.weight, total.contributors, total.clipped, total.loss) == (10, 10, 0, None)
    for vector in vectors:
        RING.check(vector, 1)


def test_every_value_has_noise_also_where_a_client_has_measured_nothing() -> None:
    random = np.random.default_rng(2)
    noised = integers(RING.noised(RING.encode(np.ones(5), 30, 1, 0.1), random.bytes))
    assert (noised != integers(RING.encode(np.ones(5), 30, 1, 0.1))).all()


def test_everybody_may_send_the_longest_vector_in_the_same_direction() -> None:
    ring = PrivateRing(clients=1000, norm=1.0, noise=0.01, sharers=1000, length=2)
    longest = ring.encode(np.array([50.0, 0.0]), 2, 1, 0.0)
    for count in (1, 400, 1000):
        assert ring.decode(add([longest] * count), count).totals[0] == count * ring.delta_2 < GUARD
    too_much = add([longest] * 1000)
    too_much[-4:] = 500, 500, 0, 0
    with pytest.raises(MessageError, match="more than 500 clients can send"):
        ring.check(too_much, 500)


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (-4, 9, "claims 10 contributors of weight 9"),
        (-3, 9, "claims 9 contributors"),
        (-2, 1, "tell neither"),
        (-1, 5, "tell neither"),
        (0, RING.most(10) + 1, "more than 10 clients can send"),
    ],
)
def test_a_sum_that_honest_clients_cannot_cause_is_refused(place: int, value: int, words: str) -> None:
    total = add([RING.encode(np.zeros(30), 30, 1, 0.0)] * 10)
    total[place] = value
    with pytest.raises(MessageError, match=words):
        RING.decode(total, 10)
    for vectors, contributors in ((total[1:], 10), (total, 0)):
        with pytest.raises(MessageError, match="are not a sum"):
            RING.decode(vectors, contributors)


@pytest.mark.parametrize(("count", "length", "weight"), [(0, 30, 1), (31, 30, 1), (30, 29, 1), (30, 30, 2)])
def test_values_that_do_not_fit_are_refused(count: int, length: int, weight: int) -> None:
    with pytest.raises(MessageError, match="expected 1 to 30 values of weight 1"):
        RING.encode(np.zeros(count), length, weight, 0.0)
    with pytest.raises(MessageError, match="expected 0 numbers of an exact head, got 1"):
        RING.encode(np.zeros(30), 30, 1, 0.0, head=np.zeros(1))


@pytest.mark.parametrize("liars", [0, 2])
@pytest.mark.parametrize("survivors", range(6, 11))
def test_with_any_survivors_down_to_the_least_the_noise_is_no_less_than_claimed(survivors: int, liars: int) -> None:
    """Ten clients, six survivors at least. With two liars who add none, four are certain to add theirs."""
    ring = PrivateRing(clients=10, norm=1.0, noise=3.0, sharers=6 - liars, length=20_000)
    nothing = ring.encode(np.zeros(ring.length), ring.length, 1, 0.0)
    random = np.random.default_rng([survivors, liars])
    honest = [ring.noised(nothing, random.bytes) for _ in range(survivors - liars)]
    found = integers(add([*honest, *[nothing] * liars]))
    claimed, expected = float(ring.variance), (survivors - liars) * float(ring.share)
    assert claimed == pytest.approx((3.0 * ring.delta_2) ** 2)
    spread = 5 * math.sqrt(2 / ring.length)  # of a sample's variance, five deviations
    assert np.var(found) == pytest.approx(expected, rel=spread)
    assert np.var(found) > claimed * (1 - spread)
    assert abs(np.mean(found)) < 5 * math.sqrt(expected / ring.length)


# Clipping in integers

entries = st.integers(-LARGEST, LARGEST)
vectors = st.lists(entries, max_size=40).map(lambda numbers: np.array(numbers, np.int64))
bounds = st.one_of(st.integers(0, 50), st.integers(0, LARGEST))


def exact_square(vector: I64) -> int:
    return sum(int(q) ** 2 for q in vector.tolist())


@settings(deadline=None, max_examples=500)
@given(vector=vectors, delta_2=bounds)
def test_a_clipped_vector_is_within_its_bound_exactly(vector: I64, delta_2: int) -> None:
    clipped = clip_encoded(vector, delta_2)
    assert exact_square(clipped) <= delta_2**2
    assert (clip_encoded(clipped, delta_2) == clipped).all()
    assert (np.abs(clipped) <= np.abs(vector)).all()
    assert (clipped * vector >= 0).all() or exact_square(vector) > 2**62  # signs stay; the product may overflow
    if exact_square(vector) <= delta_2**2:
        assert (clipped == vector).all()


@settings(deadline=None, max_examples=200)
@given(vector=vectors, delta_2=st.integers(1, LARGEST))
def test_clipping_loses_less_than_a_unit_a_coordinate_and_a_part_for_the_rounded_norm(
    vector: I64, delta_2: int
) -> None:
    norm = math.sqrt(exact_square(vector))
    if norm > delta_2:
        ideal = np.abs(vector) * (delta_2 / norm)
        assert (np.abs(clip_encoded(vector, delta_2)) > ideal * (1 - 1 / norm - 1e-12) - 1 - 1e-6).all()


@settings(deadline=None)
@given(vector=vectors)
def test_the_norm_is_exact(vector: I64) -> None:
    assert squared_norm(vector) == exact_square(vector)


def test_a_long_vector_of_the_largest_entries_does_not_overflow() -> None:
    longest = np.full(100_000, -LARGEST)
    assert squared_norm(longest) == 100_000 * 4**31
    clipped = clip_encoded(longest, LARGEST)
    assert set(clipped.tolist()) == {-(LARGEST * LARGEST // (math.isqrt(100_000 * 4**31 - 1) + 1))}
    assert squared_norm(clipped) <= LARGEST**2


def test_a_vector_on_the_edge_stays_and_one_beyond_moves() -> None:
    assert clip_encoded(np.array([3, -4]), 5).tolist() == [3, -4]
    assert clip_encoded(np.array([3, -5]), 5).tolist() == [2, -4]
    assert clip_encoded(np.array([3, -5]), 0).tolist() == [0, 0]
    assert clip_encoded(np.array([], np.int64), 0).tolist() == []


@pytest.mark.parametrize("entry", [LARGEST + 1, -LARGEST - 1, -(2**63)])
def test_entries_that_could_overflow_are_refused(entry: int) -> None:
    with pytest.raises(ValueError, match="within ±2³¹"):
        clip_encoded(np.array([entry]), 5)
    with pytest.raises(ValueError, match="0 to 2³¹"):
        clip_encoded(np.array([1]), LARGEST + 1)


@given(numbers=st.lists(st.integers(-30, 30), min_size=1, max_size=12), spare=st.integers(0, 20))
def test_no_vector_within_the_l2_bound_exceeds_the_l1_bound(numbers: list[int], spare: int) -> None:
    delta_2 = math.isqrt(sum(q * q for q in numbers)) + 1
    assert sum(abs(q) for q in numbers) <= bound_l1(delta_2, len(numbers) + spare)


def test_the_l1_bound_is_reached() -> None:
    assert bound_l1(10, 4) == 20  # (5, 5, 5, 5)
    assert bound_l1(2, 100) == 4  # four ones
    assert bound_l1(3, 2) == 5  # √18, rounded up
    assert bound_l1(0, 5) == 0
