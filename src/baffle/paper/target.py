"""Targets: runs of plans, or a measurement, and a function that turns them into a table and a figure."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from baffle.errors import PlanError
from baffle.plan import Plan, change

Scale = Literal["smoke", "short", "full"]
"""smoke: seconds, on the digits, to see that it works. short: minutes, on real data. full: as long as in the paper."""

Cell = str | float | int | None
Tell = Callable[[str], None]  # reports what is being measured, in a few words


Estimator = Literal["probe", "law"]
"""How rows estimate gradients: by probes, or by draws from the law of what probes would give."""

DRAWN = ", drawn"  # ends the name of a row whose scalars are drawn


def row_of(name: str) -> str:
    """The row that a run belongs to, however its scalars came about."""
    return name.removesuffix(DRAWN)


def with_drawn(plans: Mapping[str, Plan]) -> dict[str, Plan]:
    """All runs, and after each that probes the same with drawn scalars, if the law covers its plan."""
    both = dict[str, Plan]()
    for name, plan in plans.items():
        both[name] = plan
        if plan.estimator == "probe":
            with suppress(PlanError):
                both[name + DRAWN] = change(plan, ["estimator=law", 'run.runtime=""'])
    return both


@dataclass(frozen=True)
class Result:
    """The result of a target: a table of our figures and the paper's, the data behind it, and a drawing."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    notes: Sequence[str] = ()
    data: Mapping[str, Any] = field(default_factory=dict)
    draw: Callable[[Any], None] | None = None  # onto a matplotlib figure; None: no figure


@dataclass(frozen=True)
class Origin:
    """The date of a run or a page, and the commit of the source that produced it."""

    date: str
    commit: str


@dataclass(frozen=True)
class Finished:
    """One finished run of a target. `asked` is the digest of the target's plan, and `plan` what the run made of it."""

    plan: Plan
    summary: Mapping[str, Any]
    metrics: Sequence[Mapping[str, Any]]
    asked: str
    origin: Origin


@dataclass(frozen=True)
class Target(ABC):
    """A table or a figure of the paper."""

    name: str
    about: str

    def plans(self, _scale: Scale) -> dict[str, Plan]:
        """The runs that it needs, by the name of their row. Empty if it only measures."""
        return {}

    @abstractmethod
    def result(self, runs: Mapping[str, Finished], scale: Scale, data: Path | None, tell: Tell) -> Result: ...


@dataclass(frozen=True)
class Measurement(Target):
    """A target that runs no plans. `measure` takes the scale, the folder of data sets, and a place to report to."""

    measure: Callable[[Scale, Path | None, Tell], Result]

    def result(self, _runs: Mapping[str, Finished], scale: Scale, data: Path | None, tell: Tell) -> Result:
        return self.measure(scale, data, tell)
