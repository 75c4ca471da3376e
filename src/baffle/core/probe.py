"""The client's half of a round: directional derivatives of a loss, by forward passes alone.

For each direction, core writes the moved weights into a scratch vector and asks the runtime for the loss there. This
call is the whole interface between the two. A structured loss is the exception: it can compute many losses at once for
less.

A loss that is not finite stops nothing, because whether a client's losses are finite says something about its samples,
and so would the time that it takes. Values that follow from such a loss are not finite either, and the ring encodes
them as `nothing`.

`estimate` is the estimator on its own: the gradient of any function, from values of that function.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np

from baffle.core.arrays import F32, F64
from baffle.core.directions import (
    NUMBERS_AT_ONCE,
    Directions,
    Support,
    blocks,
    dense,
    distribution_names,
    distribution_of,
    grouped,
)
from baffle.core.samples import Array
from baffle.errors import PlanError

Loss = Callable[[F32], float]  # weights → loss on a fixed batch. An inference runtime needs to supply nothing else

SampleLosses = Callable[[F32], F64]
"""Weights → the loss of each sample of a fixed batch. Where clients are simulated, many of them share a batch."""

Value = TypeVar("Value", float, F64)  # what is probed: a loss, or those of all samples, side by side


@dataclass(frozen=True)
class InPlace(Generic[Value]):
    """A loss, or losses, at the weights in `scratch`. Called with that very vector, it copies nothing."""

    scratch: F32
    value: Callable[[], Value]

    def __call__(self, weights: F32) -> Value:
        if weights is not self.scratch:
            self.scratch[:] = weights
        return self.value()


def counted(loss: Callable[[F32], Value], passed: Callable[[int], None]) -> Callable[[F32], Value]:
    """The same loss, which tells of each of its passes. A structured one is left as it is."""

    def telling(compute: Callable[..., Value], *weights: F32) -> Value:
        value = compute(*weights)
        passed(1)
        return value

    if isinstance(loss, StructuredLoss):
        return loss
    if isinstance(loss, InPlace):
        return InPlace(loss.scratch, partial(telling, loss.value))
    return partial(telling, loss)


@runtime_checkable
class StructuredLoss(Protocol):
    """A loss that can be computed at many points around one for less than a forward pass each."""

    def __call__(self, weights: F32) -> Any: ...

    def along(self, weights: F32, directions: Directions, supports: Sequence[Support], step: float) -> F64:
        """L(W + step · s_k · unit · z_k) for every k, where s_k is the direction's stretch: numbers, or a row each."""


class Probed(NamedTuple, Generic[Value]):
    """The result of a probe at one point: scalars of a loss, or a column of them for each sample."""

    scalars: F64  # D_k ≈ s_k² · z_k · ∇L with the stretch s_k (1 except on the sphere), independent of σ; or D_k's rows
    base: Value  # the loss itself
    forwards: int


Formula = Callable[[Callable[[], Value], Callable[[float], F64], float], tuple[F64, Value]]
"""The loss at W, the losses at W + step · z_k for a step, and σ → D_k for every k, and the loss itself."""


@dataclass(frozen=True)
class Scheme:
    """How differences of losses become directional derivatives."""

    formula: Formula[Any]
    forwards: Callable[[int], int]
    """Directions → forward passes."""

    def __call__(
        self,
        loss: Callable[[F32], Value],
        weights: F32,
        directions: Directions,
        supports: Sequence[Support],
        sigma: float,
        block: int = NUMBERS_AT_ONCE,
        base: Value | None = None,
    ) -> Probed[Value]:
        """Probe a loss at W. At most `block` numbers are drawn at a time. `base` is the loss at W, if it is known."""
        scalars, found = self.formula(
            lambda: loss(weights) if base is None else base,
            lambda step: losses_along(loss, weights, directions, supports, step, block),
            sigma,
        )
        return Probed(_stretched(scalars, directions, supports), found, self.forwards(len(supports)))


def _forward(at: Callable[[], Value], along: Callable[[float], F64], sigma: float) -> tuple[F64, Value]:
    """D_k = (L(W + σz_k) − L(W)) / σ with K + 1 forwards (eq. 1). With twice the K it is the paper's twice-FD."""
    base = at()
    return (along(sigma) - base) / sigma, base


def _central(_at: Callable[[], Value], along: Callable[[float], F64], sigma: float) -> tuple[F64, Value]:
    """D_k = (L(W + σz_k) − L(W − σz_k)) / 2σ with 2K forwards (eq. 2)."""
    ahead, behind = along(sigma), along(-sigma)
    return (ahead - behind) / (2 * sigma), (np.mean(ahead, axis=0) + np.mean(behind, axis=0)) / 2


