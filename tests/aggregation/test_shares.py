"""Shamir's shares: any t of n give the secret, fewer are consistent with every secret."""

import secrets
from collections.abc import Sequence
from fractions import Fraction
from itertools import combinations
from typing import NamedTuple

import pytest
from hypothesis import given, settings, strategies as st

from baffle.aggregation.shares import PRIME, SHARE_BYTES, combine, correct, new_secret, split as split_both, weights

SECRETS = st.one_of(st.sampled_from([0, 1, 2**127, PRIME - 1]), st.integers(0, PRIME - 1))
POINTS = st.lists(st.integers(1, 2**21 - 1), min_size=1, max_size=7, unique=True)


BEYOND = 2**128 - PRIME  # numbers below this one can be written in two ways


def written(number: int) -> bytes:
    return number.to_bytes(SHARE_BYTES, "big")


LARGEST = written(PRIME - 1)


def split(secret: bytes, t: int, points: Sequence[int]) -> list[bytes]:
    """Shares of one secret, whichever of the two it is."""
    place = secrets.randbelow(2)
    both = [secret, new_secret()]
    return [shares[place] for shares in split_both(both[place], both[1 - place], t, points)]


def by_fractions(points: Sequence[int], shares: Sequence[bytes]) -> int:
    """A second reconstruction: Lagrange in rational numbers, brought into the field at the end."""
    total = 0
    for here, share in zip(points, shares, strict=True):
        coefficient = Fraction(1)
        for there in points:
            if there != here:
                coefficient *= Fraction(there, there - here)
        field = coefficient.numerator * pow(coefficient.denominator, -1, PRIME)
        total += field * int.from_bytes(share, "big")
    return total % PRIME


def value_at(points: Sequence[int], values: Sequence[int], place: int) -> int:
    """The value at `place` of the polynomial of least degree through these points."""
    total = 0
    for here, value in zip(points, values, strict=True):
        term = value
        for there in points:
            if there != here:
                term = term * (place - there) * pow(here - there, -1, PRIME) % PRIME
        total += term
    return total % PRIME


def test_the_modulus_is_prime() -> None:
    """Miller and Rabin: a composite number passes 40 random bases with a probability of at most 2^-80."""
    odd, twos = PRIME - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for _ in range(40):
        x = pow(2 + secrets.randbelow(PRIME - 3), odd, PRIME)
        assert x == 1 or PRIME - 1 in [pow(x, 2**i, PRIME) for i in range(twos)]


@given(SECRETS, POINTS, st.data())
@settings(max_examples=60, deadline=None)
def test_any_t_of_n_shares_give_the_secret(number: int, points: list[int], data: st.DataObject) -> None:
    secret = written(number)
    t = data.draw(st.integers(1, len(points)))
    shares = dict(zip(points, split(secret, t, points), strict=True))
    assert all(len(share) == SHARE_BYTES for share in shares.values())
    for some in combinations(points, t):
        held = [shares[point] for point in some]
        assert combine(weights(some), held) == secret
        assert by_fractions(some, held) == number
    assert combine(weights(points), list(shares.values())) == secret


@given(SECRETS, SECRETS, POINTS.filter(lambda points: len(points) > 1), st.data())
@settings(max_examples=60, deadline=None)
def test_fewer_shares_are_consistent_with_every_secret(
    number: int, candidate: int, points: list[int], data: st.DataObject
) -> None:
    """For each candidate there is a polynomial of the right degree through t − 1 shares."""
    t = data.draw(st.integers(2, len(points)))
    shares = [int.from_bytes(share, "big") for share in split(written(number), t, points)]
    held_at, held = points[: t - 1], shares[: t - 1]
    rest = [value_at([0, *held_at], [candidate, *held], point) for point in points[t - 1 :]]
    forged = [written(value) for value in (*held, *rest)]
    assert combine(weights(points[:t]), forged[:t]) == combine(weights(points), forged) == written(candidate)


@pytest.mark.parametrize("t", [1, 15, 16, 17, 60])
def test_the_largest_points_do_not_mix_the_two_secrets(t: int) -> None:
    """The two polynomials are evaluated in one number, whose halves must not run into each other."""
    both = LARGEST, LARGEST
    points = range(2**21 - 60, 2**21)
    shares = split_both(*both, t, points)
    for place in range(2):
        held = [pair[place] for pair in shares]
        assert combine(weights(points[:t]), held[:t]) == combine(weights(points), held) == both[place]


@st.composite
def small_shares(draw: st.DrawFn) -> tuple[int, list[int], list[int]]:
    """A threshold, points and shares that are all small enough to be written in two ways. (Nobody draws such a
    polynomial by chance.)"""
    points = draw(st.lists(st.integers(1, 12), min_size=1, max_size=9, unique=True))
    secret, slope = draw(st.integers(0, 20)), draw(st.integers(0, 10))
    return 2 if slope else 1, points, [secret + slope * point for point in points]


