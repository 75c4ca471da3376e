"""Skellam noise: differences of two Poisson numbers, integers like the ring's, and closed under sums, so that shares
of many clients add up to the same kind of noise."""

import os
from collections.abc import Callable
from decimal import Decimal, localcontext
from fractions import Fraction

import numpy as np

from baffle.core.arrays import I64
from baffle.privacy.poisson import DIGITS, MARGIN, MOST_MEAN, Table, table

Randomness = Callable[[int], bytes]
"""Gives this many uniform random bytes."""

DISTANCE = 2.0**-96
"""The total variation distance of a drawn number from Skellam's law, at most."""

MORE_BYTES = 16


def draw(count: int, variance: float | Fraction, random: Randomness = os.urandom) -> I64:
    """Independent Skellam(μ/2, μ/2) numbers of variance μ, up to 2⁵⁶, from the operating system's randomness.

    A number's law is within a total variation distance of 2⁻⁹⁶ of Skellam's, if the bytes are uniform. Each of its two
    Poisson numbers is drawn by rejection, which is exact but for two things: numbers in tails of probability 2⁻¹⁰⁰ on
    either side are never drawn (a distance of 2⁻⁹⁹), and the decision to accept is made with 90 decimal digits and 192
    random bits when floating point cannot make it for sure (less than 2⁻¹⁵⁰). No floating-point number is part of a
    result. The time that a draw takes is not constant.

    A vector of K numbers in each of T rounds is thus within K·T·2⁻⁹⁶ of the exact law, which adds as much to δ.
    """
    if count < 0 or not 0 <= variance <= 2 * MOST_MEAN:
        raise ValueError(f"a count from 0 and a variance of 0 to 2⁵⁶ are expected, got {count} and {float(variance)}")
    mean = Fraction(variance) / 2
    if not count or not mean:
        return np.zeros(count, np.int64)
    numbers = _poisson(2 * count, table(mean), random)
    return numbers[:count] - numbers[count:]


def _poisson(count: int, law: Table, random: Randomness) -> I64:
    """The first `count` candidates that are accepted, less the table's first number."""
    accepted: list[I64] = []
    missing = count
    while missing > 0:
        kept = _candidates(int(missing / law.efficiency * 1.02) + 16, law, random)[:missing]
        accepted.append(kept)
        missing -= len(kept)
    return np.concatenate(accepted)


def _candidates(tries: int, law: Table, random: Randomness) -> I64:
    """Those of `tries` candidates that are accepted, in order. Each takes three random words: one chooses the block (or
    none, beyond the last), one the number in it, and one decides."""
    words = np.frombuffer(random(24 * tries), "<u8").reshape(3, tries)
    words = words[:, words[0] <= law.ends[-1]]
    blocks = np.searchsorted(law.ends, words[0])
    offsets = (blocks << law.bits) + (words[1] & np.uint64((1 << law.bits) - 1)).astype(np.int64)
    chances = law.accept(blocks, law.first + offsets) * 2.0**64
    uniform = words[2].astype(np.float64)  # a relative error of 2⁻⁵³, within the margin
    kept = uniform < chances
    for i in np.flatnonzero(np.abs(uniform - chances) <= chances * MARGIN + 2):
        kept[i] = _decide(int(words[2, i]), law.accept_exactly(int(blocks[i]), law.first + int(offsets[i])), random)
    accepted: I64 = offsets[kept]
    return accepted


def _decide(leading: int, chance: Decimal, random: Randomness) -> bool:
    """Whether a uniform number in [0, 1) with these leading 64 bits is below `chance`. Its next bits are drawn now."""
    more = (leading << 8 * MORE_BYTES) + int.from_bytes(random(MORE_BYTES), "big")
    with localcontext(prec=DIGITS):
        return Decimal(more) < chance * Decimal(2 ** (64 + 8 * MORE_BYTES))
