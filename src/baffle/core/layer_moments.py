"""Adam with one second moment for each layer: a layer's weights are all scaled by the root of their mean square.

The mean over a layer must be the same bits everywhere, and a library's sum is not: its order depends on the machine. So
squares are added here one pair at a time, as the leaves of a tree in the order of the weights: first neighbours, then
neighbouring sums, a missing one counting as zero. They are added in float64, where the square of a float32 is exact and
neither overflows nor vanishes, and the mean is rounded to float32 once.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from baffle.core.arrays import F32, F64
from baffle.core.directions import Support
from baffle.core.update import WEIGHTS_AT_ONCE, State, Transform


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

    def update(state: State, gradient: F32, _: F32) -> tuple[State, F32]:
        mean_before, square, power1, power2 = state
        power1, power2 = b1 * power1, b2 * power2
        latest = np.array([sum_of_squares(gradient, layer, at_once) / layer.size for layer in layers]).astype(
            np.float32
        )
        square = b2 * square + (one - b2) * latest
        scales = np.sqrt(square / (one - power2)) + eps
        mean, step = np.empty_like(gradient), np.empty_like(gradient)
        for layer, scale in zip(layers, scales, strict=True):
            for here in _pieces(layer, at_once):
                mean[here] = b1 * mean_before[here] + (one - b1) * gradient[here]
                step[here] = c * ((mean[here] / (one - power1)) / scale)
        return (mean, square, power1, power2), step

    return Transform(init, update)


def sum_of_squares(values: F32, layer: Support, at_once: int = WEIGHTS_AT_ONCE) -> float:
    """A piece whose length is a power of two is a branch of the tree, so any such length gives the same bits."""
    sums = list[float]()
    for start in range(0, layer.size, at_once):
        parts = layer.parts(start, min(start + at_once, layer.size))
        wide = np.concatenate([values[weights] for weights, _ in parts]).astype(np.float64)
        sums.append(_tree_sum(wide * wide))
    return _tree_sum(np.array(sums))


def _tree_sum(numbers: F64) -> float:
    while len(numbers) > 1:
        if len(numbers) % 2:
            numbers = np.append(numbers, 0.0)
        numbers = numbers[0::2] + numbers[1::2]
    return float(numbers[0])


def _pieces(layer: Support, at_once: int) -> Iterator[slice]:
    """A layer's weights, at most `at_once` at a time."""
    for weights, _ in layer.parts():
        for start in range(weights.start, weights.stop, at_once):
            yield slice(start, min(start + at_once, weights.stop))
