"""Rows of the paper's tables of accuracies. Its columns, each a model on a data set, are groups of rows here."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from baffle.paper.settings import Settings


@dataclass(frozen=True)
class Row:
    """One run: its settings on top of those of its scale, and what the paper reports for it, in percent. Its group is
    the panel of the figure that it is drawn in; `shown` is which of its accuracies counts."""

    settings: Settings
    paper: float | None = None
    group: str = ""
    shown: Literal["test_accuracy", "test_top5"] = "test_accuracy"


MODELS: dict[str, Settings] = {"LeNet": (), "WRN-10-2": ('task.model={name="wrn"}',)}
"""On top of the preset for LeNet on MNIST."""

DATA: dict[str, Settings] = {
    "MNIST": (),
    "CIFAR-10": ("task.data=cifar10", "task.augment=true", "rounds=40"),
    "CIFAR-100": ("task.data=cifar100", "task.augment=true", "rounds=40"),
}

TOP5 = ("CIFAR-100",)
"""Data sets for which the paper reports top-5 accuracy."""

Kinds = Callable[[str], Mapping[str, Settings]]
"""A data set → the runs on it, by name, and their settings."""


def rows_of(kinds: Kinds, columns: Mapping[tuple[str, str], Sequence[float]]) -> dict[str, Row]:
    """A row for every run of every column. A column is a model, a data set, and the paper's figures in the order of
    its runs."""
    rows = {}
    for (model, data), figures in columns.items():
        group = f"{model}, {data}{' (top-5)' if data in TOP5 else ''}"
        for (name, settings), figure in zip(kinds(data).items(), figures, strict=True):
            rows[f"{group}: {name}"] = Row(
                (*MODELS[model], *DATA[data], *settings),
                figure,
                group,
                "test_top5" if data in TOP5 else "test_accuracy",
            )
    return rows
