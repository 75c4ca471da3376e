"""Losses along outer directions that share forward passes, whatever runtime computes them."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Protocol

import numpy as np

from baffle.core.arrays import F32, F64
from baffle.core.directions import Directions, Support
from baffle.core.outer import Shapes, places
from baffle.core.probe import Loss, losses_along
from baffle.core.signs import signs
from baffle.errors import ModelError
from baffle.runtime.model import Together

LEAST = 8
"""Fewer directions may take less time in a pass each (benchmarks/outer.py)."""


def how_many(k: int, each: int, room: int) -> int:
    """How many of k directions share a pass whose tensors take `each` bytes for a direction and `room` in all."""
    most = min(k, room // each)
    return most if most >= LEAST else 1


def as_many_as_fit(k: int, each: int, samples: int, room: int) -> Together:
    """The same, with a remark if samples are too large for it."""
    if room // each < LEAST:
        return Together(1, f"the tensors of {samples} samples are so large that it would not pay")
    return Together(how_many(k, each, room))


def passes(count: int, most: int) -> Iterator[range]:
    """The numbers of directions in equal passes of at most so many."""
    needed = -(-count // most)
    for start, stop in pairwise(count * i // needed for i in range(needed + 1)):
        yield range(start, stop)


def lengths(shapes: Shapes) -> list[int]:
    """How many numbers `a` and `b` of each tensor have, in turns; `b` of a vector has none."""
    return [length for place in places(shapes) for length in (place.rows, place.columns)]


def steps(directions: Directions, numbers: range, supports: Sequence[Support], step: float, shapes: Shapes) -> F32:
    """What directions add to the tensors of a model: `a` and `b` of each, side by side, a row for each direction. `a`
    is multiplied by the step, or by 0 where a direction does not touch the tensor."""
    if directions.distribution.shapes != shapes:
        raise ModelError("probe.shapes are not those of task.model; leave them out to have them found")
    own = [supports[k] for k in numbers]
    kinds = list(dict.fromkeys(own))
    scales = np.ones((len(kinds), 2 * len(shapes)), np.float32)
    for number, place in enumerate(places(shapes)):
        scales[:, 2 * number] = [kind.below(place.stop) > kind.below(place.start) for kind in kinds]
    scales[:, ::2] *= np.float32(step)  # as core rounds it
    each = np.repeat(scales, lengths(shapes), axis=1)
    drawn: F32 = signs(directions.key, numbers, 0, each.shape[1]).astype(np.float32)
    drawn *= each if len(kinds) == 1 else each[[kinds.index(support) for support in own]]
    return drawn


class OuterSampleLosses(Protocol):
    """The losses of samples, for many outer directions at once."""

    def __call__(self, weights: F32) -> F64:
        """Each sample's loss."""
        ...

    def along(self, weights: F32, directions: Directions, supports: Sequence[Support], step: float) -> F64:
        """Each sample's loss at W + step · z_k, a row for every k."""
        ...


class OuterLoss:
    """The mean of these losses. `plain`, the loss of the whole model, is asked about directions that are not outer."""

    def __init__(self, losses: OuterSampleLosses, plain: Loss) -> None:
        self._losses = losses
        self._plain = plain

    def __call__(self, weights: F32) -> float:
        return float(self._losses(weights).mean())

    def along(self, weights: F32, directions: Directions, supports: Sequence[Support], step: float) -> F64:
        if not directions.distribution.shapes:
            # The plain loss may round differently, which must not show in differences to this object's loss.
            rounding = self(weights) - self._plain(weights)
            return losses_along(self._plain, weights, directions, supports, step) + rounding
        means: F64 = self._losses.along(weights, directions, supports, step).mean(axis=1)
        return means
