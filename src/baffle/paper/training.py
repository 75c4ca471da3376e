"""Targets that compare training runs: table 1, and figures about K and guidelines. Smoke tests use the digits."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from baffle.paper.rows import Row, Settings, rows_of
from baffle.paper.target import Cell, Finished, Result, Scale
from baffle.plan import Plan, load

PRESET = {"smoke": "digits", "short": "paper-mnist-lenet", "full": "paper-mnist-lenet"}


@dataclass(frozen=True)
class Training:
    """Several runs that differ in one thing each, and the accuracies that they reach. At full scale there may be other
    rows than at the smaller ones."""

    name: str
    about: str
    rows: Mapping[str, Row]
    scales: Mapping[Scale, tuple[str, ...]]
    notes: tuple[str, ...] = ()
    full: Mapping[str, Row] = field(default_factory=dict)

    def rows_at(self, scale: Scale) -> Mapping[str, Row]:
        return self.full if scale == "full" and self.full else self.rows

    def plans(self, scale: Scale) -> dict[str, Plan]:
        rows = self.rows_at(scale).items()
        return {name: load(PRESET[scale], [*self.scales[scale], *row.settings]) for name, row in rows}

    def result(self, runs: Mapping[str, Finished], scale: Scale, _data: Path | None) -> Result:
        kinds = self.rows_at(scale)
        rows: list[list[Cell]] = [
            [
                name,
                100 * float(run.summary[kinds[name].shown]),
                kinds[name].paper,
                run.plan.probe.k if run.plan.estimator == "probe" else None,
                run.summary["rounds"],
                run.summary["forwards"],
            ]
            for name, run in runs.items()
        ]
        columns = ("", "accuracy, %", "paper, %", "K", "rounds", "forward passes")
        notes = list(self.notes)
        if scale != "full":
            notes.append(
                "Shorter, and with other data or K, than in the paper: compare rows with each other, not with it."
            )
        curves = {name: curve(run, kinds[name].shown) for name, run in runs.items()}
        return Result(columns, rows, notes, {"curves": curves}, draw_curves(runs, kinds))


def curve(run: Finished, shown: str = "test_accuracy") -> tuple[list[int], list[float]]:
    """Rounds, and the accuracy after each of them that was looked at."""
    seen = [(one["round"] + 1, 100 * one[shown]) for one in run.metrics if shown in one]
    return [at for at, _ in seen], [right for _, right in seen]


def draw_curves(runs: Mapping[str, Finished], rows: Mapping[str, Row]) -> Callable[[Any], None]:
    """A panel for each group of rows."""
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


_DIGITS = (
    "federation.clients=30",
    "federation.participation=0.1",
    "federation.batch=16",
    "rounds=2",
    "run.evaluate_every=1",
)
_GUIDELINES = {
    "all guidelines": Row(("probe.k=100",), 87.27),
    "without EMA": Row(("probe.k=100", "update.ema=0"), 85.06),
    "ReLU": Row(("probe.k=100", "task.model.activation=relu"), 81.55),
    "SELU": Row(("probe.k=100", "task.model.activation=selu"), 86.18),
    "central": Row(("probe.k=50", "probe.scheme=central"), 76.02),
}
_TWICE = (
    "Forward differences with twice the K of central ones (twice-FD) take as many forward passes.",
    "The accuracy is that of the averaged weights where there is an average.",
)


def _kinds_of_table1(data: str) -> dict[str, Settings]:
    """K, then the guidelines at the least K (of central differences half as many: as many forward passes)."""
    least, *more = (100, 200, 500) if data == "MNIST" else (200, 500, 1000)
    at_least = (f"probe.k={least}",)
    return {
        **{f"K = {k}": (f"probe.k={k}",) for k in (least, *more)},
        f"K = {least}, without EMA": (*at_least, "update.ema=0"),
        f"K = {least}, ReLU": (*at_least, "task.model.activation=relu"),
        f"K = {least}, SELU": (*at_least, "task.model.activation=selu"),
        f"K = {least}, central": (f"probe.k={least // 2}", "probe.scheme=central"),
        "backpropagation": ("estimator=backprop",),
    }


_PAPER_TABLE1 = {
    ("LeNet", "MNIST"): (87.27, 89.48, 92.18, 85.06, 81.55, 86.18, 76.02, 94.31),
    ("LeNet", "CIFAR-10"): (48.78, 51.82, 53.62, 47.97, 44.99, 48.65, 45.97, 58.75),
    ("LeNet", "CIFAR-100"): (41.54, 45.68, 48.72, 36.81, 39.49, 37.34, 36.53, 54.67),
    ("WRN-10-2", "MNIST"): (88.35, 89.57, 95.17, 85.89, 79.08, 76.44, 77.45, 97.11),
    ("WRN-10-2", "CIFAR-10"): (52.27, 55.59, 58.63, 50.01, 49.76, 43.37, 42.89, 62.29),
    ("WRN-10-2", "CIFAR-100"): (46.61, 51.65, 53.15, 45.86, 44.44, 41.79, 39.62, 60.08),
}
_ROWS_OF_TABLE1 = rows_of(_kinds_of_table1, _PAPER_TABLE1)
_LENET_ON_MNIST = "LeNet, MNIST: "

TABLE1 = Training(
    "table1",
    "iid, ten clients, one local epoch a round: LeNet on MNIST; at full scale also WRN-10-2, CIFAR-10 and CIFAR-100",
    {
        name.removeprefix(_LENET_ON_MNIST): row
        for name, row in _ROWS_OF_TABLE1.items()
        if name.startswith(_LENET_ON_MNIST)
    },
    {
        "smoke": (*_DIGITS, "federation.level=epoch", "federation.batch=0"),
        "short": ("rounds=2", "federation.batch=320", "update.ema=0.5"),
        "full": (),
    },
    _TWICE,
    _ROWS_OF_TABLE1,
)

FIG_K = Training(
    "fig-k",
    "LeNet on MNIST, iid, ten clients, batch level: accuracy against rounds for several K",
    {
        **{f"K = {k}": Row((f"probe.k={k}",)) for k in (20, 100, 500)},
        "backpropagation": Row(("estimator=backprop",)),
    },
    {
        "smoke": _DIGITS,
        "short": ("federation.level=batch", "rounds=40", "run.evaluate_every=4", "update.ema=0.9"),
        "full": ("federation.level=batch", "rounds=3750", "run.evaluate_every=50"),
    },
)

FIG_ABLATION = Training(
    "fig-ablation",
    "the guidelines one by one, at equal forward passes: LeNet on MNIST, batch level",
    {name: Row(row.settings) for name, row in _GUIDELINES.items()},
    {
        "smoke": _DIGITS,
        "short": ("federation.level=batch", "rounds=60", "run.evaluate_every=5"),
        "full": ("federation.level=batch", "rounds=3750", "run.evaluate_every=50"),
    },
    _TWICE,
)
