"""From real numbers to integers and back: fixed point in the integers modulo 2³².

A sum of ring elements does not depend on its order, so every client order gives the same bits, and masks (which live
in the same ring) cancel without a trace. The sums of several groups are combined by their mean, or by a median that no
single group can move far, elementwise and in a fixed order.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from baffle.core.arrays import F32, F64, I32, I64
from baffle.errors import MessageError

GUARD = 2**29  # no sum may exceed this: two bits below the ring's edge
EXTRAS = 4  # coordinates that travel behind the values: sample weight, the constant 1, clipped values, base loss
LOSS_MAX = 64.0  # the base loss is clipped to ± this before it is summed. It is only reported, never trained on
NOT_FINITE = "no client's loss was finite"  # why a round has no sum although clients answered
ELEMENT = np.dtype("<u4")  # a ring element on the wire

RingVector = NDArray[np.uint32]

NO_HEAD: F64 = np.empty(0)  # the numbers of a head that is probed like other weights


class Sum(NamedTuple):
    """All that the server learns from one round: sums over the contributing clients."""

    totals: I32
    weight: int  # ΣN_c
    contributors: int
    clipped: int
    loss: float | None  # ΣN_c·L_c / ΣN_c; None if no client says what its loss is


class Encoding(Protocol):
    """How a client's values become integers that can be summed, and what a sum of them may be."""

    @property
    def scale(self) -> float:
        """How many steps of the ring a value of 1 has."""

    @property
    def head_scale(self) -> float:
        """The same for the numbers of an exact head."""

    def encode(
        self, values: F64, length: int, weight: int, loss: float, clipped_before: int = 0, head: F64 = NO_HEAD
    ) -> RingVector: ...

    def joined(self, vectors: Sequence[RingVector], length: int) -> RingVector:
        """The vector of a round, of this length, from those of its steps."""

    def nothing(self, length: int, weight: int) -> RingVector:
        """What a client sends whose loss is not finite."""

    def weights(self, contributors: int) -> range:
        """The weights that so many honest clients can have together."""

    def most(self, contributors: int, weight: int) -> int:
        """The largest total of a value that so many honest clients can cause if they have this weight together."""

    def beyond(self, totals: I32, contributors: int, weight: int) -> int:
        """The largest total, if it is more than so many honest clients of this weight together can cause; else 0."""

    def check(self, total: RingVector, contributors: int) -> None: ...

    def decode(self, total: RingVector, contributors: int) -> Sum: ...


