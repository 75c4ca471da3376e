"""Warnings during a run: said once, with the likely cause, and not about runs that go well."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baffle.core.ring import LOSS_MAX
from baffle.plan import Plan, load
from baffle.server.diagnosis import BLOCK, climbs, shown
from baffle.simulation import resume, simulate

DIGITS = ("secure.mode=off", "run.evaluate_every=1000", "probe.k=40", "rounds=60", "federation.clients=4")


def warnings_of(folder: Path, *settings: str) -> list[str]:
    notes = list[str]()
    simulate(load("digits", [*DIGITS, *settings]), folder / "run", warn=notes.append)
    return [note for note in notes if not note.startswith("secure.mode")]


@pytest.mark.slow
def test_a_run_that_goes_well_is_not_warned_about(tmp_path: Path) -> None:
    assert warnings_of(tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("update.rate=1", ["the loss climbs", "update.rate = 1 is probably too large"]),
        ("update.rate=1e-6", ["the loss is flat", "update.rate = 1e-06 is too small"]),
    ],
)
def test_a_wrong_rate_is_named(tmp_path: Path, setting: str, words: list[str]) -> None:
    (warning,) = warnings_of(tmp_path, setting)
    assert all(part in warning for part in words)


@pytest.mark.slow
def test_a_step_that_is_too_large_is_named_before_and_during_the_run(tmp_path: Path) -> None:
    before, during = warnings_of(tmp_path, "probe.sigma=10")
    assert before.startswith("probe.sigma = 10 is too large: the loss curves")
    assert "the loss is flat" in during
    assert "probe.sigma = 10 is too large: scalars measure curvature" in during


def test_a_resumed_run_knows_how_it_began(tiny: Callable[..., Plan], tmp_path: Path) -> None:
    notes = list[str]()
    simulate(tiny("rounds=30", "update.rate=1e-7"), tmp_path / "run")
    resume(tmp_path / "run", ["rounds=60"], warn=notes.append)
    (warning,) = notes
    assert warning.startswith("the loss is flat")
    assert "round 39" in warning


def test_a_client_whose_losses_are_not_finite_is_noticed(
    tiny: Callable[..., Plan], tmp_path: Path, spoilt: Callable[[object], str]
) -> None:
    notes = list[str]()
    simulate(tiny(spoilt("0"), "federation.batch=0", "rounds=12"), tmp_path / "run", warn=notes.append)
    (warning,) = [note for note in notes if note.startswith("the losses")]
    assert warning.startswith(
        "the losses of one of 3 clients are not finite: probably NaN or infinite values in the data"
    )


def test_scalars_that_are_all_clipped_are_noticed(tiny: Callable[..., Plan], tmp_path: Path) -> None:
    notes = list[str]()
    simulate(tiny("ring.d_max=0.001", "rounds=12"), tmp_path / "run", warn=notes.append)
    (warning,) = [note for note in notes if "are clipped" in note]
    assert "of all values are clipped at ring.d_max = 0.001: set a larger bound" in warning


@settings(max_examples=50)
@given(st.integers(0, 2**32 - 1), st.floats(0.01, 0.2), st.floats(0, 0.1))
def test_noise_around_a_falling_loss_is_no_climb(seed: int, noise: float, fall: float) -> None:
    random = np.random.default_rng(seed)
    losses = (0.1 + 2.2 * np.exp(-fall * np.arange(200)) * (1 + noise * random.standard_normal(200))).tolist()
    assert not any(climbs(losses[:count]) for count in range(BLOCK, 201, BLOCK))


@given(st.floats(0.5, 5), st.floats(1.5, 10))
def test_a_loss_that_grows_for_long_climbs(first: float, factor: float) -> None:
    assert climbs([first] * BLOCK + [first * factor] * 2 * BLOCK)
    assert climbs([first] + [first * factor] * 2 * BLOCK)
    assert not climbs([first] + [first * 1.3] * BLOCK + [first] * BLOCK)


def test_a_loss_at_the_rings_bound_is_not_shown_as_a_number() -> None:
    assert shown(LOSS_MAX) == "64 or more"
    assert shown(2.3456) == "2.346"
