"""The alignment that a report measures from scalars is the alignment."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from baffle.core.directions import DISTRIBUTIONS, Directions
from baffle.core.rebuild import gradient_from_scalars
from baffle.core.seeds import Scratch
from baffle.plan import Plan, load
from baffle.report.alignment import measured_alignment, squares
from baffle.report.record import read_run
from baffle.simulation import simulate
from baffle.trajectory import Trajectory, trajectory_of

N = 300


def _trajectory(distribution: str, k: int = 30) -> Trajectory:
    return trajectory_of(load("digits", [f"probe.k={k}", f"probe.distribution={distribution}", "ring.n_max=1"]), N)


@pytest.mark.parametrize("distribution", ["gaussian", "rademacher"])
@pytest.mark.parametrize("noise", [0.0, 3.0])
def test_squares_are_unbiased_whatever_noise_the_scalars_carry(distribution: str, noise: float) -> None:
    random, trajectory = np.random.default_rng(1), _trajectory(distribution)
    gradient = random.standard_normal(N) / np.sqrt(N)
    found, errors = list[float](), list[float]()
    for number in range(300):
        directions = Directions(number.to_bytes(32, "big"), DISTRIBUTIONS[distribution])
        z = directions.draw(range(30), 0, N).astype(np.float64) * directions.distribution.unit
        scalars = z @ gradient + noise * random.standard_normal(30) + noise  # a part that all share, as curvature has
        square, of_estimate = squares(scalars, directions, trajectory, Scratch())
        assert of_estimate == pytest.approx(np.sum((scalars @ z / 30) ** 2))
        found.append(square)
        errors.append(square - gradient @ gradient)
    assert abs(np.mean(errors)) < 4 * np.std(errors) / np.sqrt(len(errors))
    if not noise:
        assert np.mean(found) == pytest.approx(gradient @ gradient, rel=0.15)


def test_the_estimate_is_the_one_that_the_server_rebuilds() -> None:
    trajectory = _trajectory("gaussian")
    totals = np.random.default_rng(0).integers(-(2**20), 2**20, 30).astype(np.int32)
    directions = trajectory.directions(0)
    rebuilt = gradient_from_scalars(totals, 7, directions, trajectory.supports, N, trajectory.ring)
    _, square = squares(totals / (trajectory.ring.scale * 7), directions, trajectory, Scratch())
    assert square == pytest.approx(float(rebuilt.astype(np.float64) @ rebuilt), rel=1e-5)


def test_a_real_run_is_as_aligned_as_expected(tiny: Callable[..., Plan], tmp_path: Path) -> None:
    simulate(tiny("rounds=60", "probe.k=100", 'update.optimizer="sgd"', "update.rate=0.001"), tmp_path / "run")
    alignment = read_run(tmp_path / "run").alignment
    assert alignment.expected == pytest.approx(np.sqrt(100 / (100 + 650 + 1)), rel=1e-3)
    assert alignment.expected is not None
    assert alignment.measured is not None
    assert alignment.error is not None
    assert alignment.error < 0.05
    assert abs(alignment.measured - alignment.expected) < 4 * alignment.error


def test_noise_instead_of_a_gradient_is_not_called_aligned() -> None:
    random, trajectory = np.random.default_rng(2), _trajectory("rademacher", k=100)
    pairs = [
        squares(random.standard_normal(100), trajectory.directions(number), trajectory, Scratch())
        for number in range(200)
    ]
    alignment = measured_alignment(0.5, np.array(pairs))
    assert alignment.measured is None or alignment.measured < 4 * (alignment.error or 0)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (["federation.seeds=own"], "whole vectors"),
        (["federation.tiers=[{k=2,share=0.5}]"], "tiers"),
        (["probe.k=1"], "one direction"),
        (["rounds=5"], "at least 10 rounds"),
    ],
)
def test_what_cannot_be_measured_is_said(
    tiny: Callable[..., Plan], tmp_path: Path, settings: list[str], why: str
) -> None:
    simulate(tiny("rounds=12", *settings), tmp_path / "run")
    alignment = read_run(tmp_path / "run").alignment
    assert alignment.measured is None
    assert why in alignment.missing
    assert alignment.expected is not None
