"""Targets that compare training runs by the accuracies that they reach and by their curves:

table1        K and the guidelines on clients with iid data, one local epoch a round
table2        clients that hold few classes each, compared with clients that hold equal shares of all classes
fig-k         accuracy against rounds for several K
fig-ablation  the same with the guidelines left out one by one
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, NamedTuple

from baffle.client.abstaining import Tell
from baffle.grid.spread import letters_of
from baffle.paper.target import Cell, Finished, Result, Rows, Scale, Target, common_cells, range_of, row_of, spread_of
from baffle.plan import Plan, load

Settings = tuple[str, ...]

PRESET: Mapping[Scale, str] = {"smoke": "digits", "short": "paper-mnist-lenet", "full": "paper-mnist-lenet"}

_FEW_DIGITS: Settings = (
    *("federation.clients=30", "federation.participation=0.1", "federation.batch=16"),
    *("rounds=2", "run.evaluate_every=1"),
)
_UNITS: Settings = (  # directions of one unit each cost a small part of a forward pass: progress in minutes
    *("probe.supports=units", "probe.distribution=rademacher", "probe.sigma=1e-3"),
    *("federation.batch=8", "update.rate=0.02", "update.clip=0.3"),
)
_BACKPROPAGATION: Mapping[str, Settings] = {"backpropagation": ("estimator=backprop",)}


def _at(*ks: int, suffix: str = "") -> dict[str, Settings]:
    """A run for each K, with its name."""
    return {f"K = {k}{suffix}": (f"probe.k={k}",) for k in ks}


@dataclass(frozen=True)
class Row:
    """One run: its settings on top of those of its scale, and the paper's accuracy for it in percent. Rows of the same
    group share a panel of the figure. `shown` says which of its accuracies the table shows."""

    settings: Settings
    paper: float | None = None
    group: str = ""
    shown: Literal["test_accuracy", "test_top5"] = "test_accuracy"


@dataclass(frozen=True)
class TrainingRuns(Target):
    """Runs that differ in one setting each. `rows` lists them for each scale, `shared` the settings of all of them."""

    rows: Mapping[Scale, Mapping[str, Row]]
    shared: Mapping[Scale, Settings]
    notes: Mapping[Scale, Sequence[str]] = field(default_factory=dict)

    def plans(self, scale: Scale) -> dict[str, Plan]:
        rows = self.rows[scale].items()
        return {name: load(PRESET[scale], [*self.shared[scale], *row.settings]) for name, row in rows}

    def judged_by(self, scale: Scale, row: str) -> str:
        return self.rows[scale][row_of(row)].shown

    def result(self, rows: Rows, scale: Scale, _data: Path | None, _tell: Tell) -> Result:
        known = {name: self.rows[scale][row_of(name)] for name in rows}
        spreads = {name: spread_of(runs, partial(accuracy_of, shown=known[name].shown)) for name, runs in rows.items()}
        equal = dict[str, str]()
        for group in {row.group for row in known.values()}:
            names = [name for name in rows if known[name].group == group]
            equal |= zip(names, letters_of([spreads[name] for name in names]), strict=True)
        cells: list[dict[str, Cell]] = [
            {
                "": name,
                "accuracy, %": spreads[name].mean,
                "least – most, %": range_of(spreads[name]),
                "equal": equal[name] or None,
                "paper, %": known[name].paper,
                **common_cells(runs),
            }
            for name, runs in rows.items()
        ]
        curves = {name: curve(runs, known[name].shown) for name, runs in rows.items()}
        return Result.of(cells, self.notes.get(scale, ()), {"curves": curves}, _draw_curves(rows, curves, known))


def accuracy_of(run: Finished, shown: str = "test_accuracy") -> float:
    return 100 * float(run.summary[shown])


class Curve(NamedTuple):
    """Test accuracy against rounds, in percent: the mean over the seeds, the least and the most."""

    rounds: list[int]
    mean: list[float]
    least: list[float]
    most: list[float]

    def draw(self, axes: Any, **look: Any) -> None:
        """A line for the mean and, for several seeds, a shade from the least to the most."""
        (line,) = axes.plot(self.rounds, self.mean, linewidth=1.5, **look)
        if self.least != self.most:
            axes.fill_between(self.rounds, self.least, self.most, color=line.get_color(), alpha=0.2, linewidth=0)


def curve(runs: Sequence[Finished], shown: str = "test_accuracy") -> Curve:
    """The course of a row. `shown` is the key of its accuracy in the metrics."""
    by_round = dict[int, list[float]]()
    for run in runs:
        for line in run.metrics:
            if shown in line:
                by_round.setdefault(line["round"] + 1, []).append(100 * line[shown])
    whole = {at: values for at, values in sorted(by_round.items()) if len(values) == len(runs)}
    return Curve([*whole], *([f(values) for values in whole.values()] for f in (fmean, min, max)))


STYLES = {"probed": "-", "drawn": "-.", None: "--"}
"""Lines of curves, by where a run's scalars come from."""


