"""How far two sets of numbers can be told apart, against counting by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baffle.core.arrays import F64
from baffle.paper.fig_attack.separation import auc, kolmogorov_smirnov

FEW = st.lists(st.integers(-3, 3).map(float), min_size=1, max_size=8).map(np.array)


@given(inside=FEW, outside=FEW)
def test_auc_counts_pairs(inside: F64, outside: F64) -> None:
    pairs = [(a > b) + (a == b) / 2 for a in inside for b in outside]
    assert auc(inside, outside) == pytest.approx(np.mean(pairs))
    assert auc(inside, outside) + auc(outside, inside) == pytest.approx(1)


@given(one=FEW, other=FEW)
def test_a_threshold_is_never_better_than_kolmogorov_and_smirnov_say(one: F64, other: F64) -> None:
    best = max(abs(np.mean(one <= at) - np.mean(other <= at)) for at in (*one, *other))
    assert kolmogorov_smirnov(one, other) == pytest.approx(best)
    assert kolmogorov_smirnov(one, one) == 0
