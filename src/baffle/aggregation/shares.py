"""Shamir's secret sharing over the integers modulo 2¹²⁸ − 159: any t of n shares give the secret, fewer nothing.

Keys are derived from the secrets, so a secret must be as hard to guess as the keys are to break: guessing takes 2¹²⁷
trials on average, and X25519 about 2¹²⁶ operations. The prime is the largest that 16 bytes can hold. Secrets are drawn
uniformly from all numbers below it, so every value that shares can give is a possible secret. An honest client never
writes a share as a number above the prime. Such a share counts as that number modulo the prime, everywhere.
"""

import math
import secrets
from collections.abc import Sequence
from functools import reduce
from itertools import accumulate, zip_longest
from operator import mul

import numpy as np

PRIME = 2**128 - 159
SHARE_BYTES = 16  # of a share, and of a secret
MOST_POINT = 2**21  # products of three differences of points fit into 63 bits
BLOCK = 16
HALF = 128 + 21 * BLOCK + 1
"""A number below the prime that is multiplied by a point BLOCK times, with another such number added each time, has at
most this many bits."""
LOW_HALF = 2**HALF - 1


def new_secret() -> bytes:
    """A random secret."""
    return _written(*_random_numbers(1))


def split(first: bytes, second: bytes, t: int, points: Sequence[int]) -> list[tuple[bytes, bytes]]:
    """Shares of two secrets for each point: a distinct positive number below 2²¹, such as a client's number plus one.
    Two at once take little longer than one."""
    if not 1 <= t <= len(points):
        raise ValueError(f"a threshold of {t} needs 1 to {len(points)} shares")
    if not all(0 < point < MOST_POINT for point in points):
        raise ValueError(f"points must be 1 to {MOST_POINT - 1}")
    constants = [int.from_bytes(secret, "big") for secret in (first, second)]
    if max(constants) >= PRIME:
        raise ValueError("a secret must be a number below the prime; make it with new_secret()")
    polynomials = ([*_random_numbers(t - 1), constant] for constant in constants)
    pairs = [low + (high << HALF) for low, high in zip(*polynomials, strict=True)]
    blocks = [pairs[at : at + BLOCK] for at in range(0, t, BLOCK)]
    return [_shares_at(point, blocks) for point in points]


def weights(points: Sequence[int]) -> list[int]:
    """Lagrange's coefficients at 0. They depend on the holders alone, so one set serves all their secrets."""
    whole = math.prod(points) % PRIME
    places = np.array(points, dtype=np.int64)
    apart = places - places[:, None]
    np.fill_diagonal(apart, places)  # on the diagonal, so that a row's product is x_i · Π (x_j − x_i)
    threes = np.pad(apart, ((0, 0), (0, -len(places) % 3)), constant_values=1).reshape(len(places), -1, 3).prod(axis=2)
    return [whole * inverse % PRIME for inverse in _inverses([math.prod(row) % PRIME for row in threes.tolist()])]


def combine(coefficients: Sequence[int], shares: Sequence[bytes]) -> bytes:
    """The secret, if the shares belong together. A single wrong share always gives another secret."""
    values = [int.from_bytes(share, "big") for share in shares]
    return _written(sum(map(mul, coefficients, values)) % PRIME)


def correct(points: Sequence[int], shares: Sequence[bytes], t: int) -> bytes | None:
    """The secret, although up to (n − t) / 2 of the n shares are wrong, or none if more are: Gao's algorithm for
    Reed-Solomon codes. If more are wrong, it may also be another secret."""
    product: list[int] = [1]  # Π (x − x_i)
    through: list[int] = []  # the polynomial through all shares
    for x, share in zip(points, shares, strict=True):
        gap = int.from_bytes(share, "big") - _value(through, x)
        scale = gap * pow(_value(product, x), -1, PRIME) % PRIME
        through = _trimmed([(a + scale * b) % PRIME for a, b in zip_longest(through, product, fillvalue=0)])
        product = [(a - x * b) % PRIME for a, b in zip([0, *product], [*product, 0], strict=True)]
    rest, last = through, product
    locator: list[int] = [1]
    before: list[int] = []
    while 2 * (len(rest) - 1) >= len(points) + t:  # a partial run of Euclid's algorithm
        quotient, remainder = _divided(last, rest)
        before, locator = locator, _without_product(before, quotient, locator)
        last, rest = rest, remainder
    secret, remainder = _divided(rest, locator)
    if remainder or len(secret) > t:
        return None
    return _written(secret[0] if secret else 0)


def _written(number: int) -> bytes:
    return number.to_bytes(SHARE_BYTES, "big")


# Polynomials: coefficients from the lowest, the last one not 0. The zero polynomial is empty.


def _trimmed(polynomial: list[int]) -> list[int]:
    while polynomial and polynomial[-1] == 0:
        polynomial.pop()
    return polynomial


def _value(polynomial: list[int], x: int) -> int:
    return reduce(lambda total, coefficient: (total * x + coefficient) % PRIME, reversed(polynomial), 0)


def _divided(dividend: list[int], divisor: list[int]) -> tuple[list[int], list[int]]:
    """Quotient and remainder."""
    rest = list(dividend)
    inverse = pow(divisor[-1], -1, PRIME)
    quotient = [0] * max(len(dividend) - len(divisor) + 1, 0)
    for place in reversed(range(len(quotient))):
        factor = rest[place + len(divisor) - 1] * inverse % PRIME
        quotient[place] = factor
        for i, coefficient in enumerate(divisor):
            rest[place + i] = (rest[place + i] - factor * coefficient) % PRIME
    return quotient, _trimmed(rest)


def _without_product(one: list[int], factor: list[int], other: list[int]) -> list[int]:
    """one − factor · other."""
    result = one + [0] * max(len(factor) + len(other) - 1 - len(one), 0)
    for place, a in enumerate(factor):
        for i, b in enumerate(other):
            result[place + i] = (result[place + i] - a * b) % PRIME
    return _trimmed(result)


def _random_numbers(count: int) -> list[int]:
    """Numbers below the prime, each as likely as any other. Random bytes nearly always are one."""
    noise = secrets.token_bytes(count * SHARE_BYTES)
    drawn = (int.from_bytes(noise[at : at + SHARE_BYTES], "big") for at in range(0, len(noise), SHARE_BYTES))
    return [number if number < PRIME else secrets.randbelow(PRIME) for number in drawn]


def _shares_at(point: int, blocks: list[list[int]]) -> tuple[bytes, bytes]:
    """Evaluate two polynomials at once: each number holds a coefficient of one below HALF bits and of the other above.
    Points are small, so values grow slowly and are reduced only after each block."""
    low = high = 0
    for block in blocks:
        value = low + (high << HALF)
        for pair in block:
            value = value * point + pair
        low, high = (value & LOW_HALF) % PRIME, (value >> HALF) % PRIME
    return _written(low), _written(high)


def _inverses(values: list[int]) -> list[int]:
    """All inverses, with a single modular inversion: each is that of the whole product, times all other values."""
    before = list(accumulate(values, lambda a, b: a * b % PRIME, initial=1))
    after = list(accumulate(reversed(values[1:]), lambda a, b: a * b % PRIME, initial=1))[::-1]
    whole = pow(before.pop(), -1, PRIME)
    return [whole * a * b % PRIME for a, b in zip(before, after, strict=True)]
