"""Initial weights by NumPy: what they are, on every machine."""

from hashlib import sha256
from math import sqrt

import numpy as np
from hypothesis import given, strategies as st

from baffle.models.drawing import draw_weights

SHAPES = {"0.weight": (8, 3, 5, 5), "0.bias": (8,), "4.weight": (10, 128), "4.bias": (10,)}

BITS = "61114a49bf2207cb1b4266be79e51b3e2b14ea96379f7b41a7b9bead8e96e965"


def test_the_bits_never_change() -> None:
    """Runs that exist begin with them."""
    drawn = draw_weights(SHAPES, 7)
    assert drawn.dtype == np.float32
    assert sha256(drawn.astype("<f4").tobytes()).hexdigest() == BITS


@given(st.integers(0, 2**63 - 1))
def test_a_layer_is_uniform_within_the_bound_of_its_inputs(seed: int) -> None:
    drawn = draw_weights(SHAPES, seed)
    filters, filter_biases, linear, biases = np.split(drawn, [600, 608, 608 + 1280])
    for numbers, inputs in ((filters, 75), (filter_biases, 75), (linear, 128), (biases, 128)):
        assert np.abs(numbers).max() <= np.float32(1 / sqrt(inputs))
    for numbers, inputs in ((filters, 75), (linear, 128)):
        scaled = numbers * sqrt(inputs)
        assert abs(scaled.mean()) < 6 / sqrt(3 * len(scaled))
        assert abs(scaled.var() - 1 / 3) < 0.1


@given(st.integers(0, 2**62), st.integers(1, 2**62))
def test_seeds_and_tensors_share_no_numbers(seed: int, more: int) -> None:
    one, other = draw_weights(SHAPES, seed), draw_weights(SHAPES, seed + more)
    assert np.mean(one == other) < 0.01
    first, second = draw_weights({"a.weight": (50, 4), "b.weight": (50, 4)}, seed).reshape(2, -1)
    assert np.mean(first == second) < 0.05
