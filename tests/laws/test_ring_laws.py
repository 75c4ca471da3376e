"""Sums in the ring: independent of order, close to the real sum, and refused if they cannot be true."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, given, settings, strategies as st

from baffle.core.arrays import F64
from baffle.core.ring import EXTRAS, GUARD, Ring, RingVector, add
from baffle.errors import MessageError

elements = st.integers(0, 2**32 - 1)


@st.composite
def contributions(draw: st.DrawFn) -> tuple[Ring, list[F64], list[int], list[float]]:
    """A ring with its clients' values (some beyond the clip), weights and losses; not everybody contributes."""
    clients = draw(st.integers(1, 12))
    ring = Ring(clients, draw(st.integers(1, 10_000)), draw(st.sampled_from([0.01, 1.0, 100.0])))
    length, present = draw(st.integers(1, 6)), draw(st.integers(1, clients))
    number = st.floats(-1.5 * ring.clip, 1.5 * ring.clip)
    values = [np.array(draw(st.lists(number, min_size=length, max_size=length))) for _ in range(present)]
    weights = [draw(st.integers(1, ring.n_max)) for _ in range(present)]
    losses = [draw(st.floats(-64, 64)) for _ in range(present)]
    return ring, values, weights, losses


def encoded(case: tuple[Ring, list[F64], list[int], list[float]]) -> list[RingVector]:
    ring, values, weights, losses = case
    return [ring.encode(v, len(v), w, loss) for v, w, loss in zip(values, weights, losses, strict=True)]


@settings(deadline=None)
@given(vectors=st.lists(st.lists(elements, min_size=5, max_size=5), min_size=1, max_size=8), data=st.data())
def test_a_sum_does_not_depend_on_order_or_grouping(vectors: list[list[int]], data: st.DataObject) -> None:
    rows = [np.array(v, np.uint32) for v in vectors]
    shuffled = data.draw(st.permutations(rows))
    cut = data.draw(st.integers(1, len(rows)))
    grouped = add([add(rows[:cut]), *rows[cut:]])
    expected = [sum(column) % 2**32 for column in zip(*vectors, strict=True)]
    assert add(rows).tolist() == add(shuffled).tolist() == grouped.tolist() == expected


@settings(deadline=None, max_examples=200)
@given(case=contributions())
def test_the_decoded_sum_is_the_weighted_sum_within_one_rounding_per_client(
    case: tuple[Ring, list[F64], list[int], list[float]],
) -> None:
    ring, values, weights, losses = case
    total = ring.decode(add(encoded(case)), len(values))
    assert total.weight == sum(weights)
    assert total.contributors == len(values)
    for i, number in enumerate(total.totals.tolist()):
        wanted = sum(
            w * Fraction(min(max(float(v[i]), -ring.clip), ring.clip)) for v, w in zip(values, weights, strict=True)
        )
        assert abs(Fraction(number) - wanted * Fraction(ring.scale)) <= Fraction(len(values), 2) * Fraction(1001, 1000)
    mean = sum(w * loss for w, loss in zip(weights, losses, strict=True)) / sum(weights)
    assert total.loss == pytest.approx(mean, abs=64 * ring.clients * ring.n_max / 2**28)


@settings(deadline=None, max_examples=200)
@given(case=contributions())
def test_every_clipped_value_is_counted(case: tuple[Ring, list[F64], list[int], list[float]]) -> None:
    ring, values, _, _ = case
    beyond = sum(abs(float(x)) > ring.clip for v in values for x in v)
    assert ring.decode(add(encoded(case)), len(values)).clipped == beyond


@settings(deadline=None, max_examples=200)
@given(case=contributions(), idle=st.lists(st.integers(1, 10_000), max_size=11), data=st.data())
def test_who_has_nothing_to_send_adds_its_weight_and_no_total(
    case: tuple[Ring, list[F64], list[int], list[float]], idle: list[int], data: st.DataObject
) -> None:
    ring, values, _, _ = case
    length, idle = len(values[0]), [min(weight, ring.n_max) for weight in idle[: ring.clients - len(values)]]
    without = ring.decode(add(encoded(case)), len(values))
    vectors = data.draw(st.permutations([*encoded(case), *(ring.nothing(length, weight) for weight in idle)]))
    total = ring.decode(add(vectors), len(vectors))
    assert total.totals.tolist() == without.totals.tolist()
    assert total.weight == without.weight + sum(idle)
    assert (total.contributors, total.clipped) == (len(vectors), without.clipped + len(idle) * length)