def _draw_curves(rows: Rows, curves: Mapping[str, Curve], known: Mapping[str, Row]) -> Callable[[Any], None]:
    """One panel for each group of rows."""
    groups = list(dict.fromkeys(row.group for row in known.values()))
    columns = min(len(groups), 3)

    def draw(figure: Any) -> None:
        panels = figure.subplots(-(-len(groups) // columns), columns, squeeze=False).flat
        for group, axes in zip_longest(groups, panels):
            if group is None:
                axes.remove()
                continue
            for name, runs in rows.items():
                if known[name].group == group:
                    label = name.removeprefix(f"{group}: ")
                    curves[name].draw(axes, label=label, linestyle=STYLES[runs[0].plan.scalars])
            axes.set(xlabel="round", ylabel="test accuracy, %")
            axes.set_title(group, fontsize=9)
            axes.legend(frameon=False, fontsize=8 if len(groups) == 1 else 5)

    return draw


_MODELS: dict[str, Settings] = {"LeNet": (), "WRN-10-2": ('task.model={name="wrn"}',)}
_DATA: dict[str, Settings] = {  # on top of the preset, which is LeNet on MNIST
    "MNIST": (),
    "CIFAR-10": ("task.data=cifar10", "task.augment=true", "rounds=40"),
    "CIFAR-100": ("task.data=cifar100", "task.augment=true", "rounds=40"),
}


def _rows_of(
    runs_on: Callable[[str], Mapping[str, Settings]], columns: Mapping[tuple[str, str], Sequence[float]]
) -> dict[str, Row]:
    """One row for every run of every column. `runs_on` gives the settings of the runs on a data set, and `columns` the
    paper's figures by model and data set, in the order of the runs. On CIFAR-100 the paper counts top-5 accuracy."""
    rows = {}
    for (model, data), figures in columns.items():
        top5 = data == "CIFAR-100"
        group = f"{model}, {data}{' (top-5)' if top5 else ''}"
        for (name, settings), figure in zip(runs_on(data).items(), figures, strict=True):
            settings = (*_MODELS[model], *_DATA[data], *settings)
            rows[f"{group}: {name}"] = Row(settings, figure, group, "test_top5" if top5 else "test_accuracy")
    return rows


def _guidelines(k: int) -> dict[str, Settings]:
    """All guidelines at this K (the row without a name), then each left out. Central differences get half the K, which
    takes as many forward passes."""
    at_k = (f"probe.k={k}",)
    return {
        "": at_k,
        "without EMA": (*at_k, "update.ema=0"),
        "ReLU": (*at_k, "task.model.activation=relu"),
        "SELU": (*at_k, "task.model.activation=selu"),
        "central": (f"probe.k={k // 2}", "probe.scheme=central"),
    }


_NOTES = (
    "Forward differences with twice the K of central ones (twice-FD) take as many forward passes.",
    "The accuracy is that of the averaged weights where there is an average.",
)
_NOTES_ON_DIGITS = (*_NOTES, "On the digits, to see that it works: the accuracies mean nothing.")

_PAPER_TABLE1 = {  # accuracies in percent, by model and data set, in the order of `_sweep`
    ("LeNet", "MNIST"): (87.27, 89.48, 92.18, 85.06, 81.55, 86.18, 76.02, 94.31),
    ("LeNet", "CIFAR-10"): (48.78, 51.82, 53.62, 47.97, 44.99, 48.65, 45.97, 58.75),
    ("LeNet", "CIFAR-100"): (41.54, 45.68, 48.72, 36.81, 39.49, 37.34, 36.53, 54.67),
    ("WRN-10-2", "MNIST"): (88.35, 89.57, 95.17, 85.89, 79.08, 76.44, 77.45, 97.11),
    ("WRN-10-2", "CIFAR-10"): (52.27, 55.59, 58.63, 50.01, 49.76, 43.37, 42.89, 62.29),
    ("WRN-10-2", "CIFAR-100"): (46.61, 51.65, 53.15, 45.86, 44.44, 41.79, 39.62, 60.08),
}
_UNITS_EPOCH = (*_UNITS, "probe.k=1600", "update.rate=0.01", "federation.steps=188")
_SHORTER = (
    *_NOTES,
    "The paper uses dense directions and many more samples. Here a direction touches one unit, so that runs get "
    "somewhere in minutes; a forward pass in the last column is only the part that this unit changes. Each row stands "
    "beside the paper's figure for its own smallest, middle or largest K: compare the order of rows, not the figures.",
)
_FULL = (
    *_NOTES,
    "“Units” is not in the paper: a direction touches one unit and costs a part of a forward pass. A client takes 188 "
    "local steps a round in batches of 8; an epoch has 188 batches of 32.",
)


def _sweep(ks: Sequence[int]) -> dict[str, Settings]:
    """Each K, then the guidelines left out one by one at the smallest K, then backpropagation."""
    _, *left_out = _guidelines(ks[0]).items()
    return {
        **_at(*ks),
        **{f"K = {ks[0]}, {name}": settings for name, settings in left_out},
        **_BACKPROPAGATION,
    }


def _lenet_on_mnist(sweep: Mapping[str, Settings]) -> dict[str, Row]:
    """The runs of a sweep with the paper's figures for LeNet on MNIST."""
    figures = zip(sweep.items(), _PAPER_TABLE1["LeNet", "MNIST"], strict=True)
    return {name: Row(settings, figure) for (name, settings), figure in figures}


TABLE1 = TrainingRuns(
    "table1",
    "iid, ten clients, epoch level: LeNet; at full scale also WRN-10-2",
    rows={
        "smoke": _lenet_on_mnist(_sweep((100, 200, 500))),
        "short": _lenet_on_mnist(_sweep((400, 800, 1600))),
        "full": {
            **_rows_of(lambda data: _sweep((100, 200, 500) if data == "MNIST" else (200, 500, 1000)), _PAPER_TABLE1),
            "LeNet, MNIST: K = 1600, units": Row(_UNITS_EPOCH, None, "LeNet, MNIST"),
        },
    },
    shared={
        "smoke": (*_FEW_DIGITS, "federation.level=epoch", "federation.batch=0"),
        "short": (*_UNITS, "federation.steps=20", "rounds=10", "run.evaluate_every=5"),
        "full": (),
    },
    notes={"smoke": _NOTES_ON_DIGITS, "short": _SHORTER, "full": _FULL},
)

_PAPER_TABLE2 = {
    ("LeNet", "CIFAR-10"): (35.21, 38.14, 39.71, 44.41),
    ("LeNet", "CIFAR-100"): (28.12, 30.92, 33.35, 38.43),
    ("WRN-10-2", "CIFAR-10"): (39.53, 41.69, 43.42, 51.18),
    ("WRN-10-2", "CIFAR-100"): (30.44, 32.89, 34.08, 40.85),
}
_SKEWED, _EVEN = "federation.partition=dirichlet", "federation.partition=iid"


def _skewed_and_even(few: int, many: int, backpropagation: Settings = ()) -> dict[str, Row]:
    """The same runs with clients of few classes and with clients of all classes."""
    return {
        f"{partition}: {name}": Row((setting, *settings), group=partition)
        for partition, setting in (("Dirichlet", _SKEWED), ("iid", _EVEN))
        for name, settings in {
            f"K = {few}, units": (f"probe.k={few}", "probe.supports=units"),
            f"K = {many}, units": (f"probe.k={many}", "probe.supports=units"),
            "backpropagation": ("estimator=backprop", *backpropagation),
        }.items()
    }


_UNIT_NOTES = (
    "The accuracy is that of the averaged weights.",
    "In rows that say units, a direction touches one output unit of a layer and costs a part of a forward pass.",
)
_STEPS = (
    "Ten clients a round take ten local steps of 8 samples each. Probes use Adam at 0.01, which did better on skewed "
    "clients than 0.005 and 0.02 in shorter runs. Backpropagation uses it at 0.002, which does better than 0.02."
)

TABLE2 = TrainingRuns(
    "table2",
    "clients of few classes each (Dirichlet 0.3), 100 clients, one local epoch a round",
    {
        "smoke": _skewed_and_even(50, 100),
        "short": _skewed_and_even(200, 800, ("update.rate=0.002",)),
        "full": _rows_of(lambda _data: {**_at(200, 500, 1000), **_BACKPROPAGATION}, _PAPER_TABLE2),
    },
    {
        "smoke": (
            *("federation.clients=20", "federation.participation=0.2", "federation.level=epoch"),
            *("federation.batch=0", "rounds=2", "run.evaluate_every=1"),
        ),
        "short": (
            *(*_DATA["CIFAR-10"], *_UNITS, "federation.clients=100", "federation.participation=0.1"),
            *("federation.steps=10", "rounds=60", "run.evaluate_every=10", "update.rate=0.01"),
        ),
        "full": (_SKEWED, "federation.clients=100"),
    },
    {"smoke": _UNIT_NOTES, "short": (*_UNIT_NOTES, _STEPS), "full": _UNIT_NOTES},
)


def _without_figures(runs: Mapping[str, Settings]) -> dict[str, Row]:
    return {name: Row(settings) for name, settings in runs.items()}


FIG_K = TrainingRuns(
    "fig-k",
    "LeNet, iid, ten clients, batch level: accuracy against rounds for several K",
    rows={
        "smoke": _without_figures({**_at(20, 100), **_BACKPROPAGATION}),
        "short": _without_figures(
            {"K = 100, dense": ("probe.supports=dense", "probe.k=100")}
            | {**_at(100, 400, 1600, suffix=", units"), **_BACKPROPAGATION}
        ),
        "full": _without_figures({**_at(20, 100, 500), **_BACKPROPAGATION}),
    },
    shared={
        "smoke": _FEW_DIGITS,
        "short": (*_UNITS, "federation.level=batch", "rounds=300", "run.evaluate_every=10", "update.ema=0.98"),
        "full": ("federation.level=batch", "rounds=3750", "run.evaluate_every=50"),
    },
    notes={"smoke": _NOTES_ON_DIGITS, "short": ("All rows use batches of 8 samples a client, and Adam at 0.02.",)},
)


def _ablation(k: int) -> dict[str, Row]:
    left_out = {name or "all guidelines": settings for name, settings in _guidelines(k).items()}
    norms = {f"with {norm.title()}Norm": (f"probe.k={k}", f"task.model.norm={norm}") for norm in ("group", "batch")}
    return _without_figures({**left_out, **norms})


FIG_ABLATION = TrainingRuns(
    "fig-ablation",
    "the guidelines one by one, at equal forward passes: LeNet, batch level",
    rows={"smoke": _ablation(20), "short": _ablation(400), "full": _ablation(100)},
    shared={
        "smoke": ("task.model.norm=none", *_FEW_DIGITS),
        "short": (*_UNITS, "federation.level=batch", "rounds=150", "run.evaluate_every=30", "update.ema=0.98"),
        "full": ("federation.level=batch", "rounds=3750", "run.evaluate_every=50"),
    },
    notes={"smoke": _NOTES_ON_DIGITS, "short": _NOTES, "full": _NOTES},
)
