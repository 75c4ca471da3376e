"""What a target is: runs of plans, or a measurement, and one function that turns them into a table and a figure."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from baffle.plan import Plan

Scale = Literal["smoke", "short", "full"]
"""smoke: seconds, on the digits, to see that it works. short: minutes, on real data. full: as long as in the paper."""

Cell = str | float | int | None

Tell = Callable[[str], None]
"""Reports in a few words what is being measured."""


@dataclass(frozen=True)
class Result:
    """What a target shows: a table with our figures and the paper's side by side, the data behind it, and a drawing."""

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
    """One finished run of a target. `asked` is the digest of the plan that the target asked for. A run resolves that
    plan, so `plan` may have another digest."""

    plan: Plan
    summary: Mapping[str, Any]
    metrics: Sequence[Mapping[str, Any]]
    asked: str
    origin: Origin


class Target(Protocol):
    """A table or a figure of the paper."""

    @property
    def name(self) -> str: ...

    @property
    def about(self) -> str: ...

    def plans(self, scale: Scale) -> dict[str, Plan]:
        """The runs that it needs, by the name of their row. Empty if it only measures."""
        ...

    def result(self, runs: Mapping[str, Finished], scale: Scale, data: Path | None, tell: Tell) -> Result: ...
