"""A target that compares training runs: a table of the accuracies that they reach, and a figure of their curves."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from baffle.paper.rows import Row
from baffle.paper.settings import PRESET, Settings
from baffle.paper.target import Cell, Finished, Result, Scale, Tell
from baffle.plan import Plan, load


@dataclass(frozen=True)
class TrainingRuns:
    """Runs that differ in one thing each. `rows` lists them for each scale, `shared` the settings that all have."""

    name: str
    about: str
    rows: Mapping[Scale, Mapping[str, Row]]
    shared: Mapping[Scale, Settings]
    notes: Mapping[Scale, Sequence[str]] = field(default_factory=dict)

    def plans(self, scale: Scale) -> dict[str, Plan]:
        rows = self.rows[scale].items()
        return {name: load(PRESET[scale], [*self.shared[scale], *row.settings]) for name, row in rows}

    def result(self, runs: Mapping[str, Finished], scale: Scale, _data: Path | None, _tell: Tell) -> Result:
        known = self.rows[scale]
        rows: list[list[Cell]] = [
            [
                name,
                100 * float(run.summary[known[name].shown]),
                known[name].paper,
                run.plan.probe.k if run.plan.estimator == "probe" else None,
                run.summary["rounds"],
                run.summary["forwards"],
            ]
            for name, run in runs.items()
        ]
        columns = ("", "accuracy, %", "paper, %", "K", "rounds", "forward passes")
        notes = self.notes.get(scale, ())
        curves = {name: curve(run, known[name].shown) for name, run in runs.items()}
        return Result(columns, rows, notes, {"curves": curves}, draw_curves(runs, known))


def curve(run: Finished, shown: str = "test_accuracy") -> tuple[list[int], list[float]]:
    """The rounds with a test accuracy, and that accuracy in percent. `shown` is its key in the metrics."""
    evaluated = [line for line in run.metrics if shown in line]
    return [line["round"] + 1 for line in evaluated], [100 * line[shown] for line in evaluated]


def draw_curves(runs: Mapping[str, Finished], rows: Mapping[str, Row]) -> Callable[[Any], None]:
    """One panel for each group of rows."""
    groups = list(dict.fromkeys(rows[name].group for name in runs))
    columns = min(len(groups), 3)

    def draw(figure: Any) -> None:
        panels = figure.subplots(-(-len(groups) // columns), columns, squeeze=False).flat
        for group, axes in zip_longest(groups, panels):
            if group is None:
                axes.remove()
                continue
            for name, run in runs.items():
                if rows[name].group == group:
                    style = "-" if run.plan.estimator == "probe" else "--"
                    label = name.removeprefix(f"{group}: ")
                    axes.plot(*curve(run, rows[name].shown), label=label, linewidth=1.5, linestyle=style)
            axes.set(xlabel="round", ylabel="test accuracy, %")
            axes.set_title(group, fontsize=9)
            axes.legend(frameon=False, fontsize=8 if len(groups) == 1 else 5)

    return draw
