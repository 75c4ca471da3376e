"""Where an exact head lies among the weights, and what is left for directions."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from baffle.core.directions import Support
from baffle.core.head import Head, HeadPass, without

EDGES = st.lists(st.integers(0, 30), min_size=4, max_size=4, unique=True).map(sorted)


def _weights(support: Support | None) -> set[int]:
    return {weight for part, _ in support.parts() for weight in range(part.start, part.stop)} if support else set()


def _support(edges: list[int], *, whole: bool) -> Support:
    a, b, c, d = edges
    return Support(a, d) if whole else Support(a, b, (c, d))


@given(EDGES, EDGES, st.booleans(), st.booleans())
def test_what_is_left_of_a_support_is_all_of_it_but_the_head(
    one: list[int], other: list[int], one_whole: bool, other_whole: bool
) -> None:
    support, head = _support(one, whole=one_whole), _support(other, whole=other_whole)
    expected = _weights(support) - _weights(head)
    places = sum(1 for weight in expected if weight - 1 not in expected)
    touching = support.stop == support.tail[0] and support.stop not in _weights(head)
    if places + touching > 2:
        with pytest.raises(ValueError, match="lie in"):
            without(support, head)
    elif not touching:
        assert _weights(without(support, head)) == expected


@pytest.mark.parametrize(
    ("head", "support"),
    [
        (Head((4, 10), (10, 12)), Support(4, 12)),
        (Head((2, 8), (0, 2)), Support(0, 8)),
        (Head((4, 10), (20, 22)), Support(4, 10, (20, 22))),
        (Head((4, 10), (0, 2)), Support(0, 2, (4, 10))),
        (Head((0, 6)), Support(0, 6)),
        (Head((4, 10)), Support(4, 10)),
    ],
)
def test_a_heads_tensors_are_one_support(head: Head, support: Support) -> None:
    assert head.support == support


@pytest.mark.parametrize("bias_first", [False, True])
@pytest.mark.parametrize("by_input", [False, True])
def test_a_heads_gradient_is_in_the_order_of_the_flat_vector(bias_first: bool, by_input: bool) -> None:
    slopes, inputs = np.array([[1.0, -1.0], [0.0, 2.0]]), np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    head = Head((2, 8), (0, 2), by_input) if bias_first else Head((0, 6), (6, 8), by_input)
    weight = slopes.T @ inputs / 2
    expected = [(weight.T if by_input else weight).reshape(-1), slopes.mean(axis=0)]
    got = head.gradient(HeadPass(0.0, slopes, inputs))
    np.testing.assert_allclose(got, np.concatenate(expected[::-1] if bias_first else expected))
