"""The losses and metrics that a plan can name, and which go together."""

from collections.abc import Callable
from typing import Any, NamedTuple

from baffle.plan.sections import TaskSettings

METRICS = ("accuracy", "top5", "loss", "mse", "mae", "rmse", "r2")
OF_NUMBERS = ("loss", "mse", "mae", "rmse", "r2")


class Loss(NamedTuple):
    """A loss of BAFFLE's own. `each` gives the loss of each number that a model predicts, in float64 arrays of NumPy or
    PyTorch, with the functions of that library, and `slope` its derivative by that number. A sample's loss is the mean
    of its numbers' losses. A loss of classes has neither. Without one, no head is exact. `metrics` can be taken with
    the loss; `usual` are those of a plan that names none."""

    each: Callable[[Any, Any, Any], Any] | None
    metrics: tuple[str, ...]
    usual: tuple[str, ...]
    slope: Callable[[Any, Any, Any], Any] | None = None


def _bce(xp: Any, logits: Any, targets: Any) -> Any:
    """log(1 + exp(x)) − x·y, without overflow."""
    return xp.clip(logits, 0, None) - logits * targets + xp.log1p(xp.exp(-xp.abs(logits)))


def _bce_slope(xp: Any, logits: Any, targets: Any) -> Any:
    """The logistic function minus the target, without overflow."""
    power = xp.exp(-xp.abs(logits))
    return xp.where(logits >= 0, 1 / (1 + power), power / (1 + power)) - targets


LOSSES: dict[str, Loss] = {
    "cross_entropy": Loss(None, ("accuracy", "top5", "loss"), ("accuracy", "top5")),
    "mse": Loss(
        lambda _, numbers, targets: (numbers - targets) ** 2,
        OF_NUMBERS,
        ("mae", "r2"),
        lambda _, numbers, targets: 2 * (numbers - targets),
    ),
    "mae": Loss(
        lambda xp, numbers, targets: xp.abs(numbers - targets),
        OF_NUMBERS,
        ("mae", "r2"),
        lambda xp, numbers, targets: xp.sign(numbers - targets),
    ),
    "bce": Loss(_bce, ("accuracy", "loss"), ("accuracy",), _bce_slope),
}
"""All metrics suit a loss of your own, and its usual metric is the loss itself."""


def is_of_numbers(loss: str) -> bool:
    """Whether a loss is one of BAFFLE's own for numbers to predict."""
    return loss in LOSSES and LOSSES[loss].each is not None


def is_own(name: str) -> bool:
    """Whether a name is that of a function of your own: "package.module:function"."""
    return ":" in name


def metrics_of(task: TaskSettings) -> tuple[str, ...]:
    """The metrics that a plan asks for, by their names in the plan; the first is the headline."""
    return task.metrics or (LOSSES[task.loss].usual if task.loss in LOSSES else ("loss",))


def short(metric: str) -> str:
    """A metric's name in results, where it follows `test_`. For a function of your own, it is the function's name."""
    return metric.rpartition(":")[2]


def headline(task: TaskSettings) -> str:
    """The name in results of the most important metric."""
    return short(metrics_of(task)[0])
