"""theorem2: the measured cosine is the one that the theorem predicts."""

import math

import numpy as np
import pytest

from baffle.core.directions import GAUSSIAN, RADEMACHER, Distribution
from baffle.paper.theorem2 import cosine


@pytest.mark.parametrize("distribution", [GAUSSIAN, RADEMACHER], ids=lambda distribution: distribution.name)
@pytest.mark.parametrize(("n", "k"), [(100, 10), (100, 100), (1000, 100)])
def test_the_cosine_is_as_predicted(n: int, k: int, distribution: Distribution) -> None:
    gradient = np.random.default_rng(n).normal(size=n)
    measured = [cosine(gradient, k, bytes([key]) * 32, distribution) for key in range(32)]
    assert np.mean(measured) == pytest.approx(math.sqrt(k / (k + n + 1)), rel=0.1)
