"""Optimizers as pairs of pure functions that are composed, not switched by flags.

Every operation is an elementwise IEEE float32 operation in a fixed order (sum, product, quotient, square root, and a
maximum, which has no order), so that a replay on another machine gives the same bits. Running products stand in for
powers. State is a flat tuple of float32 vectors, so that it can be hashed and stored without knowing what it means.

A mean over a layer must be the same bits everywhere, and a library's sum is not: its order depends on the machine. So
squares are added one pair at a time, as the leaves of a tree in the order of the weights: first neighbours, then
neighbouring sums, a missing one counting as zero. They are added in float64, where the square of a float32 is exact and
neither overflows nor vanishes, and the mean is rounded to float32 once.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import NamedTuple, TypeAlias

import numpy as np

from baffle.core.arrays import F32, F64
from baffle.core.directions import Support

WEIGHTS_AT_ONCE = 1 << 16  # so many stay in cache, and are enough that calls into NumPy take no time

State: TypeAlias = tuple[F32, ...]


Update: TypeAlias = Callable[[State, F32, F32], tuple[State, F32]]


class Transform(NamedTuple):
    """`init`: weights → the state before the first step. `update`: state, gradient, weights → the next state and the
    transformed gradient; the last transform's is the step.

    `freeze`: the state before a round of several steps → an update for these steps whose result is linear in gradient
    and weights. A transform without one is linear itself, apart from `clip`, which plans with such rounds refuse.
    """

    init: Callable[[F32], State]
    update: Update
    freeze: Callable[[State], Update] | None = None

    def frozen(self, state: State) -> Update:
        return self.freeze(state) if self.freeze else self.update


def compose(*transforms: Transform) -> Transform:
    """Transforms applied one after the other. The state is all their states in a row."""

    def init(weights: F32) -> State:
        return tuple(part for transform in transforms for part in transform.init(weights))

    def divided(state: State) -> list[State]:
        remaining = iter(state)
        lengths = [len(transform.init(np.empty(0, np.float32))) for transform in transforms]
        return [tuple(islice(remaining, length)) for length in lengths]

    def one_after_the_other(updates: Sequence[Update]) -> Update:
        def update(state: State, gradient: F32, weights: F32) -> tuple[State, F32]:
            after = list[F32]()
            for each, own in zip(updates, divided(state), strict=True):
                mine, gradient = each(own, gradient, weights)
                after.extend(mine)
            return tuple(after), gradient

        return update

    def freeze(state: State) -> Update:
        parts = zip(transforms, divided(state), strict=True)
        return one_after_the_other([transform.frozen(own) for transform, own in parts])

    return Transform(init, one_after_the_other([transform.update for transform in transforms]), freeze)


def _pieces(start: int, stop: int, at_once: int = WEIGHTS_AT_ONCE) -> Iterator[slice]:
    """The weights from `start` to `stop`, at most `at_once` at a time."""
    for first in range(start, stop, at_once):
        yield slice(first, min(first + at_once, stop))


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

    def update(state: State, gradient: F32, _: F32, divisor: F32 | None = None) -> tuple[State, F32]:
        mean_before, square_before, power1, power2 = state
        power1, power2 = b1 * power1, b2 * power2
        mean, square, step = (np.empty_like(gradient) for _ in range(3))
        spare = np.empty(min(len(gradient), WEIGHTS_AT_ONCE), np.float32)
        # m = b1·m + (1 − b1)·g, v = b2·v + (1 − b2)·g², step = −rate · (m / (1 − b1ᵗ)) / (√(v / (1 − b2ᵗ)) + ε), each
        # operation written to where its result belongs: fresh memory would take longer than the arithmetic.
        for here in _pieces(0, len(gradient)):
            g, m, v, s = gradient[here], mean[here], square[here], step[here]
            x = spare[: len(g)]
            np.multiply(mean_before[here], b1, out=m)
            np.multiply(g, one - b1, out=x)
            m += x
            np.multiply(g, g, out=x)
            x *= one - b2
            np.multiply(square_before[here], b2, out=v)
            v += x
            if divisor is None:
                np.divide(v, one - power2, out=x)
                np.sqrt(x, out=x)
                x += eps
            else:
                x = divisor[here]
            np.divide(m, one - power1, out=s)
            s /= x
            s *= c
        return (mean, square, power1, power2), step

    def freeze(state: State) -> Update:
        _, square, _, power2 = state
        return partial(update, divisor=_divisor(square, power2, eps))

    return Transform(init, update, freeze)


FLOOR = 2.0**-10
"""In rounds of several steps, Adam's second moments count as at least this share of their mean."""


