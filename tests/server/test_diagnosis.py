"""Warnings during a run: each comes once, with the likely cause, and none for a run that goes well."""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from baffle.core.arrays import F64
from baffle.core.messages import Group, Outcome
from baffle.plan import Plan, load
from baffle.server.diagnosis import BLOCK, POOLED, Signs, climbs, one_sided, signs_of
from baffle.simulation import resume, simulate
from baffle.trajectory import trajectory_of

MakePlan = Callable[..., Plan]

DIGITS = ("secure.mode=off", "run.evaluate_every=1000", "probe.k=40", "rounds=60", "federation.clients=4")


def warnings_of(folder: Path, *settings: str) -> list[str]:
    notes = list[str]()
    simulate(load("digits", [*DIGITS, *settings]), folder / "run", warn=notes.append)
    return [note for note in notes if not note.startswith("secure.mode")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ((), []),
        (("update.rate=1",), [["the loss climbs", "update.rate = 1 is probably too large"]]),
        (("update.rate=1e-6",), [["the loss is flat", "update.rate = 1e-06 is too small"]]),
        (
            ("probe.sigma=10",),
            [
                ["probe.sigma = 10 is too large: the loss curves"],
                ["the loss is flat", "probe.sigma = 10 is too large: scalars measure curvature"],
            ],
        ),
    ],
)
def test_a_wrong_rate_or_step_is_named_and_a_run_that_goes_well_not_warned_about(
    tmp_path: Path, settings: tuple[str, ...], expected: list[list[str]]
) -> None:
    for warning, words in zip(warnings_of(tmp_path, *settings), expected, strict=True):
        assert all(part in warning for part in words)


def test_a_resumed_run_knows_how_it_began(tiny: MakePlan, tmp_path: Path) -> None:
    notes = list[str]()
    simulate(tiny("rounds=30", "update.rate=1e-7"), tmp_path / "run")
    resume(tmp_path / "run", ["rounds=60"], warn=notes.append)
    (warning,) = notes
    assert warning.startswith("the loss is flat")
    assert "up to round 40;" in warning


def test_a_client_whose_losses_are_not_finite_is_noticed(
    tiny: MakePlan, tmp_path: Path, spoilt: Callable[[object], str]
) -> None:
    notes = list[str]()
    simulate(tiny(spoilt("0"), "federation.batch=0", "rounds=12"), tmp_path / "run", warn=notes.append)
    (warning,) = [note for note in notes if note.startswith("the losses")]
    assert warning.startswith(
        "the losses of one of 3 clients are not finite: probably NaN or infinite values in the data"
    )


def test_if_no_loss_is_finite_and_nobody_tells_the_totals_do(
    tiny: MakePlan, tmp_path: Path, spoilt: Callable[[object], str]
) -> None:
    silent = ("secure.mode=malicious-server", "federation.weighting=uniform")
    notes = list[str]()
    summary = simulate(tiny(spoilt(":"), *silent, "rounds=2"), tmp_path / "run", warn=notes.append)
    assert summary["skipped_rounds"] == 0
    assert "all totals are zero in round 1: probably no loss is finite" in notes


def test_scalars_that_are_all_clipped_are_noticed(tiny: MakePlan, tmp_path: Path) -> None:
    notes = list[str]()
    simulate(tiny("ring.d_max=0.001", "rounds=12"), tmp_path / "run", warn=notes.append)
    (warning,) = [note for note in notes if "are clipped" in note]
    assert "of all values are clipped at ring.d_max = 0.001: set a larger bound" in warning


def test_a_loss_that_jumps_and_then_scatters_widely_climbs() -> None:
    """A run of digits whose rate is a hundredfold: it comes down again, slowly, but should have begun otherwise."""
    losses = [2.3, 10.7, 11.9, 21.7, 13.7, 13.8, 11.1, 12.3, 15.0, 10.8]
    assert climbs(losses)
    assert climbs([-2.0] * BLOCK + [1.0] * 2 * BLOCK)
    assert climbs([2.0] + [3.0] * 2 * BLOCK)
    assert not climbs([2.0] + [2.6] * BLOCK + [2.0] * BLOCK)
    assert not climbs([2.3, 1.4, 4.9, 2.7, 0.7, 4.1, 2.2, 7.3, 1.0, 2.6])
    assert not climbs([0.0, 1.4, 0.2, 2.7, 0.0, 4.1, 0.1, 7.3, 1.0, 2.6])


def alarms(runs: F64) -> int:
    """How many runs climb at the end of some block."""
    return sum(any(climbs(run[:end]) for end in range(BLOCK, len(run) + 1, BLOCK)) for run in runs.tolist())


@pytest.mark.parametrize("scatter", [0.3, 1.5])
def test_losses_that_scatter_over_their_whole_size_do_not_climb(scatter: float) -> None:
    runs = np.exp(scatter * np.random.default_rng(1).standard_normal((30, 20 * BLOCK)))
    assert alarms(runs) <= 1
    assert alarms((0.2 + 2 * np.exp(-0.02 * np.arange(20 * BLOCK))) * runs) <= 1


@pytest.mark.parametrize(("scatter", "factor"), [(0.1, 1.5), (0.3, 2), (0.6, 4)])
def test_what_leaves_its_scatter_climbs(scatter: float, factor: float) -> None:
    runs = np.exp(scatter * np.random.default_rng(1).standard_normal((30, 20 * BLOCK)))
    runs[:, 10 * BLOCK :] *= factor
    assert alarms(runs) >= 29


def rounds_of(scalars: F64) -> list[Signs]:
    """What rounds tell, a row of scalars each."""
    sizes = np.sqrt(np.mean(scalars**2, axis=1))
    return [
        Signs(float(size), float(row.mean() / size), len(row), 0.01) for row, size in zip(scalars, sizes, strict=True)
    ]


def remembered(k: int) -> int:
    return max(BLOCK, math.ceil(POOLED / k))


@pytest.mark.parametrize("k", [1, 4, 80])
def test_few_scalars_lean_to_one_side_by_luck_and_curvature_keeps_its_sign(k: int) -> None:
    random = np.random.default_rng(k)
    curved = [rounds_of(2 + random.standard_normal((remembered(k), k))) for _ in range(50)]
    assert sum(map(one_sided, curved)) >= 49
    runs = [rounds_of(random.standard_normal((remembered(k), k))) for _ in range(400)]
    assert sum(map(one_sided, runs)) <= 1
    if k == 4:  # round by round they often do
        assert sum(float(np.median([abs(signs.lean) for signs in run])) >= 0.5 for run in runs) > 20


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
def test_groups_that_probe_the_same_directions_count_them_once(tiny: MakePlan, groups: str) -> None:
    plan = tiny(groups, "federation.clients=6", "probe.k=5", "ring.n_max=10")
    trajectory = trajectory_of(plan, 3)
    count = plan.secure.groups
    totals = np.array([3, -1, 4, 1, -5], "<i4")
    outcome = Outcome(0, "scalars", tuple(Group(1, totals.tobytes(), 2) for _ in range(count)))
    found = signs_of(trajectory, outcome, None, np.ones(3, np.float32))
    assert found.directions == 5
    assert found.lean == pytest.approx(totals.mean() / np.sqrt(np.mean(totals.astype(float) ** 2)))
