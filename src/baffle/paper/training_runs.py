"""Targets that compare training runs: table 1, and figures about K and guidelines. Smoke tests use the digits."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from baffle.paper.rows import Row, Settings, rows_of
from baffle.paper.target import Cell, Finished, Result, Scale, Tell
from baffle.plan import Plan, load

PRESET = {"smoke": "digits", "short": "paper-mnist-lenet", "full": "paper-mnist-lenet"}


@dataclass(frozen=True)
class Training:
    """Several runs that differ in one thing each, and the accuracies that they reach: the rows of each scale, and the
    settings that all of them share."""

    name: str
    about: str
    rows: Mapping[Scale, Mapping[str, Row]]
    shared: Mapping[Scale, Settings]
    notes: Mapping[Scale, Sequence[str]] = field(default_factory=dict)

    def plans(self, scale: Scale) -> dict[str, Plan]:
        rows = self.rows[scale].items()
        return {name: load(PRESET[scale], [*self.shared[scale], *row.settings]) for name, row in rows}

    def result(self, runs: Mapping[str, Finished], scale: Scale, _data: Path | None, _tell: Tell) -> Result:
        kinds = self.rows[scale]
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
        notes = self.notes.get(scale, ())
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
UNITS = (
    *("probe.supports=units", "probe.distribution=rademacher", "probe.sigma=1e-3"),
    *("federation.batch=8", "update.rate=0.02", "update.clip=0.3"),
)
"""What gets somewhere in minutes: directions that touch one unit each, at a small part of a forward pass."""

_UNITS_EPOCH = (*UNITS, "probe.k=1600", "update.rate=0.01", "federation.steps=188")
"""As many local steps as an epoch has in the paper's batches of 32, in batches of 8: a quarter of its samples."""

_TWICE = (
    "Forward differences with twice the K of central ones (twice-FD) take as many forward passes.",
    "The accuracy is that of the averaged weights where there is an average.",
)
_ON_DIGITS = (*_TWICE, "On the digits, to see that it works: the accuracies mean nothing.")
_SHORTER = (
    *_TWICE,
    "The paper has dense directions and many more samples. Here directions touch one unit each, so that the runs get "
    "somewhere in minutes; a forward pass in the last column is only the part that its unit changes. The paper's "
    "figures stand beside rows of the same place among K, and only the order of rows can be compared.",
)


def _guidelines(k: int) -> dict[str, Settings]:
    """All guidelines at some K, and each left out (central differences at half the K: as many forward passes)."""
    same = (f"probe.k={k}",)
    return {
        "": same,
        "without EMA": (*same, "update.ema=0"),
        "ReLU": (*same, "task.model.activation=relu"),
        "SELU": (*same, "task.model.activation=selu"),
        "central": (f"probe.k={k // 2}", "probe.scheme=central"),
    }


def _sweep(ks: Sequence[int]) -> dict[str, Settings]:
    """The rows of table 1: K, and the guidelines at the least K."""
    (_, at_least), *left_out = _guidelines(ks[0]).items()
    return {
        f"K = {ks[0]}": at_least,
        **{f"K = {k}": (f"probe.k={k}",) for k in ks[1:]},
        **{f"K = {ks[0]}, {name}": settings for name, settings in left_out},
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


def _beside_the_paper(sweep: Mapping[str, Settings]) -> dict[str, Row]:
    """LeNet on MNIST."""
    figures = zip(sweep.items(), _PAPER_TABLE1["LeNet", "MNIST"], strict=True)
    return {name: Row(settings, figure) for (name, settings), figure in figures}


TABLE1 = Training(
    "table1",
    "iid, ten clients, epoch level: LeNet on MNIST; at full scale also WRN-10-2, CIFAR-10 and CIFAR-100",
    {
        "smoke": _beside_the_paper(_sweep((100, 200, 500))),
        "short": _beside_the_paper(_sweep((400, 800, 1600))),
        "full": {
            **rows_of(lambda data: _sweep((100, 200, 500) if data == "MNIST" else (200, 500, 1000)), _PAPER_TABLE1),
            "LeNet, MNIST: K = 1600, units": Row(_UNITS_EPOCH, None, "LeNet, MNIST"),
        },
    },
    {
        "smoke": (*_DIGITS, "federation.level=epoch", "federation.batch=0"),
        "short": (*UNITS, "federation.steps=20", "rounds=10", "run.evaluate_every=5"),
        "full": (),
    },
    {
        "smoke": _ON_DIGITS,
        "short": _SHORTER,
        "full": (
            *_TWICE,
            "“Units” is our own: directions touch one unit each and cost a part of a forward pass; 188 local steps "
            "a round in batches of 8, where an epoch has 188 of 32.",
        ),
    },
)

_BACKPROPAGATION = {"backpropagation": Row(("estimator=backprop",))}

FIG_K = Training(
    "fig-k",
    "LeNet on MNIST, iid, ten clients, batch level: accuracy against rounds for several K",
    {
        "smoke": {**{f"K = {k}": Row((f"probe.k={k}",)) for k in (20, 100)}, **_BACKPROPAGATION},
        "short": {
            "K = 100, dense": Row(("probe.supports=dense", "probe.k=100")),
            **{f"K = {k}, units": Row((f"probe.k={k}",)) for k in (100, 400, 1600)},
            **_BACKPROPAGATION,
        },
        "full": {**{f"K = {k}": Row((f"probe.k={k}",)) for k in (20, 100, 500)}, **_BACKPROPAGATION},
    },
    {
        "smoke": _DIGITS,
        "short": (*UNITS, "federation.level=batch", "rounds=300", "run.evaluate_every=10", "update.ema=0.98"),
        "full": ("federation.level=batch", "rounds=3750", "run.evaluate_every=50"),
    },
    {"smoke": _ON_DIGITS, "short": ("Batches of 8 samples a client, Adam 0.02, for all rows alike.",)},
)


def _ablation(k: int) -> dict[str, Row]:
    rows = {name or "all guidelines": Row(settings) for name, settings in _guidelines(k).items()}
    norms = {
        f"with {norm.title()}Norm": Row((f"probe.k={k}", f"task.model.norm={norm}")) for norm in ("group", "batch")
    }
    return {**rows, **norms}


FIG_ABLATION = Training(
    "fig-ablation",
    "the guidelines one by one, at equal forward passes: LeNet on MNIST, batch level",
    {"smoke": _ablation(20), "short": _ablation(400), "full": _ablation(100)},
    {
        "smoke": ("task.model.norm=none", *_DIGITS),
        "short": (*UNITS, "federation.level=batch", "rounds=150", "run.evaluate_every=30", "update.ema=0.98"),
        "full": ("federation.level=batch", "rounds=3750", "run.evaluate_every=50"),
    },
    {"smoke": _ON_DIGITS, "short": _TWICE, "full": _TWICE},
)
