"""Log a run elsewhere while it goes on: a callback gets every round's numbers.

python examples/callbacks.py

The first callback writes a CSV file. The second logs to TensorBoard if that is installed; for MLflow, its body would be
`mlflow.log_metrics(numbers(now), step=now["round"])`.
"""

import csv
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import baffle


def numbers(now: Mapping[str, Any]) -> dict[str, float]:
    """What of a round's metrics is a number."""
    return {name: value for name, value in now.items() if isinstance(value, int | float)}


class ToCsv:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self, now: Mapping[str, Any]) -> None:
        row = {"round": now["round"], "loss": now["loss"], "accuracy": now.get("test_accuracy", "")}
        new = not self.path.exists()
        with self.path.open("a", newline="") as file:
            writer = csv.DictWriter(file, row)
            if new:
                writer.writeheader()
            writer.writerow(row)


class ToTensorBoard:
    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder))

    def __call__(self, now: Mapping[str, Any]) -> None:
        for name, value in numbers(now).items():
            self.writer.add_scalar(name, value, now["round"])


torch.manual_seed(0)
random = np.random.default_rng(0)
x = random.standard_normal((400, 6)).astype(np.float32)
y = (x[:, 0] + x[:, 1] > 0).astype(np.int64)
callbacks: list[Any] = [ToCsv(Path("rounds.csv"))]
if find_spec("tensorboard"):
    callbacks.append(ToTensorBoard(Path("tensorboard")))
run = baffle.fit(nn.Linear(6, 2), (x[:300], y[:300]), (x[300:], y[300:]), plan={"rounds": 80}, callbacks=callbacks)
print(
    f"accuracy {run['test_accuracy']:.1%}; {len(Path('rounds.csv').read_text().splitlines()) - 1} rounds in rounds.csv"
)
