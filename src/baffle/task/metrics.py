"""Metrics on a test set: BAFFLE's own, and users' functions. They are recorded beside the chain, not in it."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from baffle.core.arrays import F32, F64, I64, ranks
from baffle.core.ports import Batch, Runtime
from baffle.core.samples import PADDING, Array, Labels
from baffle.data.sources import Source
from baffle.errors import PlanError
from baffle.plan import Plan, tasks
from baffle.plan.functions import calling, own_function
from baffle.plan.tasks import LOSSES, is_own

TOP = 5  # a sample counts for top-5 accuracy if its label is among the model's five best classes
Measure = Callable[[Array, Labels], float]  # a model's outputs and the labels → a number


@dataclass(frozen=True)
class Metric:
    """A metric, by its name in results (after `test_`). Without a measure it is the loss, which a runtime computes."""

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
    """A user's function of outputs and labels, which are NumPy arrays."""

    def measure(outputs: Array, labels: Labels) -> float:
        with calling(f"task.metrics: {name}"):
            value = function(outputs, labels)
        try:
            return float(value)
        except (TypeError, ValueError):
            raise PlanError(f"task.metrics: {name} must return a number, got {type(value).__name__}") from None

    return Metric(tasks.short(name), measure)


def evaluate(metrics: Sequence[Metric], runtime: Runtime, weights: F32, test: Batch, source: Source) -> dict[str, Any]:
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


def _mean_loss(name: str) -> Measure:
    each = LOSSES[name].each
    assert each is not None

    def mean(outputs: Array, labels: Labels) -> float:
        return float(np.mean(each(np, *_side_by_side(outputs, labels))))

    return mean


def _r2(outputs: Array, labels: Labels) -> float:
    """One minus the squared error as a share of the targets' spread about their means; not a number without spread."""
    numbers, targets = _side_by_side(outputs, labels)
    spread = float(np.sum((targets - targets.mean(0)) ** 2))
    return 1 - float(np.sum((numbers - targets) ** 2)) / spread if spread else math.nan


def _side_by_side(outputs: Array, labels: Labels) -> tuple[F64, F64]:
    """Both as rows of a sample's numbers, so that a target of shape (n,) fits an output of (n, 1)."""
    return outputs.reshape(len(outputs), -1).astype(np.float64), labels.reshape(len(labels), -1).astype(np.float64)


OF_CLASSES: Mapping[str, Measure] = {"accuracy": _share_within(1), "top5": _share_within(TOP)}

OF_NUMBERS: Mapping[str, Measure] = {
    "accuracy": _share_on_the_right_side,
    "mse": _mean_loss("mse"),
    "mae": _mean_loss("mae"),
    "rmse": lambda outputs, labels: math.sqrt(_mean_loss("mse")(outputs, labels)),
    "r2": _r2,
}
