"""What is measured on a test set: BAFFLE's metrics, and functions of the user's own. None of it is in the chain."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from baffle.core.arrays import F32, F64, I64
from baffle.core.ports import Batch, Runtime
from baffle.core.ranks import ranks
from baffle.core.samples import PADDING, Array, Labels
from baffle.data.dataset import Source
from baffle.errors import PlanError
from baffle.plan import Plan, tasks
from baffle.plan.functions import calling, own_function
from baffle.plan.tasks import is_own

TOP = 5
"""A sample counts for top-5 accuracy if its label is among the model's five best classes."""

Measure = Callable[[Array, Labels], float]
"""A model's outputs and the labels → a number."""


@dataclass(frozen=True)
class Metric:
    """A metric, by its name in results (after `test_`). One without a measure is the loss itself, which a runtime
    takes."""

    name: str
    measure: Measure | None = None


def metrics_of(plan: Plan, source: Source, given: Mapping[str, Metric] = MappingProxyType({})) -> tuple[Metric, ...]:
    """The metrics of a plan; the first is the headline. Top-5 accuracy is left out with five classes or fewer, unless
    the plan names it. `given` are metrics that were given as objects, by their names in the plan."""
    names = tasks.metrics_of(plan.task)
    few = not plan.task.metrics and source.classes <= TOP
    chosen = [name for name in names if not (few and name == "top5")]
    return tuple(given[name] if name in given else _metric(name, source.classes) for name in chosen)


def _metric(name: str, classes: int) -> Metric:
    if is_own(name):
        return own_metric(name, own_function("task.metrics", name))
    if name == "top5" and not classes:
        raise PlanError('task.metrics: "top5" needs classes, but the data has none; leave it out')
    measures: Mapping[str, Measure] = OF_CLASSES if classes else OF_NUMBERS
    return Metric(name, measures.get(name) or OF_NUMBERS.get(name))


def own_metric(name: str, function: Callable[[Any, Any], Any]) -> Metric:
    """A function of the user's own of outputs and labels, as NumPy arrays."""

    def measure(outputs: Array, labels: Labels) -> float:
        with calling(f"task.metrics: {name}"):
            value = function(outputs, labels)
        try:
            return float(value)
        except (TypeError, ValueError):
            raise PlanError(f"task.metrics: {name} must return a number, got {type(value).__name__}") from None

    return Metric(tasks.short(name), measure)


def measured(metrics: Sequence[Metric], runtime: Runtime, weights: F32, test: Batch, source: Source) -> dict[str, Any]:
    """All metrics of weights on a test set, under `test_` and their names; and, as `test_domains`, for each domain that
    has test samples. Unless the loss is among them, this takes one forward pass over the set."""
    outputs = runtime.outputs(weights, test) if any(metric.measure for metric in metrics) else None

    def values(rows: I64 | slice) -> dict[str, float | None]:
        return {metric.name: _rounded(metric, value(metric, rows)) for metric in metrics}

    def value(metric: Metric, rows: I64 | slice) -> float:
        if metric.measure is None:
            return runtime.on(test.take(rows))(weights)
        assert outputs is not None
        return metric.measure(outputs[rows], test.y[rows])

    whole = {f"test_{name}": number for name, number in values(slice(None)).items()}
    domain_of = source.test.domain_of
    if domain_of is None or not source.domains:
        return whole
    of_domain = {name: np.flatnonzero(domain_of == number) for number, name in enumerate(source.domains)}
    return whole | {"test_domains": {name: values(rows) for name, rows in of_domain.items() if len(rows)}}


def _rounded(metric: Metric, value: float) -> float | None:
    """A number for people and JSON: six digits, after the point for shares; none if it is not finite."""
    if not math.isfinite(value):
        return None
    return round(float(value), 6) if metric.name in OF_CLASSES else float(f"{value:.6g}")


def _share_within(top: int) -> Measure:
    def share(outputs: Array, labels: Labels) -> float:
        if outputs.shape[:-1] != labels.shape:
            outputs = np.moveaxis(outputs, 1, -1)
        rows, flat = outputs.reshape(-1, outputs.shape[-1]), labels.reshape(-1)
        counted = flat != PADDING
        if not counted.all():
            rows, flat = rows[counted], flat[counted]
        return float(np.mean(ranks(rows, flat) < top)) if len(flat) else math.nan

    return share


def _share_on_the_right_side(outputs: Array, labels: Labels) -> float:
    """How often a logit is positive where the target is above a half, and only there."""
    numbers, targets = _side_by_side(outputs, labels)
    return float(np.mean((numbers > 0) == (targets > 0.5)))


def _mse(outputs: Array, labels: Labels) -> float:
    numbers, targets = _side_by_side(outputs, labels)
    return float(np.mean((numbers - targets) ** 2))


def _rmse(outputs: Array, labels: Labels) -> float:
    return math.sqrt(_mse(outputs, labels))


def _mae(outputs: Array, labels: Labels) -> float:
    numbers, targets = _side_by_side(outputs, labels)
    return float(np.mean(np.abs(numbers - targets)))


def _r2(outputs: Array, labels: Labels) -> float:
    """One minus the squared error as a share of the targets' spread about their own means; not a number without
    spread."""
    numbers, targets = _side_by_side(outputs, labels)
    spread = float(np.sum((targets - targets.mean(0)) ** 2))
    return 1 - float(np.sum((numbers - targets) ** 2)) / spread if spread else math.nan


def _side_by_side(outputs: Array, labels: Labels) -> tuple[F64, F64]:
    """Both as rows of a sample's numbers, so that a target of shape (n,) fits an output of (n, 1)."""
    numbers = outputs.reshape(len(outputs), -1).astype(np.float64)
    targets = labels.reshape(len(labels), -1).astype(np.float64)
    return numbers, targets


OF_CLASSES: Mapping[str, Measure] = {"accuracy": _share_within(1), "top5": _share_within(TOP)}

OF_NUMBERS: Mapping[str, Measure] = {
    "accuracy": _share_on_the_right_side,
    "mse": _mse,
    "mae": _mae,
    "rmse": _rmse,
    "r2": _r2,
}
