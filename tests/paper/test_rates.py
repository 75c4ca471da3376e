"""The search of rates: the same for every row, on held-out training samples, and it ends at a rate with worse ones on
either side."""

import json
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, strategies as st

from baffle.grid.job import Failure, Job
from baffle.paper.rates import FARTHEST, TRIAL_SEED, Search, search_rates
from baffle.plan import Plan, change, load

PLAN = load("digits", ["rounds=40", "update.rate=0.01"])


def searched(
    accuracy: Callable[[Job], float | Failure], plans: dict[str, Plan]
) -> tuple[dict[str, Search], dict[str, Failure], list[Job]]:
    """A search in which this function says what each trial reaches."""
    played = list[Job]()

    def play(jobs: list[Job]) -> dict[str, Failure]:
        played.extend(jobs)
        failures = dict[str, Failure]()
        for job in jobs:
            found = accuracy(job)
            if isinstance(found, Failure):
                failures[job.name] = found
                continue
            job.folder.mkdir()
            (job.folder / "summary.json").write_text(json.dumps({"test_accuracy": found, "seconds": 2.0}))
        return failures

    with TemporaryDirectory() as parent:
        place = Path(parent)
        found = search_rates(
            plans, lambda _row: "test_accuracy", 0.25, lambda plan: place / plan.digest().hex()[:12], play
        )
    return *found, played


@given(best=st.integers(-6, 6))
def test_it_finds_the_best_rate_and_goes_no_further_than_it_may(best: int) -> None:
    def accuracy(job: Job) -> float:
        return 1 / (1 + abs(job.plan.update.rate / (0.01 * 2.0**best) - 1))

    found, failed, played = searched(accuracy, {"row": PLAN})
    steps = sorted(trial.rate for trial in found["row"].trials)
    assert failed == {}
    assert found["row"].rate == pytest.approx(0.01 * 2.0 ** max(-FARTHEST, min(FARTHEST, best)))
    assert steps == [pytest.approx(steps[0] * 2**place) for place in range(len(steps))]
    assert len(played) == len(steps)
    if abs(best) < FARTHEST:
        assert steps[0] < found["row"].rate < steps[-1]


def test_a_trial_is_a_part_of_the_rows_run_with_another_seed_on_held_out_training_samples() -> None:
    found, _, played = searched(lambda _job: 0.5, {"row": PLAN})
    assert {job.plan.update.rate for job in played} == {0.005, 0.01, 0.02}
    for job in played:
        back = ["task.validation=false", "rounds=40", "seed=0", "run.evaluate_every=20", "update.rate=0.01"]
        assert change(job.plan, back) == change(PLAN, ["run.evaluate_every=20"])
        assert (job.plan.task.validation, job.plan.rounds, job.plan.seed) == (True, 10, TRIAL_SEED)
    assert found["row"].rate == 0.01  # of equals, the plan's own


def test_rates_that_diverge_lose_and_rows_without_any_trial_or_data_fail() -> None:
    def accuracy(job: Job) -> float | Failure:
        if job.name.startswith("gone"):
            return Failure("no such file", no_data=True)
        large = job.plan.update.rate > 0.005 or job.name.startswith("wild")
        return Failure("no loss is finite") if large else job.plan.update.rate

    rows = {name: change(PLAN, [f"probe.k={k}"]) for k, name in enumerate(("tame", "wild", "gone"), 1)}
    found, failed, _ = searched(accuracy, rows)
    assert list(found) == ["tame"]
    assert found["tame"].rate == 0.005
    assert "0.01: failed" in str(found["tame"].cells("tame"))
    assert failed == {"wild": Failure("no loss is finite"), "gone": Failure("no such file", no_data=True)}
