"""One second moment a layer: the same bits as an implementation number by number, in pieces of any size, and, where
every weight is a layer, as Adam itself."""

from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st
from hypothesis.extra.numpy import arrays

from baffle.core.arrays import F32
from baffle.core.directions import Support
from baffle.core.update import adam, adam_by_layers, sum_of_squares

floats = st.floats(width=32, allow_nan=False, allow_infinity=False)
gradients = st.integers(1, 70).flatmap(
    lambda n: st.lists(arrays(np.float32, n, elements=floats), min_size=1, max_size=3)
)


class Case(NamedTuple):
    layers: tuple[Support, ...]
    gradients: list[F32]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Gradients of a model, cut into layers at any places. The first layer may have its end behind the others."""
    steps = draw(gradients)
    n = len(steps[0])
    cuts = sorted({0, n, *draw(st.lists(st.integers(0, n), max_size=5))})
    layers = [Support(start, stop) for start, stop in pairwise(cuts)]
    if len(layers) > 2 and draw(st.booleans()):
        first, last = layers[0], layers.pop()
        layers[0] = Support(first.start, first.stop, (last.start, last.stop))
    return Case(tuple(layers), steps)


def sum_by_hand(squares: Sequence[float]) -> float:
    """The tree from its root: a branch of 2^h leaves is the sum of its two halves; leaves that are missing are zero."""

    def branch(start: int, leaves: int) -> float:
        if start >= len(squares):
            return 0.0
        return squares[start] if leaves == 1 else branch(start, leaves // 2) + branch(start + leaves // 2, leaves // 2)

    return branch(0, 1 << (len(squares) - 1).bit_length())


def steps_by_hand(case: Case, rate: float, beta1: float, beta2: float) -> list[list[np.float32]]:
    """Number by number, one weight after the other, with Python's floats for the sums."""
    b1, b2, one, eps = np.float32(beta1), np.float32(beta2), np.float32(1), np.float32(1e-8)
    n = len(case.gradients[0])
    means, squares = [np.float32(0)] * n, [np.float32(0)] * len(case.layers)
    power1 = power2 = one
    steps = list[list[np.float32]]()
    for gradient in case.gradients:
        power1, power2 = b1 * power1, b2 * power2
        step = [np.float32(0)] * n
        for number, layer in enumerate(case.layers):
            own = [*range(layer.start, layer.stop), *range(*layer.tail)]
            square = np.float32(sum_by_hand([float(gradient[i]) * float(gradient[i]) for i in own]) / len(own))
            squares[number] = b2 * squares[number] + (one - b2) * square
            scale = np.sqrt(squares[number] / (one - power2)) + eps
            for i in own:
                means[i] = b1 * means[i] + (one - b1) * gradient[i]
                step[i] = np.float32(-rate) * ((means[i] / (one - power1)) / scale)
        steps.append(step)
    return steps


@pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value encountered")
@given(case=cases(), exponent=st.integers(0, 7))
@settings(max_examples=300)
@example(Case((Support(0, 2),), [np.array([3e38, 1e-45], np.float32)]), 0)
def test_the_bits_are_those_of_an_implementation_number_by_number(case: Case, exponent: int) -> None:
    transform = adam_by_layers(case.layers, 0.01, 0.9, 0.99, at_once=1 << exponent)
    weights = np.zeros(len(case.gradients[0]), np.float32)
    state = transform.init(weights)
    for gradient, expected in zip(case.gradients, steps_by_hand(case, 0.01, 0.9, 0.99), strict=True):
        state, step = transform.update(state, gradient, weights)
        assert step.tobytes() == np.array(expected, np.float32).tobytes()
    assert [len(part) for part in state] == [len(weights), len(case.layers), 1, 1]


@given(values=arrays(np.float32, st.integers(1, 300), elements=floats), exponent=st.integers(0, 10))
def test_a_sum_is_added_as_a_tree_and_nearly_exact(values: F32, exponent: int) -> None:
    found = sum_of_squares(values, Support(0, len(values)), 1 << exponent)
    assert found == sum_by_hand([float(value) * float(value) for value in values])
    exact = sum(Fraction(float(value)) ** 2 for value in values)
    assert abs(Fraction(found) - exact) <= exact * Fraction(9, 2**53)


def test_another_order_gives_another_sum() -> None:
    """So the order must be laid down, and these numbers tell whether it is kept."""
    small = 1.25 * 2.0**-27
    values = np.array([1, small, small, small], np.float32)
    assert sum_of_squares(values, Support(0, 4)) == 1 + 2**-52
    assert sum(float(value) ** 2 for value in values) == 1


@pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value encountered")
@given(steps=gradients)
def test_with_a_layer_for_every_weight_it_is_adam(steps: list[F32]) -> None:
    n = len(steps[0])
    layered, plain = adam_by_layers([Support(i, i + 1) for i in range(n)], 0.02, 0.8, 0.95), adam(0.02, 0.8, 0.95)
    weights = np.zeros(n, np.float32)
    states = layered.init(weights), plain.init(weights)
    for gradient in steps:
        ours, theirs = (
            each.update(state, gradient, weights) for each, state in zip((layered, plain), states, strict=True)
        )
        assert ours[1].tobytes() == theirs[1].tobytes()
        states = ours[0], theirs[0]
