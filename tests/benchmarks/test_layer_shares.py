"""The estimator that ways of sharing directions out are tried with."""

import numpy as np
import pytest
from layer_shares import WAYS, estimate, lay_out

from baffle.core.directions import Support

LAYERS = (Support(0, 4), Support(4, 7, (12, 14)), Support(7, 12))
GRADIENT = np.linspace(-1, 2, 14, dtype=np.float32)


@pytest.mark.parametrize("way", WAYS)
def test_every_way_has_k_directions_and_estimates_the_gradient(way: str) -> None:
    dense, shares, _ = WAYS[way]
    layout = lay_out(LAYERS, GRADIENT, 8, dense, shares)
    assert sum(entry.directions for entry in layout) == 8
    random = np.random.default_rng(0)
    mean = np.mean([estimate(GRADIENT, layout, random) for _ in range(3000)], axis=0)
    np.testing.assert_allclose(mean, GRADIENT, atol=0.2)