forward_difference = Scheme(_forward, lambda k: k + 1)
central_difference = Scheme(_central, lambda k: 2 * k)

SCHEMES: Mapping[str, Scheme] = {"forward": forward_difference, "central": central_difference}


def _stretched(scalars: F64, directions: Directions, supports: Sequence[Support]) -> F64:
    """s_k times scalar k. It enters twice, here and in the probe's step: D_k multiplies z_k and not s_k · z_k."""
    stretches = np.empty(len(supports))
    for support, numbers in grouped(supports).items():
        stretches[numbers] = directions.stretch(numbers, support.size)
    return scalars * stretches.reshape(-1, *[1] * (scalars.ndim - 1))


def scalars_of(gradient: F32, directions: Directions, supports: Sequence[Support], block: int = NUMBERS_AT_ONCE) -> F64:
    """What a probe would measure without rounding and curvature: s_k² · unit · z_k · ∇L for every k, from a gradient
    that is known. At most `block` numbers are drawn at a time."""
    scalars = np.zeros(len(supports))
    for numbers, support in blocks(supports, block):
        slope = np.concatenate([gradient[touched] for touched, _ in support.parts()]).astype(np.float64)
        for start in range(0, support.size, block):
            stop = min(start + block, support.size)
            scalars[list(numbers)] += directions.over(support, numbers, start, stop) @ slope[start:stop]
    scalars *= directions.distribution.unit
    return _stretched(_stretched(scalars, directions, supports), directions, supports)


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
    if isinstance(loss, InPlace) and loss.scratch.dtype == weights.dtype:
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


def estimate(
    loss: Callable[[Array], float],
    weights: Array,
    key: bytes | int,
    k: int,
    sigma: float,
    *,
    scheme: str = "forward",
    distribution: str = "rademacher",
) -> Array:
    """The gradient of a black-box function, estimated from its values along `k` random directions.

    `loss` is called with arrays of the shape of `weights` and must give a number; it need not have a derivative.
    `sigma` is how far to move along a direction. The key determines the directions: the same key gives the same
    estimate. `scheme` "forward" calls the function k + 1 times, "central" 2k times and with less bias. The estimate has
    the shape of the weights; it is float64 if they are, otherwise float32. Directions of the `distribution` "outer" are
    products a bᵀ of ±1, for weights that are a matrix.

    >>> import numpy as np
    >>> import baffle
    >>> def bowl(weights):
    ...     return float(np.sum((weights - 3) ** 2))
    >>> weights = np.zeros(4)
    >>> for step in range(200):
    ...     weights -= 0.02 * baffle.estimate(bowl, weights, key=step, k=8, sigma=1e-4)
    >>> np.round(weights, 2)
    array([3., 3., 3., 3.])
    """
    for name, value, known in (("scheme", scheme, SCHEMES), ("distribution", distribution, distribution_names())):
        if value not in known:
            raise PlanError(f"{name}: expected one of {', '.join(map(repr, known))}, got {value!r}")
    if k < 1 or not sigma > 0:
        raise PlanError(f"expected at least one direction and a positive sigma, got k = {k} and sigma = {sigma:g}")
    given = np.asarray(weights)
    flat: Array = given.astype(np.float64 if given.dtype == np.float64 else np.float32).reshape(-1)
    directions = Directions(_key(key), distribution_of(distribution, (given.shape,)))
    supports = dense(len(flat), k)

    def at(moved: Array) -> float:
        found = loss(moved.reshape(given.shape).copy())  # a copy, so that `loss` may keep it
        try:
            return float(found)
        except (TypeError, ValueError):
            raise PlanError(f"loss: expected a function that returns one number, got {type(found).__name__}") from None

    scalars = SCHEMES[scheme](at, flat, directions, supports, sigma).scalars
    total = np.zeros(len(flat))
    for numbers, support in blocks(supports):
        total += scalars[list(numbers)] @ directions.over(support, numbers).astype(np.float64)
    return np.asarray(total * (directions.distribution.unit / k), flat.dtype).reshape(given.shape)


def _key(key: bytes | int) -> bytes:
    """Thirty-two bytes are used as they are; any other key is hashed."""
    if isinstance(key, bytes) and len(key) == 32:
        return key
    if not isinstance(key, (bytes, int, np.integer)):
        raise PlanError(f"key: expected bytes or a whole number, got {key!r}")
    text = key if isinstance(key, bytes) else str(int(key)).encode()
    return sha256(b"baffle/estimate/1" + text).digest()
