"""Grids: every combination of values with every seed, and what a command line may ask for."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from baffle.errors import PlanError
from baffle.grid.plans import folder_of, grid_of, seeds_of
from baffle.plan import Plan, change

MakePlan = Callable[..., Plan]


def test_a_grid_is_every_combination_with_every_seed(tiny: MakePlan) -> None:
    rows = grid_of(tiny(), ["update.rate=0.003,0.01", "task.metrics=[],['accuracy','top5']"], [0, 7])
    assert list(rows) == [
        f"update.rate={rate}, task.metrics={metrics}"
        for rate in ("0.003", "0.01")
        for metrics in ("[]", "['accuracy','top5']")
    ]
    for name, plans in rows.items():
        assert list(plans) == [0, 7]
        for seed, plan in plans.items():
            assert plan == change(tiny(f"seed={seed}"), [setting.strip() for setting in name.split(", ")])


def test_without_axes_or_seeds_it_is_the_plan_itself(tiny: MakePlan) -> None:
    plan = tiny("seed=5")
    assert grid_of(plan) == {plan.name: {5: plan}}


@pytest.mark.parametrize(
    ("axes", "words"),
    [
        (["update.rate"], r"section\.key=value,value, got 'update\.rate'"),
        (["update.rate=0.1,"], r"section\.key=value,value"),
        (["seed=1,2"], "give --seeds"),
        (["update.rate=0.1", "update.rate=0.2"], "names a setting twice"),
        (["update.rate=0.1,0.10"], r"update\.rate=0\.1 and update\.rate=0\.10 are the same plan"),
        (["update.rrate=0.1"], r"unknown key update\.rrate"),
        (["rounds=" + ",".join(map(str, range(1, 5002)))], "10,002 runs; expected at most 10,000"),
    ],
)
def test_what_is_no_grid_is_refused(tiny: MakePlan, axes: list[str], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        grid_of(tiny(), axes, [0, 1])


@given(st.integers(0, 10**9), st.integers(0, 50))
def test_seeds_are_a_range_that_includes_its_end_or_a_list(first: int, more: int) -> None:
    seeds = list(range(first, first + more + 1))
    assert seeds_of(f"{first}..{first + more}") == seeds
    assert seeds_of(",".join(map(str, [first, *seeds]))) == seeds


@pytest.mark.parametrize("text", ["", "3", "4..0", "0..99999", "a..b", "1,,2", "-1,2", "0...3", "0..2,5"])
def test_other_seeds_are_refused(text: str) -> None:
    with pytest.raises(PlanError, match=r"--seeds: expected a range such as 0\.\.4 or a list such as 0,3,7"):
        seeds_of(text)


@given(name=st.text(max_size=300))
def test_the_folder_of_a_run_lies_in_the_sweeps_folder_and_is_its_own(name: str) -> None:
    plan, other = Plan(), Plan(seed=1)
    folder = folder_of(Path("out"), name, plan)
    assert folder.parent == Path("out")
    assert not folder.name.startswith(".")
    assert len(folder.name.encode()) <= 255
    assert folder.name != folder_of(Path("out"), name, other).name
