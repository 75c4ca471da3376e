"""The rule in docs/privacy.md of how many directions are worth their noise, against estimates with noise."""

import math

import numpy as np
import pytest

from baffle.privacy.skellam import draw

N, CLIENTS, STEPS = 400, 100, 2**16


@pytest.mark.parametrize("noise", [0.0, 5.0, 20.0])
@pytest.mark.parametrize("agreement", [1.0, 0.5])
@pytest.mark.parametrize("k", [20, 800])
def test_noise_costs_as_much_as_the_directions_that_the_rule_takes_away(noise: float, agreement: float, k: int) -> None:
    """Clients' vectors have the length of the clipping norm, STEPS, and their mean is `agreement` times as long."""
    worth = k / (1 + noise**2 * k / (agreement * CLIENTS) ** 2)
    random = np.random.default_rng([int(noise), k])
    cosines = []
    for _ in range(40):
        directions = random.standard_normal((k, N))
        scalars = directions @ (gradient := random.standard_normal(N))
        total = CLIENTS * agreement * STEPS * scalars / np.linalg.norm(scalars)
        estimate = directions.T @ (total + draw(k, (noise * STEPS) ** 2, random.bytes))
        cosines.append(estimate @ gradient / (np.linalg.norm(estimate) * np.linalg.norm(gradient)))
    expected = math.sqrt(worth / (worth + N + 1))
    spread = float(np.std(cosines)) / math.sqrt(len(cosines))
    assert float(np.mean(cosines)) == pytest.approx(expected, abs=4 * spread + 0.01)
