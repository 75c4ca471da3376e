"""Combine the sums of several groups: by their mean, or by a median that no single group can move far.

Everything here is elementwise and in a fixed order, so it gives the same bits on every machine.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from baffle.core.arrays import F32, F64, I32, I64
from baffle.core.ring import GUARD
from baffle.errors import MessageError

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
