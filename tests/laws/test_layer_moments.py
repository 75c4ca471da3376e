"""One second moment a layer: the same bits as an independent implementation, in pieces of any size, and, where every
weight is a layer, as Adam itself."""

from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st
from hypothesis.extra.numpy import arrays

from baffle.core.arrays import F32
from baffle.core.directions import Support, row_of
from baffle.core.update import adam, adam_by_layers, sum_of_squares
from tests.protocol.learning import initial_state, step as independent_step, tree_sum
from tests.protocol.plans import read_plan

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


@pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value encountered")
@given(case=cases(), exponent=st.integers(0, 7))
@settings(max_examples=300)
@example(Case((Support(0, 2),), [np.array([3e38, 1e-45], np.float32)]), 0)
def test_the_bits_are_those_of_an_independent_implementation(case: Case, exponent: int) -> None:
    transform = adam_by_layers(case.layers, 0.01, 0.9, 0.99, at_once=1 << exponent)
    plan = read_plan('update = {moments = "layers", rate = 0.01, betas = [0.9, 0.99], ema = 0}')
    plan["update.layers"] = [row_of(layer) for layer in case.layers]
    weights = np.zeros(len(case.gradients[0]), np.float32)
    state, theirs = transform.init(weights), initial_state(plan, weights)
    for gradient in case.gradients:
        state, step = transform.update(state, gradient, weights)
        theirs = independent_step(plan, [weights, *theirs[1:]], gradient)
        assert [part.tobytes() for part in theirs] == [part.tobytes() for part in (weights + step, *state)]


@given(values=arrays(np.float32, st.integers(1, 300), elements=floats), exponent=st.integers(0, 10))
def test_a_sum_is_added_as_a_tree_and_nearly_exact(values: F32, exponent: int) -> None:
    found = sum_of_squares(values, Support(0, len(values)), 1 << exponent)
    assert found == tree_sum(values.astype(np.float64) ** 2)
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
