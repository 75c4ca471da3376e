"""Skellam noise: differences of two Poisson numbers, integers like the ring's, and closed under sums, so that shares
of many clients add up to the same kind of noise.

Poisson numbers of any mean up to 2⁵⁵ are drawn by rejection, from a table. A candidate is drawn from blocks of 2^j
neighbouring numbers: a block by its integer weight, then a number in it. Both are exact, since 64 bits and j bits are
uniform. It is accepted with probability C·2^j·p(k) / weight ≤ 1, so that an accepted number has exactly the law p,
restricted to the table's range.
"""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal, localcontext
from fractions import Fraction
from functools import cache, cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from baffle.core.arrays import F64, I64

U64 = NDArray[np.uint64]

Randomness = Callable[[int], bytes]  # gives this many uniform random bytes

MOST_MEAN = 2**55
"""Beyond it, offsets from the mean are no longer exact in floating point. A ring of 32 bits has room for 2⁵¹."""

TAIL = 100 * math.log(2)  # each side of a table leaves out numbers of probability at most 2⁻¹⁰⁰ together

MARGIN = 2.0**-30
"""The relative error that is granted to an acceptance probability in floating point. It is below 2⁻⁴⁰ (a test compares
it with 90 decimal digits); a uniform number that is this close to it is compared in decimals instead."""

SLACK = 2.0**-20  # a block's weight exceeds the need computed in floating point by this factor

DIGITS = 90
FROM_STIRLING = 1000
TERMS = 15
MORE_BYTES = 16


@dataclass(frozen=True)
class Table:
    """`first` is the least number of the first block; each block holds 2^`bits` numbers. `ends` are running sums of the
    blocks' weights, less one. `factor` is C."""

    mean: Fraction
    first: int
    bits: int
    weights: tuple[int, ...]
    factor: int

    @cached_property
    def ends(self) -> U64:
        return np.cumsum(np.array(self.weights, np.uint64)) - np.uint64(1)

    @cached_property
    def _log_weights(self) -> F64:
        return np.log(np.array(self.weights, np.float64)) - (math.log(self.factor) + self.bits * math.log(2))

    @cached_property
    def _log_single(self) -> F64:
        """ln p(k) of every number, where a block is one number."""
        return log_probability(self.mean, self.first + np.arange(len(self.weights)))

    @property
    def efficiency(self) -> float:
        """The share of candidates that are accepted."""
        return self.factor / 2.0**64

    def accept(self, blocks: I64, numbers: I64) -> F64:
        """The probability with which a candidate is accepted, up to a relative error of MARGIN."""
        logs = log_probability(self.mean, numbers) if self.bits else self._log_single[blocks]
        return np.exp(logs - self._log_weights[blocks])

    def accept_exactly(self, block: int, number: int) -> Decimal:
        """The same to more than 60 digits."""
        with localcontext(prec=DIGITS):
            weight = Decimal(self.weights[block]) / (self.factor << self.bits)
            return (log_probability_exactly(self.mean, number) - weight.ln()).exp()


@lru_cache(maxsize=16)
def table(mean: Fraction) -> Table:
    """The table of a mean. Blocks are a sixteenth to an eighth of a standard deviation wide, or single numbers."""
    first, last = _range(mean)
    bits = max(0, math.isqrt(math.floor(mean)).bit_length() - 4)
    starts = np.arange(first, last + 1, 1 << bits)
    mode = math.floor(mean)  # probabilities rise up to it and fall after it
    highest = np.clip(mode, starts, starts + (1 << bits) - 1)
    needs = np.exp(log_probability(mean, highest)) * 2.0**bits
    factor = int(2.0**64 * (1 - 3 * SLACK) / float(needs.sum()))
    weights = tuple(int(factor * need * (1 + SLACK)) + 1 for need in needs.tolist())
    return Table(mean, first, bits, weights, factor)


def _range(mean: Fraction) -> tuple[int, int]:
    """Numbers that a Poisson number is outside of with probability at most 2⁻¹⁰⁰ on each side. By Chernoff's bound
    P(X ≥ x) ≤ exp(−D(x)) for x above the mean and P(X ≤ x) likewise below it, D(x) = x·ln(x/λ) − x + λ."""
    low = _farthest(mean, -1, math.floor(mean))
    return math.floor(mean) - low, math.ceil(mean) + _farthest(mean, 1, None)


