"""Targets that train LeNet on MNIST (on the digits in a smoke test): table 1, and figures about K and guidelines."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baffle.paper.target import Cell, Finished, Result, Scale
from baffle.plan import Plan, load

PRESET = {"smoke": "digits", "short": "paper-mnist-lenet", "full": "paper-mnist-lenet"}


@dataclass(frozen=True)
class Row:
    """One run: its settings on top of those of its scale, and what the paper reports for it, in percent."""

    settings: tuple[str, ...]
    paper: float | None = None


@dataclass(frozen=True)
class Training:
    """Several runs that differ in one thing each, and the accuracies that they reach."""

    name: str
    about: str
    rows: Mapping[str, Row]
    scales: Mapping[Scale, tuple[str, ...]]
    notes: tuple[str, ...] = ()

    def plans(self, scale: Scale) -> dict[str, Plan]:
        return {name: load(PRESET[scale], [*self.scales[scale], *row.settings]) for name, row in self.rows.items()}

    def result(self, runs: Mapping[str, Finished], scale: Scale, _data: Path | None) -> Result:
        rows: list[list[Cell]] = [
            [
                name,
                100 * float(run.summary["test_accuracy"]),
                self.rows[name].paper,
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
        return Result(columns, rows, notes, {"curves": {n: curve(run) for n, run in runs.items()}}, draw_curves(runs))


def curve(run: Finished) -> tuple[list[int], list[float]]:
    """Rounds, and the accuracy after each of them that was looked at."""
    seen = [(one["round"] + 1, 100 * one["test_accuracy"]) for one in run.metrics if "test_accuracy" in one]
    return [at for at, _ in seen], [right for _, right in seen]


def draw_curves(runs: Mapping[str, Finished]) -> Callable[[Any], None]:
    def draw(figure: Any) -> None:
        axes = figure.subplots()
        for name, run in runs.items():
            axes.plot(*curve(run), label=name, linewidth=1.5, linestyle="-" if run.plan.estimator == "probe" else "--")
        axes.set(xlabel="round", ylabel="test accuracy, %")
        axes.legend(frameon=False, fontsize=8)

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

TABLE1 = Training(
    "table1",
    "LeNet on MNIST, iid, ten clients, one local epoch a round",
    {
        "K = 100": _GUIDELINES["all guidelines"],
        "K = 200": Row(("probe.k=200",), 89.48),
        "K = 500": Row(("probe.k=500",), 92.18),
        **{f"K = 100, {name}": row for name, row in _GUIDELINES.items() if name != "all guidelines"},
        "backpropagation": Row(("estimator=backprop",), 94.31),
    },
    {
        "smoke": (*_DIGITS, "federation.level=epoch", "federation.batch=0"),
        "short": ("rounds=2", "federation.batch=320", "update.ema=0.5"),
        "full": (),
    },
    _TWICE,
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
