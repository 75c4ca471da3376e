"""Losses along outer directions that share forward passes, whatever runtime computes them."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from baffle.core.arrays import F32, F64
from baffle.core.directions import Directions, Support
from baffle.core.outer import Shapes, factors, places
from baffle.core.probe import Loss, losses_along
from baffle.errors import ModelError

LEAST = 8
"""Fewer directions may take less time in a pass each (benchmarks/outer.py)."""


def how_many(k: int, each: int, room: int) -> int:
    """How many of k directions share a pass whose tensors take `each` bytes for a direction and `room` in all."""
    most = min(k, room // each)
    return most if most >= LEAST else 1


class Added(NamedTuple):
    """What directions add to one tensor, a row each: a bᵀ, or `a` itself if the tensor is a vector."""

    a: F32  # directions × out, times the step; zeros where a direction does not touch the tensor
    b: F32 | None  # directions × in


def added(
    directions: Directions, numbers: range, supports: Sequence[Support], step: float, shapes: Shapes
) -> list[Added]:
    """What the directions `numbers` add to each tensor of a model with these shapes."""
    if directions.distribution.shapes != shapes:
        raise ModelError("probe.shapes are not those of task.model; leave them out to have them found")
    own = [supports[k] for k in numbers]
    kinds = list(dict.fromkeys(own))
    kind_of = np.array([kinds.index(support) for support in own])
    each = list[Added]()
    for place, (a, b) in zip(places(shapes), factors(directions.key, numbers, shapes), strict=True):
        touched = np.array([kind.below(place.stop) > kind.below(place.start) for kind in kinds])
        steps = touched[kind_of] * np.float32(step)  # as core rounds it
        each.append(Added(a * steps[:, None], None if b is None else b.astype(np.float32)))
    return each


def no_moves(shapes: Shapes) -> list[Added]:
    """What a direction adds that leads nowhere."""
    return [
        Added(
            np.zeros((1, place.rows), np.float32), np.zeros((1, place.columns), np.float32) if place.columns else None
        )
        for place in places(shapes)
    ]


def blocks_of(count: int, size: int) -> Iterator[range]:
    """The numbers of directions, in blocks that share a forward pass."""
    for start in range(0, count, size):
        yield range(start, min(start + size, count))


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