def _farthest(mean: Fraction, sign: int, most: int | None) -> int:
    """The least distance from the mean, rounded outward, beyond which numbers are rare enough, or `most`."""
    middle = math.ceil(mean) if sign > 0 else math.floor(mean)

    def rare(steps: int) -> bool:
        return float(_deviance(mean, np.array([middle + sign * steps]))[0]) >= TAIL * (1 + MARGIN)

    near, far = 0, 1
    while (most is None or far < most) and not rare(far):
        near, far = far, 2 * far
    if most is not None and far >= most:
        return most
    while far - near > 1:
        half = (near + far) // 2
        near, far = (near, half) if rare(half) else (half, far)
    return far


def log_probability(mean: Fraction, numbers: I64) -> F64:
    """ln p(k) = −D(k) − ½·ln(2πk) − δ(k), δ being Stirling's correction: no term is large where p is not small, so that
    floating point loses nothing by cancellation."""
    k = np.maximum(numbers, 1).astype(np.float64)
    inverse = 1 / (k * k)
    correction = (1 / 12 - inverse * (1 / 360 - inverse * (1 / 1260 - inverse * (1 / 1680)))) / k
    if len(numbers) and int(numbers.min()) < 16:
        few = np.arange(1, 16)
        exact = [math.lgamma(n + 1) - (n + 0.5) * math.log(n) + n - 0.5 * math.log(2 * math.pi) for n in few.tolist()]
        correction = np.where(numbers < 16, np.array([0.0, *exact])[np.minimum(numbers, 15)], correction)
    logs = -_deviance(mean, numbers) - 0.5 * np.log(2 * math.pi * k) - correction
    return np.where(numbers == 0, -float(mean), logs)


def _deviance(mean: Fraction, numbers: I64) -> F64:
    """D(k) = λ·h(x), x = (k − λ)/λ, h(x) = (1 + x)·ln(1 + x) − x: by its series where x is small."""
    whole = math.floor(mean)
    x = ((numbers - whole) - float(mean - whole)) / float(mean)
    series = np.zeros_like(x)
    small = np.clip(x, -0.125, 0.125)
    for n in range(20, 1, -1):  # the next term is below 2⁻⁶⁰ of the first
        series = (1 if n % 2 == 0 else -1) / (n * (n - 1)) + small * series
    direct = (1 + x) * np.log1p(np.maximum(x, -0.999999)) - x  # k = 0 gives 0·ln 0 = 0; k = 1 of 10⁶ is out of range
    deviance: F64 = float(mean) * np.where(np.abs(x) <= 0.125, small * small * series, direct)
    return deviance


def log_probability_exactly(mean: Fraction, number: int) -> Decimal:
    """ln p(k) to more than 60 digits after the point."""
    with localcontext(prec=DIGITS):
        rate = Decimal(mean.numerator) / Decimal(mean.denominator)
        return number * rate.ln() - rate - _log_factorial(number)


def _log_factorial(n: int) -> Decimal:
    """ln n!: of the factorial itself, or by Stirling's series, whose error is below its first term left out, 10⁻⁸⁰."""
    if n < FROM_STIRLING:
        return Decimal(math.factorial(n)).ln()
    value = Decimal(n)
    total: Decimal = (value + Decimal("0.5")) * value.ln() - value + (2 * _pi()).ln() / 2
    for i in range(1, TERMS + 1):
        bernoulli = _bernoulli(2 * i)
        bottom = bernoulli.denominator * 2 * i * (2 * i - 1)
        total += Decimal(bernoulli.numerator) / (Decimal(bottom) * value ** (2 * i - 1))
    return total


@cache
def _bernoulli(n: int) -> Fraction:
    return Fraction(n == 0) - sum((math.comb(n, k) * _bernoulli(k) / (n - k + 1) for k in range(n)), Fraction(0))


@cache
def _pi() -> Decimal:
    """Machin's formula, 16·atan(1/5) − 4·atan(1/239), in integers."""
    unit: int = 10 ** (DIGITS + 10)

    def inverse_tangent(n: int) -> int:
        total, power, odd = 0, unit // n, 1
        while power:
            total += (power // odd) * (1 if odd % 4 == 1 else -1)
            power, odd = power // n**2, odd + 2
        return total

    with localcontext(prec=DIGITS):
        return Decimal(16 * inverse_tangent(5) - 4 * inverse_tangent(239)) / unit


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
