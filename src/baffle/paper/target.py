"""Targets: runs of plans, or a measurement, and a function that turns them into a table and a figure."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from baffle.client.abstaining import Tell
from baffle.errors import PlanError
from baffle.grid.spread import Spread
from baffle.plan import MobileNet, Plan, change
from baffle.report.words import SCALARS

Scale = Literal["smoke", "short", "full"]
"""smoke: seconds, on the digits, to see that it works. short: minutes, on real data. full: as long as in the paper."""

SCALES: Mapping[Scale, str] = {
    **{"smoke": "a smoke test: its figures mean nothing", "short": "shorter than in the paper"},
    "full": "as long as in the paper",
}

DATA = {  # the names of data sets, as people write them
    **{"mnist": "MNIST", "cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "pacs": "PACS", "officehome": "OfficeHome"},
}

Cell = str | float | int | None

Estimator = Literal["probe", "law"]
"""How rows estimate gradients: by probes, or by draws from the law of what probes would give."""

DRAWN = ", drawn"  # ends the name of a row whose scalars are drawn


def row_of(name: str) -> str:
    """The row that a run belongs to, however its scalars came about."""
    return name.removesuffix(DRAWN)


def draws_nothing(plan: Plan) -> bool:
    """Whether an exact head on a frozen backbone is all that is trained, so that there are no directions."""
    return plan.probe.head == "exact" and isinstance(plan.task.model, MobileNet) and plan.task.model.trained == "head"


def with_drawn(plans: Mapping[str, Plan]) -> dict[str, Plan]:
    """All runs, and after each that probes the same with drawn scalars, if the law covers its plan."""
    both = dict[str, Plan]()
    for name, plan in plans.items():
        both[name] = plan
        if plan.estimator == "probe" and not draws_nothing(plan):
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

    @classmethod
    def of(
        cls,
        cells: Sequence[Mapping[str, Cell]],
        notes: Sequence[str],
        data: Mapping[str, Any],
        draw: Callable[[Any], None],
    ) -> "Result":
        """A result whose rows name their columns. Columns without any figure are left out."""
        columns = [name for name in cells[0] if any(row[name] is not None for row in cells)]
        return cls(columns, [[row[name] for name in columns] for row in cells], notes, data, draw)


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

    @property
    def scalars(self) -> str:
        """Where the numbers come from that its steps are made of."""
        return "exact head" if draws_nothing(self.plan) else SCALARS[self.plan.estimator]


Rows = Mapping[str, Sequence[Finished]]
"""The finished runs of each row, one for each seed."""


def spread_of(runs: Sequence[Finished], figure: Callable[[Finished], float]) -> Spread:
    """A figure of a row, with every seed."""
    return Spread(tuple(figure(run) for run in runs))


def range_of(spread: Spread) -> str | None:
    """The least and the most of several seeds."""
    return f"{spread.least:.2f} – {spread.most:.2f}" if len(spread.values) > 1 else None


def common_cells(runs: Sequence[Finished]) -> dict[str, Cell]:
    """Columns that say how a row came about, and what it took: means over its seeds."""
    first = runs[0]
    return {
        "K": first.plan.probe.k if first.plan.scalars and not draws_nothing(first.plan) else None,
        "scalars": first.scalars,
        "rate": f"{first.plan.update.rate:g}",
        "seeds": len(runs),
        "rounds": first.summary["rounds"],
        "forward passes": round(spread_of(runs, lambda run: run.summary["forwards"]).mean),
    }


@dataclass(frozen=True)
class Target(ABC):
    """A table or a figure of the paper."""

    name: str
    about: str

    def plans(self, _scale: Scale) -> dict[str, Plan]:
        """The runs that it needs, by the name of their row. Empty if it only measures."""
        return {}

    def judged_by(self, _scale: Scale, _row: str) -> str:
        """The accuracy by which rates are chosen for a row: the one that its table shows."""
        return "test_accuracy"

    def data(self, scale: Scale) -> list[str]:
        """The names of the data sets that its runs need at a scale."""
        names = dict.fromkeys(plan.task.data for plan in self.plans(scale).values())
        return [DATA.get(name, "digits" if ":" in name else name) for name in names]

    @abstractmethod
    def result(self, rows: Rows, scale: Scale, data: Path | None, tell: Tell) -> Result: ...


@dataclass(frozen=True)
class Measurement(Target):
    """A target that runs no plans. `measure` takes the scale, the folder of data sets, and a place to report to."""

    measure: Callable[[Scale, Path | None, Tell], Result]
    on: str = ""
    """The data set that it needs, but for smoke tests, which take the digits."""

    def data(self, scale: Scale) -> list[str]:
        return [] if not self.on else ["digits"] if scale == "smoke" else [DATA[self.on]]

    def result(self, _rows: Rows, scale: Scale, data: Path | None, tell: Tell) -> Result:
        return self.measure(scale, data, tell)
