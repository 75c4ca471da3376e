"""Optimizers as pairs of pure functions that are composed, not switched by flags.

Every operation is an elementwise IEEE float32 operation in a fixed order (sum, product, quotient, square root, and a
maximum, which has no order), so that a replay on another machine gives the same bits. Running products stand in for
powers. State is a flat tuple of float32 vectors, so that it can be hashed and stored without knowing what it means.
"""

from collections.abc import Callable, Iterator
from itertools import islice
from typing import NamedTuple, TypeAlias

import numpy as np

from baffle.core.arrays import F32

WEIGHTS_AT_ONCE = 1 << 16
"""An update of several operations handles this many weights at a time: few enough to stay in cache, and enough that
calls into NumPy take no time."""

State: TypeAlias = tuple[F32, ...]

Init: TypeAlias = Callable[[F32], State]
"""Weights → the state before the first step."""

Update: TypeAlias = Callable[[State, F32, F32], tuple[State, F32]]
"""State, gradient, weights → the next state and the transformed gradient; the last transform's is the step."""


class Transform(NamedTuple):
    init: Init
    update: Update


def compose(*transforms: Transform) -> Transform:
    """Transforms applied one after the other. The state is all their states in a row."""

    def init(weights: F32) -> State:
        return tuple(part for transform in transforms for part in transform.init(weights))

    def update(state: State, gradient: F32, weights: F32) -> tuple[State, F32]:
        remaining, after = iter(state), list[F32]()
        for transform in transforms:
            mine = tuple(islice(remaining, len(transform.init(weights[:0]))))
            mine, gradient = transform.update(mine, gradient, weights)
            after.extend(mine)
        return tuple(after), gradient

    return Transform(init, update)


def _pieces(n: int) -> Iterator[slice]:
    """The weights from 0 to n, a cache's worth at a time."""
    for start in range(0, n, WEIGHTS_AT_ONCE):
        yield slice(start, min(start + WEIGHTS_AT_ONCE, n))


def _stateless(f: Callable[[F32, F32], F32]) -> Transform:
    return Transform(lambda _: (), lambda _, gradient, weights: ((), f(gradient, weights)))


def clip(bound: float) -> Transform:
    """Rescale the whole gradient so that no entry exceeds `bound`; its direction stays."""
    c = np.float32(bound)

    def rescale(gradient: F32, _: F32) -> F32:
        zero = np.float32(0)
        largest = np.maximum(np.max(gradient, initial=zero), -np.min(gradient, initial=zero))
        return gradient * (c / largest) if largest > c else gradient

    return _stateless(rescale)


def weight_decay(factor: float) -> Transform:
    c = np.float32(factor)
    return _stateless(lambda gradient, weights: gradient + c * weights)


def sgd(rate: float) -> Transform:
    c = np.float32(-rate)
    return _stateless(lambda gradient, _: c * gradient)


def momentum(rate: float, beta: float = 0.9) -> Transform:
    """Heavy ball: the velocity is the running sum of gradients, each older one weighted down by β."""
    b, c = np.float32(beta), np.float32(-rate)

    def update(state: State, gradient: F32, _: F32) -> tuple[State, F32]:
        velocity = b * state[0] + gradient
        return (velocity,), c * velocity

    return Transform(lambda weights: (np.zeros_like(weights),), update)


def adam(rate: float, beta1: float = 0.9, beta2: float = 0.99, epsilon: float = 1e-8) -> Transform:
    b1, b2, eps, c = np.float32(beta1), np.float32(beta2), np.float32(epsilon), np.float32(-rate)
    one = np.float32(1)

    def init(weights: F32) -> State:
        return np.zeros_like(weights), np.zeros_like(weights), np.ones(1, np.float32), np.ones(1, np.float32)

    def update(state: State, gradient: F32, _: F32) -> tuple[State, F32]:
        mean_before, square_before, power1, power2 = state
        power1, power2 = b1 * power1, b2 * power2
        mean, square, step = (np.empty_like(gradient) for _ in range(3))
        spare = np.empty(min(len(gradient), WEIGHTS_AT_ONCE), np.float32)
        # m = b1·m + (1 − b1)·g, v = b2·v + (1 − b2)·g², step = −rate · (m / (1 − b1ᵗ)) / (√(v / (1 − b2ᵗ)) + ε), each
        # operation written to where its result belongs: fresh memory would take longer than the arithmetic.
        for here in _pieces(len(gradient)):
            g, m, v, s = gradient[here], mean[here], square[here], step[here]
            x = spare[: len(g)]
            np.multiply(mean_before[here], b1, out=m)
            np.multiply(g, one - b1, out=x)
            m += x
            np.multiply(g, g, out=x)
            x *= one - b2
            np.multiply(square_before[here], b2, out=v)
            v += x
            np.divide(v, one - power2, out=x)
            np.sqrt(x, out=x)
            x += eps
            np.divide(m, one - power1, out=s)
            s /= x
            s *= c
        return (mean, square, power1, power2), step

    return Transform(init, update)


Optimizer: TypeAlias = Callable[[float, tuple[float, float], float], Transform]
"""Rate, Adam's two betas, momentum → the transform that steps with them."""

OPTIMIZERS: dict[str, Optimizer] = {
    "adam": lambda rate, betas, _momentum: adam(rate, *betas),
    "momentum": lambda rate, _betas, beta: momentum(rate, beta),
    "sgd": lambda rate, _betas, _momentum: sgd(rate),
}


def average(decay: float) -> Transform:
    """Exponential moving average of the weights with warm-up: decay min(d, (1 + t) / (10 + t)).

    It does not influence the optimizer. Its state holds the average and the number of steps; it returns the average.
    """
    most, one, ten = np.float32(decay), np.float32(1), np.float32(10)

    def update(state: State, _: F32, weights: F32) -> tuple[State, F32]:
        before, steps = state
        d = np.minimum(most, (one + steps) / (ten + steps))
        smooth = np.empty_like(weights)
        for here in _pieces(len(weights)):
            np.multiply(before[here], d, out=smooth[here])
            smooth[here] += (one - d) * weights[here]
        return (smooth, steps + one), smooth

    return Transform(lambda weights: (weights.copy(), np.zeros(1, np.float32)), update)


def no_average() -> Transform:
    return Transform(lambda _: (), lambda _, __, weights: ((), weights))
