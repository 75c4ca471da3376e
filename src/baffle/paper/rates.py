"""Chooses a rate for each row of a page, by the same small search: runs on a validation split of the training samples.

A trial is the row's run with another rate and seed, tested on training samples that no client gets; the test set is not
read. The search tries the plan's own rate, half of it and twice it, and goes on where the best one is at an end.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from baffle.grid.job import Failure, Job
from baffle.paper.target import Cell
from baffle.plan import Plan, change

TRIAL_SEED = 1000  # no row is measured with it
FARTHEST = 4  # the search goes at most so many doublings away from the plan's own rate

COLUMNS = ("row", "rate chosen", "rounds of a trial", "accuracy on the validation split, %, at each rate")

Play = Callable[[list[Job]], dict[str, Failure]]


class Trial(msgspec.Struct, frozen=True):
    """One trial: its rate, its accuracy in percent (None: it failed or diverged), and the seconds that it took."""

    rate: float
    accuracy: float | None
    seconds: float


class Search(msgspec.Struct, frozen=True):
    """The search of one row: the part of a run that a trial lasts, its rounds, the trials, and the best rate."""

    part: float
    rounds: int
    rate: float
    trials: list[Trial]

    def cells(self, row: str) -> list[Cell]:
        shown = [
            f"{trial.rate:g}: {'failed' if trial.accuracy is None else f'{trial.accuracy:.2f}'}"
            for trial in sorted(self.trials, key=lambda trial: trial.rate)
        ]
        return [row, f"{self.rate:g}", self.rounds, "; ".join(shown)]


def search_rates(
    plans: Mapping[str, Plan], judged_by: Callable[[str], str], part: float, runs: Callable[[Plan], Path], play: Play
) -> tuple[dict[str, Search], dict[str, Failure]]:
    """Search the best rate of each row, all rows at once. Gives the searches, and the rows in which every trial failed.
    `runs` gives the folder of a trial."""
    tried: dict[str, dict[int, Trial]] = {row: {} for row in plans}  # by doublings of the plan's own rate
    failed = dict[str, Failure]()
    while wanted := {(row, step) for row in plans.keys() - failed.keys() for step in _wanted(tried[row])}:
        jobs = dict[tuple[str, int], Job]()
        for row, step in sorted(wanted):
            plan = trial_of(plans[row], _rate(plans[row], step), part)
            jobs[row, step] = Job(f"{row}, rate {plan.update.rate:g}", plan, runs(plan))
        failures = play([*{job.folder: job for job in jobs.values()}.values()])
        for (row, step), job in jobs.items():
            tried[row][step] = _result(job, judged_by(row))
        for (row, _), job in jobs.items():
            failure = failures.get(job.name)
            if failure and (failure.no_data or all(trial.accuracy is None for trial in tried[row].values())):
                failed[row] = failure
    searches = dict[str, Search]()
    for row in plans.keys() - failed.keys():
        best = _best(tried[row])
        rounds = trial_of(plans[row], 1.0, part).rounds
        searches[row] = Search(part, rounds, _rate(plans[row], best), [*tried[row].values()])
    return {row: searches[row] for row in plans if row in searches}, failed


def trial_of(plan: Plan, rate: float, part: float) -> Plan:
    """The run of a plan that judges a rate: so long a part of it, evaluated at its end alone."""
    rounds = max(1, round(part * plan.rounds))
    settings = [f"update.rate={rate!r}", f"rounds={rounds}", f"seed={TRIAL_SEED}", "task.validation=true"]
    return change(plan, [*settings, f"run.evaluate_every={rounds}"])


def _rate(plan: Plan, step: int) -> float:
    return float(f"{plan.update.rate * 2.0**step:.6g}")


def _best(trials: Mapping[int, Trial]) -> int:
    """The best step; of equals the one that is nearest to the plan's own rate."""

    def merit(step: int) -> tuple[float, int, int]:
        accuracy = trials[step].accuracy
        return (-1.0 if accuracy is None else accuracy, -abs(step), -step)

    return max(trials, key=merit)


def _wanted(trials: Mapping[int, Trial]) -> list[int]:
    """The steps to try next: none if the best has a worse neighbour on either side."""
    if not trials:
        return [-1, 0, 1]
    best = _best(trials)
    return [step for step in (best - 1, best + 1) if step not in trials and abs(step) <= FARTHEST]


def _result(job: Job, metric: str) -> Trial:
    try:
        summary: dict[str, Any] = json.loads((job.folder / "summary.json").read_text())
    except FileNotFoundError:  # the trial failed
        return Trial(job.plan.update.rate, None, 0.0)
    value = summary.get(metric)
    return Trial(job.plan.update.rate, None if value is None else 100 * float(value), float(summary["seconds"]))
