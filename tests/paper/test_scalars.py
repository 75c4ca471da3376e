"""Exact scalars, and how well what is rebuilt from them points along the gradient."""

import numpy as np
import pytest

from baffle.core.directions import GAUSSIAN, Directions, dense
from baffle.paper.scalars import alignment, exact_scalars


def test_scalars_are_products_with_directions() -> None:
    directions, gradients = Directions(bytes(32), GAUSSIAN), np.random.default_rng(0).normal(size=(3, 50))
    z = directions.draw(range(100), 0, 50) * GAUSSIAN.unit
    np.testing.assert_allclose(exact_scalars(directions, 100, gradients), z @ gradients.T)


def test_no_scalars_have_no_direction() -> None:
    assert alignment(np.zeros(4), Directions(bytes(32), GAUSSIAN), dense(6, 4), np.ones(6)) == 0


def test_many_exact_scalars_point_along_the_gradient_and_their_negatives_against_it() -> None:
    gradient, directions = np.array([3.0, -1.0, 2.0]), Directions(bytes(32), GAUSSIAN)
    scalars = exact_scalars(directions, 2000, gradient[None])[:, 0]
    assert alignment(scalars, directions, dense(3, 2000), gradient) == pytest.approx(1, abs=0.01)
    assert alignment(-scalars, directions, dense(3, 2000), gradient) == pytest.approx(-1, abs=0.01)
