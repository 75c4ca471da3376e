"""The client's half of a round: directional derivatives of a loss, by forward passes alone."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from baffle.core.arrays import F32, F64
from baffle.core.directions import NUMBERS_AT_ONCE, Directions, Support, blocks, grouped
from baffle.errors import NotFiniteError

Loss = Callable[[F32], float]
"""Weights → loss on some fixed batch. All that an inference runtime must supply."""


@runtime_checkable
class Landscape(Protocol):
    """A loss that knows a quicker way to many points around one than a forward pass for each."""

    def __call__(self, weights: F32) -> float: ...

    def along(self, weights: F32, directions: Directions, supports: Sequence[Support], step: float) -> F64:
        """L(W + step · s_k · unit · z_k) for every k, where s_k is the direction's stretch."""
        ...


class Probed(NamedTuple):
    """What a client found out about its loss at one point."""

    scalars: F64  # D_k ≈ s_k² · z_k · ∇L with the stretch s_k (1 but on the sphere), independent of σ
    base: float  # the loss itself
    forwards: int


Scheme = Callable[[Loss, F32, Directions, Sequence[Support], float], Probed]


def forward_difference(
    loss: Loss, weights: F32, directions: Directions, supports: Sequence[Support], sigma: float
) -> Probed:
    """D_k = (L(W + σz_k) − L(W)) / σ with K + 1 forwards (eq. 1). With twice the K it is the paper's twice-FD."""
    base = _finite(loss(weights))
    moved = _losses_along(loss, weights, directions, supports, sigma)
    return Probed((moved - base) / sigma * _stretches(directions, supports), base, len(supports) + 1)


def central_difference(
    loss: Loss, weights: F32, directions: Directions, supports: Sequence[Support], sigma: float
) -> Probed:
    """D_k = (L(W + σz_k) − L(W − σz_k)) / 2σ with 2K forwards (eq. 2)."""
    ahead = _losses_along(loss, weights, directions, supports, sigma)
    behind = _losses_along(loss, weights, directions, supports, -sigma)
    base = float(np.mean(ahead) + np.mean(behind)) / 2
    return Probed((ahead - behind) / (2 * sigma) * _stretches(directions, supports), base, 2 * len(supports))


SCHEMES: Mapping[str, Scheme] = {"forward": forward_difference, "central": central_difference}


def _stretches(directions: Directions, supports: Sequence[Support]) -> F64:
    """s_k for every k: once in the probe's step and once here, because z_k, not s_k · z_k, is multiplied by D_k."""
    found = np.empty(len(supports))
    for support, numbers in grouped(supports).items():
        found[numbers] = directions.stretch(numbers, support.size)
    return found


def _losses_along(loss: Loss, weights: F32, directions: Directions, supports: Sequence[Support], step: float) -> F64:
    way = loss.along if isinstance(loss, Landscape) else partial(forward_each, loss)
    losses = way(weights, directions, supports, step)
    if not np.isfinite(losses).all():
        _finite(float(losses[~np.isfinite(losses)][0]))
    return losses


def forward_each(loss: Loss, weights: F32, directions: Directions, supports: Sequence[Support], step: float) -> F64:
    """L(W + step · s_k · unit · z_k) for every k, from a scratch copy of the weights."""
    losses = np.empty(len(supports))
    scratch = weights.copy()
    for k in moves(scratch, weights, directions, supports, step):
        losses[k] = _finite(loss(scratch))
    return losses


def moves(
    scratch: F32,
    weights: F32,
    directions: Directions,
    supports: Sequence[Support],
    step: float,
    block: int = NUMBERS_AT_ONCE,
) -> Iterator[int]:
    """For every k in turn, write W + step · s_k · unit · z_k into `scratch`, which holds exactly W before and after. No
    more than `block` numbers are drawn at a time."""
    for numbers, support in blocks(supports, block):
        scales = (step * directions.distribution.unit * directions.stretch(numbers, support.size)).astype(np.float32)
        slices = [(at, min(at + block, support.size)) for at in range(0, support.size, block)]
        together = directions.draw(numbers, *slices[0]) if len(slices) == 1 else None
        for row, (k, scale) in enumerate(zip(numbers, scales, strict=True)):
            for start, stop in slices:
                z = directions.draw([k], start, stop)[0] if together is None else together[row]
                for touched, here in support.parts(start, stop):
                    np.multiply(z[here], scale, out=scratch[touched], dtype=scratch.dtype)
                    scratch[touched] += weights[touched]
            yield k
        for touched, _ in support.parts():
            scratch[touched] = weights[touched]


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise NotFiniteError(f"the loss is {value}, expected a finite number; a smaller update.rate may help")
    return value
