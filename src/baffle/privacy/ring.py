"""The ring of a private run: each vector is clipped as a whole, and the ring has room for the noise of all clients.

Clients' vectors differ only in their noised values: every client has weight 1, and sends no loss and no count of
clipped values. An honest sum is refused with a chance of at most one in 2⁴⁰, if the noise alone exceeds the bound.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np

from baffle.core.arrays import F64, I32, I64
from baffle.core.ring import EXTRAS, GUARD, NO_HEAD, RingVector, Sum, in_a_row, largest_of
from baffle.errors import MessageError
from baffle.privacy.accounting import Release, bound_l1, sum_variance
from baffle.privacy.skellam import Randomness, draw

LN_2 = 0.6931471805599454
"""An upper bound on ln 2. The scale helps to determine the weights, so it is computed from sums, products, quotients
and square roots alone, which have the same bits on every machine."""

FAILURE_BITS = 40
"""A sum exceeds its bound with a chance of at most one in two to this power, over all of its values together."""

LARGEST = 2**31  # the largest entry and the largest bound: their product fits in 63 bits


@dataclass(frozen=True)
class PrivateRing:
    """The scale that the clients and the server of a private run share. `clients` take part in a round. Each sends
    `length` values, whose vector is at most `norm` long. They are those of `steps` steps in a row. The last `head` of a
    step are those of an exact head, and count `head_factor` times. The noise in a sum has a standard deviation of
    `noise` times the norm; each client adds one part in `sharers` of its variance."""

    clients: int
    norm: float
    noise: float
    sharers: int
    length: int
    head: int = 0
    head_factor: float = 1.0
    steps: int = 1

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
    def head_scale(self) -> float:
        return self.scale * self.head_factor

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
        """The variance of one client's part of the noise. It is exact: `draw` takes fractions."""
        return self.variance / self.sharers

    @property
    def release(self) -> Release:
        """An upper bound on what a reader of the sum learns about one client."""
        return Release(self.delta_2, bound_l1(self.delta_2, self.length), float(self.variance))

    def encode(
        self,
        values: F64,
        length: int,
        weight: int,
        loss: float,
        clipped_before: int = 0,  # noqa: ARG002
        head: F64 = NO_HEAD,
    ) -> RingVector:
        """A client's vector of one step without its noise: `values`, zeros up to `length`, and extra coordinates that
        are the same for all clients. Values that are not finite become zeros."""
        most = self.length // self.steps - self.head
        if weight != 1 or length != most + self.head or not min(1, most) <= len(values) <= most:
            raise MessageError(
                f"expected 1 to {most} values of weight 1, got {len(values)} of {length} with weight {weight}"
            )
        if len(head) != self.head:
            raise MessageError(f"expected {self.head} numbers of an exact head, got {len(head)}")
        vector = np.zeros(length + EXTRAS, dtype=np.int64)
        whole = np.zeros(length)
        if len(values):
            whole[: len(values)] = values * (most / len(values))
        whole[most:] = head * self.head_factor
        if math.isfinite(loss) and np.isfinite(whole).all():
            vector[:length] = self._clipped(whole)
        vector[length:] = 1, 1, 0, 0
        return vector.astype(np.uint32)  # modulo 2³²

    def joined(self, vectors: Sequence[RingVector], length: int) -> RingVector:
        """The vector of a round, clipped as a whole."""
        whole = in_a_row(vectors, length)
        whole[:length] = clip_encoded(whole[:length].view(np.int32).astype(np.int64), self.delta_2).astype(np.uint32)
        return whole

    def nothing(self, length: int, weight: int) -> RingVector:  # noqa: ARG002
        """What a client sends whose loss is not finite: zeros, before its noise."""
        return in_a_row([np.array([1, 1, 0, 0], np.uint32)], length)

    def _clipped(self, values: F64) -> I64:
        """The values as integers that are together no longer than Δ₂."""
        largest = float(np.max(np.abs(values)))
        if not largest:
            return np.zeros(len(values), dtype=np.int64)
        longest = float(np.linalg.norm(values / largest)) * largest  # no square overflows
        shrunk = values * min(1.0, 2 * self.norm / longest)  # short enough for the exact clipping
        return clip_encoded(np.trunc(shrunk * self.scale).astype(np.int64), self.delta_2)

    def noised(self, vector: RingVector, random: Randomness) -> RingVector:
        """An encoded vector with this client's part of the noise on every value."""
        noise = draw(self.length, self.share, random)
        noised = vector.copy()
        noised[: self.length] += noise.astype(np.uint32)
        return noised

    def weights(self, contributors: int) -> range:
        """The weight of so many clients: each has 1."""
        return range(contributors, contributors + 1)

    def most(self, contributors: int, weight: int = 0) -> int:  # noqa: ARG002
        """The largest total that this many clients can cause, wrong with a chance of one in 2⁴⁰."""
        return math.ceil(self._most(contributors, self.delta_2))

    def beyond(self, totals: I32, contributors: int, weight: int) -> int:  # noqa: ARG002
        """The largest total, if it is more than this many clients can cause; else 0."""
        largest = largest_of(totals)
        return largest if largest > self.most(contributors) else 0

    def _most(self, contributors: int, delta_2: float) -> float:
        """The largest total of vectors of full length, plus the tail of the noise. By Bernstein's inequality, a Skellam
        number of variance v exceeds ±(L/3 + √(L²/9 + 2vL)) with a chance of at most 2·exp(−L)."""
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
        if largest := self.beyond(signed[:-EXTRAS], contributors, weight):
            raise MessageError(f"a total of {largest} is more than {contributors} clients can send within their bounds")

    def decode(self, total: RingVector, contributors: int) -> Sum:
        """Read the sum of `contributors` vectors, and refuse one that honest clients cannot have produced."""
        self.check(total, contributors)
        return Sum(total.view(np.int32)[:-EXTRAS], contributors, contributors, 0, None)


def clip_encoded(vector: I64, delta_2: int) -> I64:
    """The vector itself if its L2 norm is at most `delta_2`, else shrunk to that, each entry rounded toward zero.

    Each |q| becomes ⌊|q|·Δ₂ / ⌈‖q‖⌉⌋, all in integers. So the new norm is at most Δ₂·‖q‖ / ⌈‖q‖⌉ ≤ Δ₂, exactly, and
    clipping twice is clipping once.
    """
    if not 0 <= delta_2 <= LARGEST:
        raise ValueError(f"a bound of 0 to 2³¹ is expected, got {delta_2}")
    squared = squared_norm(vector)
    if squared <= delta_2**2:
        return vector.copy()
    norm = math.isqrt(squared - 1) + 1  # rounded up
    shrunk: I64 = np.sign(vector) * (np.abs(vector) * delta_2 // norm)
    return shrunk


def squared_norm(vector: I64) -> int:
    """‖q‖₂² as an exact integer. Entries are split into 16 low bits and the rest, so that no sum overflows."""
    if len(vector) and not -LARGEST <= int(vector.min()) <= int(vector.max()) <= LARGEST:
        raise ValueError("entries within ±2³¹ are expected; a vector is clipped after it is encoded")
    size = np.abs(vector)
    high, low = size >> 16, size & 0xFFFF
    return (int(high @ high) << 32) + (int(high @ low) << 17) + int(low @ low)
