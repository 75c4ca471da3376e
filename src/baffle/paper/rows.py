"""Rows of tables of accuracies. A column of the paper, which is a model on a data set, is a group of rows here."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from baffle.paper.settings import Settings


@dataclass(frozen=True)
class Row:
    """One run: its settings on top of those of its scale, and the paper's accuracy for it in percent. Rows of the same
    group share a panel of the figure. `shown` says which of its accuracies the table shows."""

    settings: Settings
    paper: float | None = None
    group: str = ""
    shown: Literal["test_accuracy", "test_top5"] = "test_accuracy"


MODELS: dict[str, Settings] = {"LeNet": (), "WRN-10-2": ('task.model={name="wrn"}',)}
"""Settings on top of the preset, which is LeNet on MNIST."""

DATA: dict[str, Settings] = {
    "MNIST": (),
    "CIFAR-10": ("task.data=cifar10", "task.augment=true", "rounds=40"),
    "CIFAR-100": ("task.data=cifar100", "task.augment=true", "rounds=40"),
}

TOP5 = ("CIFAR-100",)
"""Data sets for which the paper reports top-5 accuracy."""

RunsOn = Callable[[str], Mapping[str, Settings]]
"""For the name of a data set, the settings of each run on it, by the run's name."""


def rows_of(runs_on: RunsOn, columns: Mapping[tuple[str, str], Sequence[float]]) -> dict[str, Row]:
    """One row for every run of every column. `columns` has the paper's figures by model and data set, in the order of
    the runs."""
    rows = {}
    for (model, data), figures in columns.items():
        group = f"{model}, {data}{' (top-5)' if data in TOP5 else ''}"
        for (name, settings), figure in zip(runs_on(data).items(), figures, strict=True):
            rows[f"{group}: {name}"] = Row(
                (*MODELS[model], *DATA[data], *settings),
                figure,
                group,
                "test_top5" if data in TOP5 else "test_accuracy",
            )
    return rows
