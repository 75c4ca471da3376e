"""A run: its metrics as arrays, its trained model, its report."""

from collections.abc import Iterator, Mapping
from functools import cached_property
from html import escape
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from baffle.core.arrays import F32, F64
from baffle.core.samples import Array
from baffle.errors import ModelError
from baffle.fitting.choice import AVERAGED, LAST
from baffle.fitting.given_data import given_samples
from baffle.fitting.given_model import GivenModel, GivenModule
from baffle.journal.folder import RunFolder
from baffle.journal.replay import catch_up, lineage_of
from baffle.journal.store import Journal
from baffle.plan import Custom, Onnx, Plan, load
from baffle.plan.arithmetic import vouch_for
from baffle.report.words import is_share, metric_name

if TYPE_CHECKING:
    from onnx import ModelProto
    from torch import nn


class Run(Mapping[str, Any]):
    """A run in a folder. As a mapping it is the run's summary: `run["test_accuracy"]`.

    `path` is the folder, `plan` the plan as it was run. `model`, `predict` and `restore` give the trained model back;
    a run of a module that was opened from its folder has none until it is given one (`restore`).
    """

    def __init__(self, path: str | Path, given: "GivenModel | None" = None) -> None:
        self._folder = RunFolder.existing(Path(path))
        self._given = given
        self.path = self._folder.path
        self.seeds: tuple[Run, ...] = (self,)
        """This run, and those that `baffle.fit(…, seeds=…)` made with other seeds."""
        self.plan: Plan = load(str(self._folder.plan))

    @cached_property
    def summary(self) -> dict[str, Any]:
        """The run's summary, as in its `summary.json`."""
        return self._folder.read_summary()

    @cached_property
    def metrics(self) -> dict[str, F64]:
        """The metrics of every round, an array for each name; NaN where a round did not measure it, as the loss of a
        private run. `round` is counted from 1."""
        with Journal.open(self._folder.journal) as journal:
            records = list(journal.metrics())
        rounds = {"round": np.array([record["round"] + 1.0 for record in records])}
        names = {"loss": None} | {
            name: None
            for record in records
            for name, value in record.items()
            if name != "round" and isinstance(value, (int, float)) and not isinstance(value, bool)
        }
        values = {name: [record.get(name) for record in records] for name in names}
        return rounds | {
            name: np.array([value if isinstance(value, (int, float)) else np.nan for value in column], np.float64)
            for name, column in values.items()
        }

    def weights(self, *, last: bool | None = None) -> F32:
        """The trained weights as one vector: averaged as the plan says, or the last ones. Left open, those that the
        summary's metrics measure: the averaged ones, unless a fit found the last ones better."""
        if last is None:
            last = self._folder.summary.is_file() and self.summary.get("returned") == LAST
        return self._weights[LAST if last else AVERAGED]

    @cached_property
    def _weights(self) -> dict[str, F32]:
        with Journal.open(self._folder.journal) as journal:
            lineage = lineage_of(journal, self.plan)
            state = catch_up(journal, lineage).state
        return {AVERAGED: lineage.trajectory.rule.smooth_weights(state), LAST: state.weights}

    @cached_property
    def model(self) -> Any:
        """The trained model, with the weights that the metrics measure: a copy of the module that was given, or for an
        ONNX file that model as an `onnx.ModelProto`, which `onnx.save(run.model, "trained.onnx")` writes. A folder that
        `baffle export` made gives one from `x` to `logits`."""
        return self._require_given().with_weights(self.weights())

    @overload
    def restore(self, model: "nn.Module", *, last: bool | None = None) -> "nn.Module": ...

    @overload
    def restore(self, model: str | Path, *, last: bool | None = None, int8: bool = False) -> "ModelProto": ...

    def restore(
        self, model: "nn.Module | str | Path", *, last: bool | None = None, int8: bool = False
    ) -> "nn.Module | ModelProto":
        """A copy of a module, or the model in an ONNX file, with the run's weights in the trained part alone. A last
        layer that was of integers in the file is of floats, or with `int8` of integers, a scale for each output."""
        weights = self.weights(last=last)
        if isinstance(model, (str, Path)):
            if not isinstance(self.plan.task.model, Onnx):
                raise ModelError(f"model: the run's model is a module; expected one of its kind, got the path {model}")
            from baffle.fitting.given_onnx import GivenOnnx

            return GivenOnnx.again(Path(model), self.plan.task.loss, self.plan).with_weights(weights, int8=int8)
        train = self.plan.task.model.train if isinstance(self.plan.task.model, Custom) else ()
        return GivenModule.of(model, train, self.plan.task.loss).with_weights(weights)

    def predict(self, x: Any) -> Array:
        """The trained model's outputs, a row for each sample: logits for classes, numbers for a regression."""
        return self._require_given().outputs(given_samples(x), self.weights())

    def report(self, out: str | Path | None = None, *, standalone: bool = False) -> Path:
        """Write a report: `report.html` in the run's folder, or the file `out`. A standalone report includes the script
        that draws its charts. The report of a fit with several seeds shows them side by side, in `comparison.html`
        beside the folders."""
        from baffle.report.page import write_report

        return write_report([run.path for run in self.seeds], Path(out) if out else None, standalone=standalone)

    def spread(self, name: str) -> tuple[float, float, float]:
        """Mean, least and most of a number of the summary over the seeds, as of "test_accuracy"."""
        values = [float(run[name]) for run in self.seeds]
        return fmean(values), min(values), max(values)

    def plot(self) -> Any:
        """A figure of plotly for notebooks: the loss (ε of a private run) and the first metric against rounds."""
        from plotly.subplots import make_subplots

        metrics = [f"test_{name}" for name in self.summary.get("metrics", [])]
        names = ["epsilon" if self.plan.privacy.on else "loss", *metrics[:1]]
        figure = make_subplots(rows=1, cols=len(names), subplot_titles=[metric_name(name) for name in names])
        for column, name in enumerate(names, 1):
            values = self.metrics.get(name, np.full(len(self.metrics["round"]), np.nan))
            measured = ~np.isnan(values)
            rounds = self.metrics["round"][measured]
            figure.add_scatter(x=rounds, y=values[measured], name=metric_name(name), row=1, col=column)
            figure.update_xaxes(title="rounds", row=1, col=column)
            figure.update_yaxes(tickformat=".0%" if is_share(name) else None, row=1, col=column)
        return figure.update_layout(showlegend=False, template="plotly_white", height=360)

    def _require_given(self) -> GivenModel:
        if self._given is not None:
            return self._given
        if isinstance(self.plan.task.model, Onnx):  # its graph is in a folder
            from baffle.fitting.given_onnx import GivenOnnx

            return GivenOnnx(Path(self.plan.run.model), self.plan.task.loss)
        raise ModelError(f"{self.path} keeps weights, but no module to put them in; give one: run.restore(module)")

    def __getitem__(self, name: str) -> Any:
        if name not in self.summary:
            raise KeyError(f"{name}; the summary has {', '.join(self.summary)}")
        return self.summary[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.summary)

    def __len__(self) -> int:
        return len(self.summary)

    def _repr_html_(self) -> str:
        """The summary as a table, for notebooks."""
        shown = {name: f"{value:.6g}" if isinstance(value, float) else value for name, value in self.summary.items()}
        plain = {name: value for name, value in shown.items() if isinstance(value, (str, int)) and "sha256" not in name}
        rows = "".join(
            f"<tr><th>{escape(name)}</th><td>{escape(str(value))}</td></tr>" for name, value in plain.items()
        )
        return f"<p>A BAFFLE run in <code>{escape(str(self.path))}</code></p><table>{rows}</table>"

    def __repr__(self) -> str:
        return f"<baffle run of {self.summary['rounds']} rounds in {self.path}>"


def open_run(path: str | Path, *, own_code: bool = False) -> Run:
    """The run in a folder, to look at. Functions that its weights follow from are called only with `own_code`.

    >>> run = baffle.open("runs/mine")
    >>> run.metrics["loss"]
    """
    run = Run(path)
    if own_code:
        vouch_for(run.plan)
    return run