@dataclass(frozen=True)
class Ring:
    """The scale that clients and server share, such that no sum overflows. Each side derives it; it is never sent.

    `clients` take part in a round, `n_max` caps a client's sample weight, and `clip` bounds a value. `tier_factor`
    (K / K_min) makes room for clients that answer fewer directions with a larger weight each. In a `silent` ring all
    clients have weight 1, and tell neither their loss nor how many values they clipped. The last `head` values of a
    step are those of an exact head. They have a scale of their own, and `head_clip` bounds them. The vectors of the
    `steps` of a round have the same length and lie in a row.
    """

    clients: int
    n_max: int
    clip: float
    tier_factor: Fraction = Fraction(1)
    silent: bool = False
    head: int = 0
    head_clip: float = 1.0
    steps: int = 1

    @cached_property
    def _bound(self) -> Fraction:
        """The largest value of a client of weight 1."""
        return Fraction(self.clip) * self.tier_factor

    @cached_property
    def exponent(self) -> int:
        """log₂ of the scale S; may be negative."""
        return _exponent(self.clients, self.n_max, self._bound)

    @cached_property
    def scale(self) -> float:
        return 2.0**self.exponent

    @cached_property
    def head_scale(self) -> float:
        return 2.0 ** _exponent(self.clients, self.n_max, Fraction(self.head_clip))

    @cached_property
    def _loss_scale(self) -> float:
        return 2.0 ** _exponent(self.clients, self.n_max, Fraction(LOSS_MAX))

    def encode(
        self, values: F64, length: int, weight: int, loss: float, clipped_before: int = 0, head: F64 = NO_HEAD
    ) -> RingVector:
        """One client's contribution: `values`, zeros, an exact head's numbers up to `length`, and extra coordinates.

        A client that evaluated only a prefix of the directions counts each of them more, which keeps the estimate
        unbiased for any mix of slow and fast clients. `clipped_before` counts values that were clipped earlier, while
        these were computed. If the loss or a value is not finite, it is `nothing`.
        """
        if weight not in self.weights(1):
            raise MessageError(f"a sample weight must be 1 to {self.weights(1)[-1]}, got {weight}")
        most = length - self.head
        if not most <= len(values) * self.tier_factor <= most * self.tier_factor:
            raise MessageError(f"expected {math.ceil(most / self.tier_factor)} to {most} values, got {len(values)}")
        if len(head) != self.head:
            raise MessageError(f"expected {self.head} numbers of an exact head, got {len(head)}")
        if not (math.isfinite(loss) and np.isfinite(values).all() and np.isfinite(head).all()):
            return self.nothing(length, weight)
        bounded, exact = np.clip(values, -self.clip, self.clip), np.clip(head, -self.head_clip, self.head_clip)
        clipped = int(np.count_nonzero(bounded != values)) + int(np.count_nonzero(exact != head)) + clipped_before
        vector = np.zeros(length + EXTRAS, dtype=np.int64)
        if len(values):
            vector[: len(values)] = np.rint(bounded * (weight * (most / len(values)) * self.scale))
        vector[most:length] = np.rint(exact * (weight * self.head_scale))
        vector[length:] = self._extras(weight, min(length, clipped), loss)
        return vector.astype(np.uint32)  # modulo 2³²

    def joined(self, vectors: Sequence[RingVector], length: int) -> RingVector:
        return in_a_row(vectors, length)

    def _extras(self, weight: int, clipped: int, loss: float) -> tuple[int, int, int, int]:
        if self.silent:
            return weight, 1, 0, 0
        return weight, 1, clipped, round(weight * min(max(loss, -LOSS_MAX), LOSS_MAX) * self._loss_scale)

    def nothing(self, length: int, weight: int) -> RingVector:
        """What a client sends whose loss is not finite: zeros of its usual weight, all of which count as clipped, and
        the largest loss. If such a client abstained or had another weight, a server could choose weights at which the
        loss is infinite for some labels and not for others, and learn who has which."""
        vector = np.zeros(length + EXTRAS, dtype=np.uint32)
        vector[length:] = self._extras(weight, length, LOSS_MAX)
        return vector

    def weights(self, contributors: int) -> range:
        """The weights that so many clients can have together."""
        return range(contributors, contributors * (1 if self.silent else self.n_max) + 1)

    def most(self, contributors: int, weight: int) -> int:
        """The largest total that so many clients of this weight can cause: a mean is never beyond the clip."""
        return math.floor(weight * self._bound * Fraction(self.scale)) + contributors  # one rounding per client

    def beyond(self, totals: I32, contributors: int, weight: int) -> int:
        """The largest total, if it is more than so many clients of this weight can cause; else 0."""
        rows = totals.reshape(self.steps, -1)
        k = rows.shape[1] - self.head
        scalar, exact = largest_of(rows[:, :k]), largest_of(rows[:, k:])
        if scalar > self.most(contributors, weight):
            return scalar
        return exact if exact > weight * self.head_clip * self.head_scale + contributors else 0

    def check(self, total: RingVector, contributors: int) -> None:
        """Refuse a sum of `contributors` vectors that honest clients cannot have produced."""
        if contributors < 1 or len(total) < EXTRAS:
            raise MessageError(f"{len(total)} elements from {contributors} contributors are not a sum")
        signed = total.view(np.int32)
        weight, ones, clipped, loss = (int(extra) for extra in signed[-EXTRAS:])
        values = signed[:-EXTRAS]
        possible = self.weights(contributors)
        if ones != contributors or weight not in possible:
            raise MessageError(
                f"the sum claims {ones} contributors of sample weight {weight}, expected {contributors} with "
                f"{possible[0]} to {possible[-1]}"
            )
        if largest := self.beyond(values, contributors, weight):
            raise MessageError(
                f"a total of {largest} is more than {contributors} clients of sample weight {weight} can send within "
                f"their bounds"
            )
        if self.silent and (clipped, loss) != (0, 0):
            raise MessageError("the sum claims a loss or clipped values, but clients of this run tell neither")
        if not 0 <= clipped <= contributors * len(values):
            raise MessageError(f"the sum claims {clipped} clipped values of {contributors * len(values)}")
        if abs(loss) > contributors + weight * LOSS_MAX * self._loss_scale:
            raise MessageError(f"the sum claims a mean loss beyond ±{LOSS_MAX:g}")

    def decode(self, total: RingVector, contributors: int) -> Sum:
        """Read a sum. One that honest clients cannot have produced is refused, and so is one of nothing, unless clients
        do not tell."""
        self.check(total, contributors)
        signed = total.view(np.int32)
        weight, _, clipped, loss = (int(extra) for extra in signed[-EXTRAS:])
        values = signed[:-EXTRAS]
        if self.silent:
            return Sum(values, weight, contributors, 0, None)
        is_largest = loss + contributors >= weight * LOSS_MAX * self._loss_scale
        if clipped == contributors * len(values) and is_largest and not values.any():
            raise MessageError(NOT_FINITE)
        return Sum(values, weight, contributors, clipped, loss / (weight * self._loss_scale))


