"""A target: some runs of plans, or a measurement, and one function that turns them into a table and a figure."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from baffle.plan import Plan

Scale = Literal["smoke", "short", "full"]
"""smoke: seconds, on the digits, to see that it works. short: real data in minutes. full: as long as the paper."""

Cell = str | float | int | None

Tell = Callable[[str], None]
"""Says in a few words what is measured now."""


@dataclass(frozen=True)
class Result:
    """What a target shows: a table whose rows have ours and the paper's figures side by side, data for whoever wants to
    compute with it, and something to draw."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    notes: Sequence[str] = ()
    data: Mapping[str, Any] = field(default_factory=dict)
    draw: Callable[[Any], None] | None = None  # onto a matplotlib figure


@dataclass(frozen=True)
class Origin:
    """When something was made, and with the source of which commit."""

    date: str
    commit: str


@dataclass(frozen=True)
class Finished:
    """One finished run of a target; `asked` is the digest of the plan that the target asked for, which a run fills in
    (so that `plan` may have another)."""

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
        """The runs that it needs, by name; none where it only measures."""
        ...

    def result(self, runs: Mapping[str, Finished], scale: Scale, data: Path | None, tell: Tell) -> Result: ...
