"""Shamir's shares: any t of n give the secret, fewer are consistent with every secret."""

import secrets
import time
from collections.abc import Sequence
from fractions import Fraction
from itertools import combinations
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baffle.aggregation.shares import PRIME, SECRET_BYTES, SHARE_BYTES, combine, correct, weights
from baffle.aggregation.shares import split as split_both

SECRETS = st.one_of(st.sampled_from([0, 1, 2**255, 2**256 - 1]), st.integers(0, 2**256 - 1))
POINTS = st.lists(st.integers(1, 2**21 - 1), min_size=1, max_size=7, unique=True)


def split(secret: bytes, t: int, points: Sequence[int]) -> list[bytes]:
    """Shares of one secret, whichever of the two it is."""
    place = secrets.randbelow(2)
    both = [secret, secrets.token_bytes(32)]
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
    secret = number.to_bytes(SECRET_BYTES, "big")
    t = data.draw(st.integers(1, len(points)))
    shares = dict(zip(points, split(secret, t, points), strict=True))
    assert all(len(share) == SHARE_BYTES for share in shares.values())
    for some in combinations(points, t):
        held = [shares[point] for point in some]
        assert combine(weights(some), held) == secret
        assert by_fractions(some, held) == number
    assert combine(weights(points), list(shares.values())) == secret


@given(SECRETS, st.integers(0, 2**256 - 1), POINTS.filter(lambda points: len(points) > 1), st.data())
@settings(max_examples=60, deadline=None)
def test_fewer_shares_are_consistent_with_every_secret(
    number: int, candidate: int, points: list[int], data: st.DataObject
) -> None:
    """For each candidate there is a polynomial of the right degree through t − 1 shares."""
    t = data.draw(st.integers(2, len(points)))
    shares = [int.from_bytes(share, "big") for share in split(number.to_bytes(32, "big"), t, points)]
    held_at, held = points[: t - 1], shares[: t - 1]
    rest = [value_at([0, *held_at], [candidate, *held], point) for point in points[t - 1 :]]
    forged = [value.to_bytes(SHARE_BYTES, "big") for value in (*held, *rest)]
    assert combine(weights(points[:t]), forged[:t]) == candidate.to_bytes(32, "big")
    assert combine(weights(points), forged) == candidate.to_bytes(32, "big")


@pytest.mark.parametrize("t", [1, 23, 24, 25, 60])
def test_the_largest_points_do_not_mix_the_two_secrets(t: int) -> None:
    """The two polynomials are evaluated in one number, whose halves must not run into each other."""
    both = b"\xff" * 32, b"\xff" * 32
    points = range(2**21 - 60, 2**21)
    shares = split_both(*both, t, points)
    for place in range(2):
        held = [pair[place] for pair in shares]
        assert combine(weights(points[:t]), held[:t]) == combine(weights(points), held) == both[place]


def test_one_share_too_few_gives_another_secret_or_none() -> None:
    for t in range(2, 8):
        secret = secrets.token_bytes(32)
        shares = split(secret, t, range(1, 9))
        assert combine(weights(range(1, t)), shares[: t - 1]) != secret


def test_shares_of_one_secret_differ_every_time() -> None:
    """A share is the secret itself only at a threshold of 1; otherwise it is random."""
    first, second = split(bytes(32), 2, [1, 2]), split(bytes(32), 2, [1, 2])
    assert set(first).isdisjoint(second)
    assert split(b"\xff" * 32, 1, [1, 2]) == [b"\x00" + b"\xff" * 32] * 2


def test_every_coefficient_is_drawn() -> None:
    """If the highest coefficient were 0, one share fewer would be enough."""
    for t in range(2, 6):
        secret = secrets.token_bytes(32)
        shares = split(secret, t, range(1, t + 1))
        assert all(
            by_fractions(some, [shares[point - 1] for point in some]) != int.from_bytes(secret, "big")
            for size in range(1, t)
            for some in combinations(range(1, t + 1), size)
        )


@pytest.mark.parametrize("secret", [bytes(32), b"\xff" * 32, secrets.token_bytes(32)], ids=["zeros", "ones", "random"])
def test_a_wrong_share_gives_another_secret_or_none(secret: bytes) -> None:
    shares = split(secret, 3, [1, 2, 3])
    for place in range(3):
        for bit in (0, 7, 100, 255):
            wrong = int.from_bytes(shares[place], "big") ^ (1 << bit)
            spoilt = [*shares[:place], wrong.to_bytes(33, "big"), *shares[place + 1 :]]
            assert combine(weights([1, 2, 3]), spoilt) != secret


def test_a_value_beyond_32_bytes_is_no_secret() -> None:
    for beyond in (2**256, PRIME - 1):
        assert combine([1], [beyond.to_bytes(33, "big")]) is None
    assert combine([1], [(2**256 - 1).to_bytes(33, "big")]) == b"\xff" * 32
    assert combine([1], [PRIME.to_bytes(33, "big")]) == bytes(32)


@pytest.mark.parametrize("t", [0, -1, 4])
def test_an_impossible_threshold_is_refused(t: int) -> None:
    with pytest.raises(ValueError, match="threshold"):
        split(bytes(32), t, [1, 2, 3])


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
    secret, other = (draw(SECRETS).to_bytes(32, "big") for _ in range(2))
    shares, others = split(secret, t, points), split(other, t, points)
    most = (len(points) - t) // 2
    count = draw(st.integers(most + 1, len(points)) if too_many else st.integers(0, most))
    wrong = set(draw(st.permutations(range(len(points))))[:count])
    made_up = draw(st.booleans())
    for place in wrong:
        shares[place] = draw(st.integers(0, 2**264 - 1)).to_bytes(33, "big") if made_up else others[place]
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
    secret, points = secrets.token_bytes(32), range(5, 5 + n)
    shares = split(secret, t, points)
    for errors in range(0, (n - t) // 2 + 1, 1 + n // 20):
        damaged = [secrets.token_bytes(33) if place < errors else share for place, share in enumerate(shares)]
        assert correct(points, damaged, t) == secret
    too_many = [secrets.token_bytes(33) if place <= (n - t) // 2 else share for place, share in enumerate(shares)]
    assert correct(points, too_many, t) != secret


def test_constant_polynomials_and_zeros_are_corrected() -> None:
    """A threshold of 1 deals the secret itself, and the polynomial of the secret 0 is zero."""
    for secret in (bytes(32), b"\x01" * 32):
        shares = [b"\0" + secret] * 5
        assert correct(range(1, 6), shares, 1) == secret
        assert correct(range(1, 6), [secrets.token_bytes(33), *shares[1:4], bytes(32) + b"\x07"], 1) == secret


def test_a_large_correction_takes_well_under_a_second() -> None:
    points = range(1, 174)
    secret = secrets.token_bytes(32)
    shares = split(secret, 87, points)
    shares[1::4] = [secrets.token_bytes(33) for _ in range(43)]
    began = time.process_time()
    assert correct(points, shares, 87) == secret
    assert time.process_time() - began < 0.5