@given(small_shares().filter(lambda case: len(case[1]) >= case[0]), st.data())
def test_a_share_written_beyond_the_prime_is_the_same_share(
    case: tuple[int, list[int], list[int]], data: st.DataObject
) -> None:
    """A liar gains nothing by it, in the sum of shares or in the correction of wrong ones."""
    t, points, values = case
    assert max(values) < BEYOND
    otherwise = [written(value + PRIME * data.draw(st.booleans())) for value in values]
    plain = [written(value) for value in values]
    assert combine(weights(points), otherwise) == combine(weights(points), plain)
    wrong = data.draw(st.permutations(range(len(points))))[: (len(points) - t) // 2]
    for place in wrong:
        otherwise[place] = written(data.draw(st.one_of(st.integers(PRIME, 2**128 - 1), st.integers(0, 2**128 - 1))))
    assert correct(points, otherwise, t) == combine(weights(points), plain)


def test_every_number_below_the_prime_is_a_secret_and_no_other() -> None:
    assert PRIME < 2**128
    assert combine([1], [LARGEST]) == LARGEST
    assert combine([1], [written(PRIME)]) == bytes(16)
    assert combine([1], [b"\xff" * 16]) == written(BEYOND - 1)
    for both in ((written(PRIME), bytes(16)), (bytes(16), b"\xff" * 16)):
        with pytest.raises(ValueError, match="below the prime"):
            split_both(*both, 1, [1, 2])
    for t in (0, -1, 4):
        with pytest.raises(ValueError, match="threshold"):
            split(bytes(16), t, [1, 2, 3])


def test_shares_are_drawn_anew_with_every_coefficient() -> None:
    """If the highest coefficient were 0, one share fewer would be enough."""
    assert set(split(bytes(16), 2, [1, 2])).isdisjoint(split(bytes(16), 2, [1, 2]))
    for t in range(2, 6):
        secret = new_secret()
        shares = split(secret, t, range(1, t + 1))
        for some in combinations(range(1, t + 1), t - 1):
            assert by_fractions(some, [shares[point - 1] for point in some]) != int.from_bytes(secret, "big")


def test_random_bytes_beyond_the_prime_are_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("secrets.token_bytes", lambda count: b"\xff" * count)
    drawn = [new_secret() for _ in range(20)]
    assert len(set(drawn)) == 20
    assert all(len(secret) == SHARE_BYTES and secret <= LARGEST for secret in drawn)
    monkeypatch.setattr("secrets.token_bytes", lambda _count: LARGEST)
    assert new_secret() == LARGEST


class Spoilt(NamedTuple):
    """Shares of a secret, of which those at the places `wrong` are anything, or are shares of one other secret."""

    secret: bytes
    other: bytes
    t: int
    points: list[int]
    shares: list[bytes]
    wrong: set[int]


@st.composite
def spoilt(draw: st.DrawFn, *, too_many: bool) -> Spoilt:
    points = draw(st.lists(st.integers(1, 2**21 - 1), min_size=1, max_size=14, unique=True))
    t = draw(st.integers(1, len(points)))
    secret, other = (written(draw(SECRETS)) for _ in range(2))
    shares, others = split(secret, t, points), split(other, t, points)
    most = (len(points) - t) // 2
    count = draw(st.integers(most + 1, len(points)) if too_many else st.integers(0, most))
    wrong = set(draw(st.permutations(range(len(points))))[:count])
    made_up = draw(st.booleans())
    for place in wrong:
        shares[place] = written(draw(st.integers(0, 2**128 - 1))) if made_up else others[place]
    return Spoilt(secret, other, t, points, shares, wrong)


@given(spoilt(too_many=False))
@settings(max_examples=150, deadline=None)
def test_wrong_shares_are_corrected_up_to_half_of_the_spare_ones(case: Spoilt) -> None:
    assert correct(case.points, case.shares, case.t) == case.secret


@given(spoilt(too_many=True))
@settings(max_examples=100, deadline=None)
def test_with_more_wrong_shares_there_is_no_secret_but_one_that_was_shared(case: Spoilt) -> None:
    """Made-up shares never agree on a secret, unless a threshold of all shares is made up, or none is spare."""
    found = correct(case.points, case.shares, case.t)
    expected = found in (None, case.secret, case.other)
    assert expected or len(case.wrong) >= case.t or len(case.points) == case.t


@pytest.mark.parametrize(("n", "t"), [(1, 1), (2, 1), (3, 1), (9, 6), (10, 6), (173, 87)])
def test_errors_are_corrected_up_to_the_limit_and_no_further(n: int, t: int) -> None:
    secret, points = new_secret(), range(5, 5 + n)
    shares = split(secret, t, points)
    for errors in range(0, (n - t) // 2 + 1, 1 + n // 20):
        damaged = [new_secret() if place < errors else share for place, share in enumerate(shares)]
        assert correct(points, damaged, t) == secret
    too_many = [new_secret() if place <= (n - t) // 2 else share for place, share in enumerate(shares)]
    assert correct(points, too_many, t) != secret
