"""Shamir's secret sharing over the integers modulo 2²⁵⁶ + 297: any t of n shares give a secret, fewer give nothing."""

import secrets
from collections.abc import Sequence
from itertools import accumulate

PRIME = 2**256 + 297
SECRET_BYTES = 32
SHARE_BYTES = 33


def split(secret: bytes, t: int, points: Sequence[int]) -> list[bytes]:
    """A share for each point (a distinct positive number, say a client's place on the roster)."""
    if not 1 <= t <= len(points):
        raise ValueError(f"a threshold of {t} needs 1 to {len(points)} shares")
    polynomial = [secrets.randbelow(PRIME) for _ in range(t - 1)] + [int.from_bytes(secret, "big")]
    return [_evaluate(polynomial, point).to_bytes(SHARE_BYTES, "big") for point in points]


def weights(points: Sequence[int]) -> list[int]:
    """Lagrange's coefficients at 0: they depend on who answers only, so one set serves all secrets of these holders."""
    numerators = _products_of_others([-point % PRIME for point in points])
    denominators = []
    for here in points:
        product = 1
        for there in points:
            if there != here:
                product = product * (here - there) % PRIME
        denominators.append(product)
    return [n * inverse % PRIME for n, inverse in zip(numerators, _inverses(denominators), strict=True)]


def combine(coefficients: Sequence[int], shares: Sequence[bytes]) -> bytes | None:
    """The secret, or none where the shares do not belong together."""
    total = sum(c * int.from_bytes(share, "big") for c, share in zip(coefficients, shares, strict=True)) % PRIME
    return total.to_bytes(SECRET_BYTES, "big") if total < 2 ** (8 * SECRET_BYTES) else None


def _evaluate(polynomial: list[int], point: int) -> int:
    value = 0
    for coefficient in polynomial:
        value = (value * point + coefficient) % PRIME
    return value


def _products_of_others(values: list[int]) -> list[int]:
    """For each place, the product of all values but the one there."""
    before = list(accumulate(values[:-1], lambda a, b: a * b % PRIME, initial=1))
    after = list(accumulate(reversed(values[1:]), lambda a, b: a * b % PRIME, initial=1))[::-1]
    return [a * b % PRIME for a, b in zip(before, after, strict=True)]


def _inverses(values: list[int]) -> list[int]:
    """All inverses at the price of one."""
    whole = pow(_product(values), -1, PRIME)
    return [whole * others % PRIME for others in _products_of_others(values)]


def _product(values: list[int]) -> int:
    product = 1
    for value in values:
        product = product * value % PRIME
    return product
