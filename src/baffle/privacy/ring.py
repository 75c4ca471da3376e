"""The ring of a private run: vectors are clipped as one, and there is room for everybody's noise.

The clients' vectors differ in nothing but their noised values: everybody has weight 1 and tells no loss and no count
of clipped values. No honest sum is refused, but for one chance in 2⁴⁰ that noise alone exceeds the bound.
"""

import math
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np

from baffle.core.arrays import F64, I64
from baffle.core.ring import EXTRAS, GUARD, RingVector, Sum
from baffle.errors import MessageError
from baffle.privacy.accounting import Release, share_variance, sum_variance
from baffle.privacy.clipping import bound_l1, clip_encoded
from baffle.privacy.skellam import Randomness, draw

LN_2 = 0.6931471805599454
"""No less than the logarithm of 2. The scale is part of what determines the weights, so it is computed with nothing but
sums, products, quotients and square roots, which have the same bits on every machine."""

FAILURE_BITS = 40
"""A sum exceeds its bound with a chance of at most one in two to this power, over all of its values together."""


@dataclass(frozen=True)
class PrivateRing:
    """The scale that the clients and the server of a private run share. `clients` take part in a round, and `length`
    values of each, together no longer than `norm`, are summed. The noise in a sum has a standard deviation of `noise`
    times the norm, of whose variance everybody adds one part in `sharers`."""

    clients: int
    norm: float
    noise: float
    sharers: int
    length: int

    n_max = 1
    """Everybody counts the same."""

    exponent: int = field(init=False, compare=False)
    """log₂ of the scale S: the largest with which a sum stays below the guard."""

    def __post_init__(self) -> None:
        exponent = math.frexp(GUARD / (self.norm * self.clients))[1]
        while self._most(self.clients, math.ldexp(self.norm, exponent)) >= GUARD:
            exponent -= 1
        object.__setattr__(self, "exponent", exponent)

    @property
    def scale(self) -> float:
        return math.ldexp(1.0, self.exponent)

    @property
    def delta_2(self) -> int:
        """Δ₂: no client's integers are together longer than this."""
        return math.floor(self.norm * self.scale)

    @property
    def variance(self) -> Fraction:
        """μ: the variance of the noise in a value of the sum, if no more than `sharers` clients have added theirs."""
        return sum_variance(self.noise, self.delta_2)

    @property
    def share(self) -> Fraction:
        """The variance of one client's part of the noise."""
        return share_variance(self.variance, self.sharers)

    @property
    def release(self) -> Release:
        """What everybody who sees a sum learns at most about one client."""
        return Release(self.delta_2, bound_l1(self.delta_2, self.length), float(self.variance))

    def encode(self, values: F64, length: int, weight: int, loss: float, clipped_before: int = 0) -> RingVector:  # noqa: ARG002
        """One client's contribution without its noise: `values`, zeros up to `length`, and extra coordinates that are
        the same for everybody. Values that are not finite become zeros."""
        if weight != 1 or length != self.length or not 0 < len(values) <= length:
            raise MessageError(
                f"expected 1 to {self.length} values of weight 1, got {len(values)} of {length} with weight {weight}"
            )
        vector = np.zeros(length + EXTRAS, dtype=np.int64)
        if math.isfinite(loss) and np.isfinite(values).all():
            vector[: len(values)] = self._clipped(values, length / len(values))
        vector[length:] = 1, 1, 0, 0
        return vector.astype(np.uint32)  # modulo 2³²

    def _clipped(self, values: F64, factor: float) -> I64:
        """The values, `factor` times each, as integers that are together no longer than Δ₂."""
        largest = float(np.max(np.abs(values)))
        if not largest:
            return np.zeros(len(values), dtype=np.int64)
        longest = float(np.linalg.norm(values / largest)) * largest  # no square overflows
        shrunk = values * min(factor, 2 * self.norm / longest)  # enough to fit; what is longer than Δ₂ is cut exactly
        return clip_encoded(np.trunc(shrunk * self.scale).astype(np.int64), self.delta_2)

    def noised(self, vector: RingVector, random: Randomness) -> RingVector:
        """An encoded vector with this client's part of the noise on every value."""
        noise = draw(self.length, self.share, random)
        noised = vector.copy()
        noised[: self.length] += noise.astype(np.uint32)
        return noised

    def most(self, contributors: int) -> int:
        """The largest total that so many clients can cause, with a chance of one in 2⁴⁰ to be wrong."""
        return math.ceil(self._most(contributors, self.delta_2))

    def _most(self, contributors: int, delta_2: float) -> float:
        """Vectors as long as they may be, and the tail of the noise. By Bernstein's inequality, a Skellam number of
        variance v exceeds ±(L/3 + √(L²/9 + 2vL)) with a chance of at most 2·exp(−L)."""
        bits = LN_2 * (1 + FAILURE_BITS + self.length.bit_length())
        deviation = self.noise * delta_2
        variance = contributors * deviation * deviation / self.sharers
        return contributors * delta_2 + bits / 3 + math.sqrt(bits * bits / 9 + 2 * variance * bits)

    def check(self, total: RingVector, contributors: int) -> None:
        """Refuse a sum of `contributors` vectors that honest clients cannot have produced."""
        if contributors < 1 or len(total) != self.length + EXTRAS:
            raise MessageError(f"{len(total)} elements from {contributors} contributors are not a sum")
        signed = total.view(np.int32)
        weight, ones, clipped, loss = (int(extra) for extra in signed[-EXTRAS:])
        if (weight, ones) != (contributors, contributors):
            raise MessageError(
                f"the sum claims {ones} contributors of weight {weight}, expected {contributors} with 1 each"
            )
        if (clipped, loss) != (0, 0):
            raise MessageError("the sum claims a loss or clipped values, but clients of a private run tell neither")
        largest = int(np.max(np.abs(signed[:-EXTRAS].astype(np.int64)), initial=0))
        if largest > self.most(contributors):
            raise MessageError(f"a total of {largest} is more than {contributors} clients can send within their bounds")

    def decode(self, total: RingVector, contributors: int) -> Sum:
        """Read the sum of `contributors` vectors. One that honest clients cannot have produced is refused."""
        self.check(total, contributors)
        return Sum(total.view(np.int32)[:-EXTRAS], contributors, contributors, 0, None)