def in_a_row(vectors: Sequence[RingVector], length: int) -> RingVector:
    """One vector of this length from those of a round's steps: their values in a row, zeros where the round has fewer
    steps than others, the clipped values of all, and their mean loss."""
    if len(vectors[0]) == length + EXTRAS:
        return vectors[0]
    whole = np.zeros(length + EXTRAS, dtype=np.int64)
    values = np.concatenate([vector[:-EXTRAS] for vector in vectors])
    whole[: len(values)] = values
    extras = np.array([vector[-EXTRAS:].view(np.int32) for vector in vectors], np.int64)
    whole[length:] = *extras[0, :2], extras[:, 2].sum(), round(float(extras[:, 3].mean()))
    return whole.astype(np.uint32)


def largest_of(totals: I32) -> int:
    return int(np.max(np.abs(totals.astype(np.int64)), initial=0))


def add(vectors: Iterable[RingVector]) -> RingVector:
    """The sum in the ring, of at least one vector."""
    remaining = iter(vectors)
    total = next(remaining).astype(np.uint32)
    for vector in remaining:
        total += vector
    return total


def _exponent(clients: int, n_max: int, bound: Fraction) -> int:
    """⌊log₂((2²⁹ − C) / (B·C·N_max))⌋, in exact arithmetic; −C leaves room for one rounding per client."""
    room = Fraction(GUARD - clients) / (bound * clients * n_max)
    guess = room.numerator.bit_length() - room.denominator.bit_length()
    return guess if Fraction(2) ** guess <= room else guess - 1


Combine = Literal["mean", "median"]


class Totals(NamedTuple):
    """A sum in the ring and its ΣN_c."""

    numbers: I32
    weight: int


def combine_totals(groups: Sequence[Totals], how: Combine) -> Totals:
    """One sum from groups that probed the same directions. Their mean is exactly the sum of all their totals."""
    if len(groups) == 1:
        return groups[0]
    weight = sum(group.weight for group in groups)
    if how == "median":
        middle = _median(np.stack([group.numbers / group.weight for group in groups]))
        rounded: I32 = np.rint(np.clip(middle * weight, -GUARD, GUARD)).astype(np.int32)
        return Totals(rounded, weight)
    whole: I64 = np.sum([group.numbers for group in groups], axis=0, dtype=np.int64)
    if np.abs(whole).max(initial=0) > GUARD:
        raise MessageError("the groups' totals together are more than clients can send within their bounds")
    return Totals(whole.astype(np.int32), weight)


def combine_gradients(gradients: Sequence[F32], weights: Sequence[int], how: Combine) -> F32:
    """One gradient from groups that each probed their own directions."""
    if len(gradients) == 1:
        return gradients[0]
    if how == "median":
        return _median(np.stack(gradients).astype(np.float64)).astype(np.float32)
    whole = np.zeros(len(gradients[0]))
    for gradient, weight in zip(gradients, weights, strict=True):
        whole += gradient.astype(np.float64) * weight
    return (whole / sum(weights)).astype(np.float32)


def _median(rows: F64) -> F64:
    """The middle number of each column, or the mean of the two in the middle."""
    rows.sort(axis=0)
    low = (len(rows) - 1) // 2
    high = len(rows) // 2
    middle: F64 = (rows[low] + rows[high]) / 2
    return middle