def _divisor(square: F32, power2: F32, epsilon: np.float32) -> F32:
    """What all steps of a round are divided by, √(v / (1 − b2ᵗ)) + ε, with the second moments from before the round.

    A weight whose gradient was 0 so far would move by rate / ε; hence the floor. If all second moments are 0, nothing
    says how long a step may be: then it is infinite, so the round moves no weight.
    """
    sums = np.array([tree_sum(square[here].astype(np.float64)) for here in _pieces(0, len(square))])
    least = np.float32(FLOOR * tree_sum(sums) / len(square)) if len(square) else np.float32(0)
    if not least > 0:
        return np.full(len(square), np.inf, np.float32)
    divisor: F32 = np.sqrt(np.maximum(square, least) / (np.float32(1) - power2)) + epsilon
    return divisor


def adam_by_layers(
    layers: Sequence[Support],
    rate: float,
    beta1: float = 0.9,
    beta2: float = 0.99,
    epsilon: float = 1e-8,
    at_once: int = WEIGHTS_AT_ONCE,
) -> Transform:
    """Adam whose second moments are means over layers, which together hold every weight once. No bit depends on
    `at_once`, the largest number of weights that is handled at a time; it is a power of two."""
    b1, b2, eps, c = np.float32(beta1), np.float32(beta2), np.float32(epsilon), np.float32(-rate)
    one = np.float32(1)

    def init(weights: F32) -> State:
        return np.zeros_like(weights), np.zeros(len(layers), np.float32), np.ones(1, np.float32), np.ones(1, np.float32)

    def update(state: State, gradient: F32, _: F32, divisor: F32 | None = None) -> tuple[State, F32]:
        mean_before, square, power1, power2 = state
        power1, power2 = b1 * power1, b2 * power2
        latest: F64 = np.array([sum_of_squares(gradient, layer, at_once) / layer.size for layer in layers])
        square = b2 * square + (one - b2) * latest.astype(np.float32)
        scales = np.sqrt(square / (one - power2)) + eps if divisor is None else divisor
        mean, step = np.empty_like(gradient), np.empty_like(gradient)
        for layer, scale in zip(layers, scales, strict=True):
            for part, _numbers in layer.parts():
                for here in _pieces(part.start, part.stop, at_once):
                    mean[here] = b1 * mean_before[here] + (one - b1) * gradient[here]
                    step[here] = c * ((mean[here] / (one - power1)) / scale)
        return (mean, square, power1, power2), step

    def freeze(state: State) -> Update:
        _, square, _, power2 = state
        return partial(update, divisor=_divisor(square, power2, eps))

    return Transform(init, update, freeze)


def sum_of_squares(values: F32, layer: Support, at_once: int = WEIGHTS_AT_ONCE) -> float:
    """A piece whose length is a power of two is a branch of the tree, so any such length gives the same bits."""
    sums = list[float]()
    for here in _pieces(0, layer.size, at_once):
        wide = np.concatenate([values[weights] for weights, _ in layer.parts(here.start, here.stop)]).astype(np.float64)
        sums.append(tree_sum(wide * wide))
    return tree_sum(np.array(sums))


def tree_sum(numbers: F64) -> float:
    """The sum of at least one number, in the same bits everywhere."""
    while len(numbers) > 1:
        if len(numbers) % 2:
            numbers = np.append(numbers, 0.0)
        numbers = numbers[0::2] + numbers[1::2]
    return float(numbers[0])


OPTIMIZERS: dict[str, Callable[[float, tuple[float, float], float], Transform]] = {
    "adam": lambda rate, betas, _momentum: adam(rate, *betas),
    "momentum": lambda rate, _betas, beta: momentum(rate, beta),
    "sgd": lambda rate, _betas, _momentum: sgd(rate),
}
"""Rate, Adam's two betas, momentum → the transform that steps with them."""


def average(decay: float) -> Transform:
    """Exponential moving average of the weights with warm-up: decay min(d, (1 + t) / (10 + t)).

    It does not influence the optimizer. Its state holds the average and the number of steps; it returns the average.
    """
    most, one, ten = np.float32(decay), np.float32(1), np.float32(10)

    def update(state: State, _: F32, weights: F32) -> tuple[State, F32]:
        before, steps = state
        d = np.minimum(most, (one + steps) / (ten + steps))
        smooth = np.empty_like(weights)
        for here in _pieces(0, len(weights)):
            np.multiply(before[here], d, out=smooth[here])
            smooth[here] += (one - d) * weights[here]
        return (smooth, steps + one), smooth

    return Transform(lambda weights: (weights.copy(), np.zeros(1, np.float32)), update)


def no_average() -> Transform:
    return Transform(lambda _: (), lambda _, __, weights: ((), weights))
