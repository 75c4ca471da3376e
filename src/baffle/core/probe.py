"""The client's half of a round: directional derivatives of a loss, by forward passes alone.

Core walks along the directions. For each of them it writes the moved weights into a scratch vector and asks the runtime
for the loss there; that one call is all that crosses the border between the two. A structured loss is the exception: it
knows a cheaper way to many losses at once.

A loss that is not finite stops nothing: whether a client's losses are finite says something about its samples, and so
would the time that it takes. What follows from such a loss is not finite either, and the ring makes nothing of it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np

from baffle.core.arrays import F32, F64
from baffle.core.directions import NUMBERS_AT_ONCE, Directions, Support, blocks, grouped

Loss = Callable[[F32], float]
"""Weights → loss on a fixed batch. This is all that an inference runtime must supply."""

SampleLosses = Callable[[F32], F64]
"""Weights → the loss of each sample of a fixed batch. Where clients are simulated, many of them share a batch."""

Value = TypeVar("Value", float, F64)
"""What is probed: a loss, or those of all samples, side by side."""


@runtime_checkable
class InPlaceLoss(Protocol):
    """A loss whose forward pass reads its weights from `scratch`: called with that vector, it copies nothing."""

    @property
    def scratch(self) -> F32: ...

    def __call__(self, weights: F32) -> Any: ...


class InPlace(Generic[Value]):
    """A loss, or losses, at the weights that a runtime reads from `scratch`."""

    def __init__(self, scratch: F32, value: Callable[[], Value]) -> None:
        self.scratch = scratch
        self._value: Callable[[], Value] = value

    def __call__(self, weights: F32) -> Value:
        if weights is not self.scratch:
            self.scratch[:] = weights
        return self._value()


@runtime_checkable
class StructuredLoss(Protocol):
    """A loss that reaches many points around one for less than a forward pass each."""

    def __call__(self, weights: F32) -> Any: ...

    def along(self, weights: F32, directions: Directions, supports: Sequence[Support], step: float) -> F64:
        """L(W + step · s_k · unit · z_k) for every k, where s_k is the direction's stretch: numbers, or a row each."""
        ...


class Probed(NamedTuple, Generic[Value]):
    """What a client learns about its loss at one point. If the losses of samples are probed, it is what each of them
    would learn."""

    scalars: F64  # D_k ≈ s_k² · z_k · ∇L with the stretch s_k (1 except on the sphere), independent of σ; or D_k's rows
    base: Value  # the loss itself
    forwards: int


class Scheme(Protocol):
    """How differences of losses become directional derivatives. At most `block` numbers are drawn at a time."""

    def __call__(
        self,
        loss: Callable[[F32], Value],
        weights: F32,
        directions: Directions,
        supports: Sequence[Support],
        sigma: float,
        block: int = NUMBERS_AT_ONCE,
    ) -> Probed[Value]: ...


def forward_difference(
    loss: Callable[[F32], Value],
    weights: F32,
    directions: Directions,
    supports: Sequence[Support],
    sigma: float,
    block: int = NUMBERS_AT_ONCE,
) -> Probed[Value]:
    """D_k = (L(W + σz_k) − L(W)) / σ with K + 1 forwards (eq. 1). With twice the K it is the paper's twice-FD."""
    base = loss(weights)
    moved = losses_along(loss, weights, directions, supports, sigma, block)
    return Probed(_stretched((moved - base) / sigma, directions, supports), base, len(supports) + 1)


def central_difference(
    loss: Callable[[F32], Value],
    weights: F32,
    directions: Directions,
    supports: Sequence[Support],
    sigma: float,
    block: int = NUMBERS_AT_ONCE,
) -> Probed[Value]:
    """D_k = (L(W + σz_k) − L(W − σz_k)) / 2σ with 2K forwards (eq. 2)."""
    ahead = losses_along(loss, weights, directions, supports, sigma, block)
    behind = losses_along(loss, weights, directions, supports, -sigma, block)
    base = (np.mean(ahead, axis=0) + np.mean(behind, axis=0)) / 2
    return Probed(_stretched((ahead - behind) / (2 * sigma), directions, supports), base, 2 * len(supports))


SCHEMES: Mapping[str, Scheme] = {"forward": forward_difference, "central": central_difference}


def _stretched(scalars: F64, directions: Directions, supports: Sequence[Support]) -> F64:
    """s_k times scalar k. It enters twice, here and in the probe's step: D_k multiplies z_k and not s_k · z_k."""
    stretches = np.empty(len(supports))
    for support, numbers in grouped(supports).items():
        stretches[numbers] = directions.stretch(numbers, support.size)
    return scalars * stretches.reshape(-1, *[1] * (scalars.ndim - 1))


def losses_along(
    loss: Callable[[F32], float] | Callable[[F32], F64],
    weights: F32,
    directions: Directions,
    supports: Sequence[Support],
    step: float,
    block: int = NUMBERS_AT_ONCE,
) -> F64:
    """L(W + step · s_k · unit · z_k) for every k."""
    if isinstance(loss, StructuredLoss):
        return loss.along(weights, directions, supports, step)
    losses, scratch = dict[int, float | F64](), _scratch(loss, weights)
    for k in moves(scratch, weights, directions, supports, step, block):
        losses[k] = loss(scratch)
    return np.array([losses[k] for k in range(len(supports))], np.float64)


def _scratch(loss: object, weights: F32) -> F32:
    """A copy of the weights to move: the loss's own scratch, where it has one of the same kind of numbers."""
    if isinstance(loss, InPlaceLoss) and loss.scratch.dtype == weights.dtype:
        loss.scratch[:] = weights
        return loss.scratch
    return weights.copy()


def moves(
    scratch: F32,
    weights: F32,
    directions: Directions,
    supports: Sequence[Support],
    step: float,
    block: int = NUMBERS_AT_ONCE,
) -> Iterator[int]:
    """For every k in turn, write W + step · s_k · unit · z_k into `scratch`, which holds exactly W before and after. At
    most `block` numbers are drawn at a time."""
    for numbers, support in blocks(supports, block):
        scales = (step * directions.distribution.unit * directions.stretch(numbers, support.size)).astype(np.float32)
        slices = [(at, min(at + block, support.size)) for at in range(0, support.size, block)]
        pieces = [(start, stop, support.parts(start, stop)) for start, stop in slices]
        together = directions.over(support, numbers, *slices[0]) if len(slices) == 1 else None
        for row, (k, scale) in enumerate(zip(numbers, scales, strict=True)):
            for start, stop, parts in pieces:
                z = directions.over(support, [k], start, stop)[0] if together is None else together[row]
                for touched, here in parts:
                    np.multiply(z[here], scale, out=scratch[touched], dtype=scratch.dtype)
                    scratch[touched] += weights[touched]
            yield k
        for touched, _ in support.parts():
            scratch[touched] = weights[touched]
