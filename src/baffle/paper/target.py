"""Targets: runs of plans, or a measurement, and a function that turns them into a table and a figure."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from baffle.plan import Plan

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
Tell = Callable[[str], None]  # reports what is being measured, in a few words


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

    def data(self, scale: Scale) -> list[str]:
        """The names of the data sets that its runs need at a scale."""
        names = dict.fromkeys(plan.task.data for plan in self.plans(scale).values())
        return [DATA.get(name, "digits" if ":" in name else name) for name in names]

    @abstractmethod
    def result(self, runs: Mapping[str, Finished], scale: Scale, data: Path | None, tell: Tell) -> Result: ...


@dataclass(frozen=True)
class Measurement(Target):
    """A target that runs no plans. `measure` takes the scale, the folder of data sets, and a place to report to."""

    measure: Callable[[Scale, Path | None, Tell], Result]
    on: str = ""
    """The data set that it needs, but for smoke tests, which take the digits."""

    def data(self, scale: Scale) -> list[str]:
        return [] if not self.on else ["digits"] if scale == "smoke" else [DATA[self.on]]

    def result(self, _runs: Mapping[str, Finished], scale: Scale, data: Path | None, tell: Tell) -> Result:
        return self.measure(scale, data, tell)
