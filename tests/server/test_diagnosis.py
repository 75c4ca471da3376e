"""Warnings during a run: said once, with the likely cause, and not about runs that go well."""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baffle.core.arrays import F64
from baffle.core.messages import Group, Outcome
from baffle.core.ring import LOSS_MAX
from baffle.plan import Plan, load
from baffle.server.diagnosis import BLOCK, POOLED, Signs, climbs, leaves_first, one_sided, shown, signs_of
from baffle.simulation import resume, simulate
from baffle.trajectory import trajectory_of

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
    assert "up to round 40;" in warning


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


def test_a_loss_that_jumps_and_then_scatters_widely_climbs() -> None:
    """A run of digits whose rate is a hundredfold: it comes down again, slowly, but should have begun otherwise."""
    losses = [2.3, 10.7, 11.9, 21.7, 13.7, 13.8, 11.1, 12.3, 15.0, 10.8]
    assert climbs(losses)
    assert not climbs([2.3, 1.4, 4.9, 2.7, 0.7, 4.1, 2.2, 7.3, 1.0, 2.6])
    assert not climbs([0.0, 1.4, 0.2, 2.7, 0.0, 4.1, 0.1, 7.3, 1.0, 2.6])


@pytest.mark.parametrize("scatter", [0.1, 0.6, 1.5])
def test_losses_that_scatter_over_their_whole_size_do_not_leave_the_first(scatter: float) -> None:
    random = np.random.default_rng(0)
    runs = np.exp(scatter * random.standard_normal((200, 10 * BLOCK))).tolist()
    assert not any(leaves_first(losses[:count]) for losses in runs for count in range(BLOCK, 10 * BLOCK + 1, BLOCK))


def alarms(runs: F64) -> int:
    """How many runs climb at the end of some block."""
    return sum(any(climbs(run[:end]) for end in range(BLOCK, len(run) + 1, BLOCK)) for run in runs.tolist())


@pytest.mark.parametrize("scatter", [0.3, 0.6, 1.0, 1.5])
def test_losses_that_scatter_over_their_whole_size_do_not_climb(scatter: float) -> None:
    runs = np.exp(scatter * np.random.default_rng(1).standard_normal((60, 20 * BLOCK)))
    assert alarms(runs) <= 1
    assert alarms((0.2 + 2 * np.exp(-0.02 * np.arange(20 * BLOCK))) * runs) <= 1


@pytest.mark.parametrize(("scatter", "factor"), [(0.1, 1.5), (0.3, 2), (0.6, 4)])
def test_what_leaves_its_scatter_climbs(scatter: float, factor: float) -> None:
    runs = np.exp(scatter * np.random.default_rng(1).standard_normal((50, 20 * BLOCK)))
    runs[:, 10 * BLOCK :] *= factor
    assert alarms(runs) >= 49


def test_a_loss_below_zero_climbs_too() -> None:
    assert climbs([-2.0] * BLOCK + [1.0] * 2 * BLOCK)


def test_a_loss_at_the_rings_bound_is_not_shown_as_a_number() -> None:
    assert shown(LOSS_MAX) == "64 or more"
    assert shown(2.3456) == "2.346"


def rounds_of(scalars: F64) -> list[Signs]:
    """What rounds tell, a row of scalars each."""
    sizes = np.sqrt(np.mean(scalars**2, axis=1))
    return [
        Signs(float(size), float(row.mean() / size), len(row), 0.01) for row, size in zip(scalars, sizes, strict=True)
    ]


def remembered(k: int) -> int:
    return max(BLOCK, math.ceil(POOLED / k))


@pytest.mark.parametrize("k", [1, 2, 4, 20, 80])
def test_few_scalars_lean_to_one_side_by_luck(k: int) -> None:
    random = np.random.default_rng(k)
    runs = [rounds_of(random.standard_normal((remembered(k), k))) for _ in range(2000)]
    assert sum(map(one_sided, runs)) <= 2
    if k == 4:  # round by round they often do
        assert sum(float(np.median([abs(signs.lean) for signs in run])) >= 0.5 for run in runs) > 100


@pytest.mark.parametrize("k", [1, 2, 4, 20, 80])
def test_curvature_keeps_its_sign(k: int) -> None:
    random = np.random.default_rng(k)
    runs = [rounds_of(2 + random.standard_normal((remembered(k), k))) for _ in range(200)]
    assert sum(map(one_sided, runs)) >= 199


SIGNS = st.builds(Signs, st.just(1.0), st.floats(-1, 1), st.integers(1, 200), st.just(0.01))


@given(st.lists(SIGNS, min_size=1, max_size=40))
def test_signs_that_change_from_round_to_round_are_no_curvature(rounds: list[Signs]) -> None:
    mirrored = [signs._replace(lean=-signs.lean) for signs in rounds]
    assert not one_sided(rounds + mirrored)
    assert one_sided(mirrored) == one_sided(rounds)


@given(st.integers(1, 100), st.sampled_from((-1.0, 1.0)))
def test_a_single_scalar_a_round_is_enough_after_a_while(rounds: int, side: float) -> None:
    assert one_sided([Signs(1.0, side, 1, 0.01)] * rounds) == (rounds >= 16)
    assert not one_sided([])
    assert not one_sided([Signs(None, 0.0, 0, 0.01)] * rounds)


@pytest.mark.parametrize("groups", ["secure.groups=1", "secure.groups=2"])
def test_groups_that_probe_the_same_directions_count_them_once(tiny: Callable[..., Plan], groups: str) -> None:
    plan = tiny(groups, "federation.clients=6", "probe.k=5", "ring.n_max=10")
    trajectory = trajectory_of(plan, 3)
    count = plan.secure.groups
    totals = np.array([3, -1, 4, 1, -5], "<i4")
    outcome = Outcome(0, "scalars", tuple(Group(1, totals.tobytes(), 2) for _ in range(count)))
    found = signs_of(trajectory, outcome, None, np.ones(3, np.float32))
    assert found.directions == 5
    assert found.lean == pytest.approx(totals.mean() / np.sqrt(np.mean(totals.astype(float) ** 2)))
