"""The rank of the right answer among a model's answers."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from baffle.core.ranks import ranks


@given(st.integers(1, 12), st.integers(0, 30), st.integers(0, 2**32 - 1))
def test_a_label_is_among_the_best_answers_exactly_where_its_rank_is_below_their_number(
    classes: int, samples: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    outputs = rng.integers(-3, 4, (samples, classes)).astype(np.float32)  # few values, so that many are equal
    labels = rng.integers(0, classes, samples)
    places = ranks(outputs, labels)
    assert ((places == 0) == (outputs.argmax(1) == labels)).all()
    best_first = np.argsort(-outputs, axis=1, kind="stable")
    for top in range(1, classes + 1):
        assert ((places < top) == (best_first[:, :top] == labels[:, None]).any(1)).all()


def test_an_output_that_is_not_a_number_is_never_right() -> None:
    outputs = np.array([[np.nan, 0, 1], [np.nan, np.nan, np.nan], [5, np.nan, 1]], np.float32)
    assert ranks(outputs, np.array([0, 1, 0])).tolist() == [2, 2, 1]
