"""What a plan calls losses and metrics: the names that BAFFLE knows, and which go together."""

from collections.abc import Mapping

from baffle.plan.sections import TaskSettings

LOSSES = ("cross_entropy", "mse", "mae", "bce")

METRICS = ("accuracy", "top5", "loss", "mse", "mae", "rmse", "r2")

OF_NUMBERS = ("loss", "mse", "mae", "rmse", "r2")

SUITABLE: Mapping[str, tuple[str, ...]] = {
    "cross_entropy": ("accuracy", "top5", "loss"),
    "mse": OF_NUMBERS,
    "mae": OF_NUMBERS,
    "bce": ("accuracy", "loss"),
}
"""Which of BAFFLE's metrics can be taken with which of its losses. A loss of the user's own goes with all of them."""

USUAL: Mapping[str, tuple[str, ...]] = {
    "cross_entropy": ("accuracy", "top5"),
    "mse": ("mae", "r2"),
    "mae": ("mae", "r2"),
    "bce": ("accuracy",),
}
"""The metrics of a plan that names none. With a loss of the user's own, it is the loss itself."""


def is_own(name: str) -> bool:
    """Whether a name is that of a function of the user's own: "package.module:function"."""
    return ":" in name


def metrics_of(task: TaskSettings) -> tuple[str, ...]:
    """The metrics that a plan asks for, by their names in the plan; the first is the headline."""
    return task.metrics or USUAL.get(task.loss, ("loss",))


def short(metric: str) -> str:
    """A metric's name in results, where it follows `test_`: that of the function, for one of the user's own."""
    return metric.rpartition(":")[2]


def headline(task: TaskSettings) -> str:
    """The name in results of the metric that stands for all others."""
    return short(metrics_of(task)[0])