@settings(deadline=None, max_examples=300)
@given(silent=st.booleans(), data=st.data())
def test_whoever_answers_an_honest_sum_is_accepted_and_no_mean_is_beyond_the_clip(
    silent: bool, data: st.DataObject
) -> None:
    """Slow clients, values that are not finite, losses of any size; any clients drop out."""
    clients, k = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 6))
    factor, n_max = Fraction(k, data.draw(st.integers(1, k))), data.draw(st.sampled_from([1, 7, 10_000, 2**24]))
    ring = Ring(clients, n_max, data.draw(st.sampled_from([1e-30, 0.01, 1.0, 1e6])), factor, silent)
    numbers = st.floats(-2 * ring.clip, 2 * ring.clip) | st.sampled_from([ring.clip, -ring.clip, np.nan, np.inf])
    vectors = []
    for _ in range(data.draw(st.integers(1, clients))):
        weight = data.draw(st.integers(1, 1 if silent else n_max))
        values = np.array(data.draw(st.lists(numbers, min_size=int(k / factor), max_size=k)))
        vectors.append(ring.encode(values, k, weight, data.draw(st.floats())))
    total = add(vectors)
    ring.check(total, len(vectors))
    signed = [int(number) for number in total.view(np.int32)]
    bound = signed[k] * Fraction(ring.clip) * factor * Fraction(ring.scale) + len(vectors)
    assert all(abs(number) <= bound <= GUARD for number in signed[:k])


@settings(deadline=None, max_examples=200)
@given(case=contributions())
def test_the_mirror_image_gives_the_mirrored_sum(case: tuple[Ring, list[F64], list[int], list[float]]) -> None:
    ring, values, weights, losses = case
    mirrored = (ring, [-v for v in values], weights, losses)
    ahead, behind = (ring.decode(add(encoded(c)), len(values)) for c in (case, mirrored))
    assert (-ahead.totals).tolist() == behind.totals.tolist()
    assert ahead[1:] == behind[1:]


@settings(deadline=None, max_examples=200)
@given(case=contributions(), claimed=st.integers(-3, 15))
def test_another_number_of_contributors_is_refused(
    case: tuple[Ring, list[F64], list[int], list[float]], claimed: int
) -> None:
    ring, values, _, _ = case
    assume(claimed != len(values))
    with pytest.raises(MessageError, match=f"(expected|from) {claimed} "):
        ring.decode(add(encoded(case)), claimed)


@settings(deadline=None, max_examples=200)
@given(
    case=contributions(),
    position=st.integers(0, 5),
    excess=st.integers(1, 2**31 - GUARD - 1),
    sign=st.sampled_from([1, -1]),
)
def test_a_total_beyond_what_the_contributors_can_send_is_refused(
    case: tuple[Ring, list[F64], list[int], list[float]], position: int, excess: int, sign: int
) -> None:
    ring, values, _, _ = case
    total = add(encoded(case))
    edge = ring.most(len(values), int(total[-EXTRAS]))
    assert edge * ring.clients <= GUARD * len(values)
    place = position % len(values[0])
    total[place] = sign * edge % 2**32
    assert abs(int(ring.decode(total, len(values)).totals[place])) == edge
    total[place] = sign * (edge + excess) % 2**32
    with pytest.raises(MessageError, match=f"a total of {edge + excess} is more"):
        ring.decode(total, len(values))


@settings(deadline=None, max_examples=300)
@given(vector=st.lists(elements | st.integers(0, 40), min_size=EXTRAS, max_size=9), contributors=st.integers(1, 10))
def test_whatever_comes_is_read_within_its_bounds_or_refused(vector: list[int], contributors: int) -> None:
    ring = Ring(clients=10, n_max=5, clip=1.0)
    try:
        total = ring.decode(np.array(vector, np.uint32), contributors)
    except MessageError:
        return
    assert total.contributors == contributors
    assert contributors <= total.weight <= 5 * contributors
    assert 0 <= total.clipped <= contributors * len(total.totals)
    assert all(abs(t) <= total.weight * ring.clip * ring.scale + contributors for t in total.totals.tolist())
