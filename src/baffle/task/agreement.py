"""Whether a plan's loss, its data and its model fit together; if not, whose fault it is.

All of it is tried on two samples before a run has a folder.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from baffle.core.arrays import F32
from baffle.core.ports import Batch, GradientRuntime, Runtime
from baffle.core.samples import Array, describe
from baffle.data.dataset import Dataset, Source
from baffle.errors import BaffleError, OwnFunctionError, PlanError, UnusableDataError, first_line
from baffle.plan import Custom, Plan
from baffle.plan.tasks import is_own

OF_NUMBERS = ("mse", "mae", "bce")
"""Losses of numbers, as cross-entropy is of classes."""


def require_kind_of_labels(plan: Plan, source: Source) -> None:
    """Refuse a loss of classes for data that has none, and a loss of numbers for classes."""
    loss, data = plan.task.loss, plan.task.data
    if loss == "cross_entropy" and not source.classes:
        raise PlanError(
            f'task.loss: "cross_entropy" needs classes, but {data} has none; set it to "mse", "mae", "bce" or a '
            "function of your own, or say how many classes the source has"
        )
    if loss in OF_NUMBERS and source.classes:
        raise PlanError(
            f'task.loss: "{loss}" needs numbers to predict, but {data} has {source.classes} classes; set it to '
            '"cross_entropy", or give the source classes = 0'
        )


def require_targets(plan: Plan, data: Dataset, part: str) -> None:
    """Refuse targets that a plan's loss cannot take."""
    if plan.task.loss == "bce" and (data.labels.min() < 0 or data.labels.max() > 1):
        raise UnusableDataError(
            f"the data set's {part} labels lie between {data.labels.min():g} and {data.labels.max():g}, but task.loss "
            '= "bce" takes targets from 0 to 1; scale them, or set task.loss = "mse"'
        )


def require_outputs(plan: Plan, source: Source, outputs: Array, labels: Array) -> None:
    """Refuse a model whose outputs for a few samples do not fit their labels."""
    if plan.task.loss == "cross_entropy":
        _require_classes(source.classes, outputs, labels)
    elif plan.task.loss in OF_NUMBERS and outputs[0].size != labels[0].size:
        raise PlanError(
            f"task.model: the model has {outputs[0].size} outputs, but the data has {labels[0].size} numbers to "
            "predict for each sample; give the model as many outputs"
        )


def _require_classes(classes: int, outputs: Array, labels: Array) -> None:
    if outputs.ndim > 1 and outputs.shape[:-1] == labels.shape:
        found = outputs.shape[-1]
    elif outputs.ndim > 1 and (outputs.shape[0], *outputs.shape[2:]) == labels.shape:
        found = outputs.shape[1]
    else:
        shape = (*labels.shape[1:], classes)
        raise PlanError(
            f"task.model: the model gives outputs of shape {outputs.shape[1:]} for a sample whose labels have shape "
            f"{labels.shape[1:]}; expected {shape}"
        )
    if found != classes:
        raise PlanError(
            f"task.model: the model has {found} outputs, but the data has {classes} classes; make them equal"
        )


def try_out(plan: Plan, source: Source, runtime: Runtime, weights: F32, batch: Batch) -> None:
    """Run the model and the loss on a few samples, and refuse what cannot run."""
    with explained(plan, f"task.model cannot run on samples: {describe(batch.x)}"):
        outputs = runtime.outputs(weights, batch)
    if len(outputs) != len(batch.y):
        raise PlanError(
            f"task.model: the model gives {len(outputs)} rows for {len(batch.y)} samples; expected a row for each"
        )
    require_outputs(plan, source, outputs, batch.y)
    with explained(plan, f"task.loss cannot be taken of outputs of shape {outputs.shape[1:]}"):
        runtime.on(batch)(weights)
    if plan.estimator == "backprop" and isinstance(runtime, GradientRuntime):
        _try_gradient(plan, runtime, weights, batch)


def _try_gradient(plan: Plan, runtime: GradientRuntime, weights: F32, batch: Batch) -> None:
    try:
        runtime.gradient_on(batch)(weights)
    except OwnFunctionError as fault:  # it ran without gradients, so it is these that it cannot do
        raise PlanError(
            f'task.loss: {plan.task.loss} has no derivative, which estimator = "backprop" needs: '
            f'{first_line(fault.__cause__ or fault)}; set estimator = "probe"'
        ) from fault


@contextmanager
def explained(plan: Plan, what: str) -> Iterator[None]:
    """Turn any error of a runtime into a PlanError of one line: `what` failed, and the runtime's reason. An error that
    is no runtime's, in a model of the user's own, is a bug there and keeps its traceback."""
    try:
        yield
    except BaffleError:
        raise
    except (RuntimeError, ValueError, IndexError) as fault:
        raise PlanError(f"{what}: {first_line(fault)}") from fault
    except Exception as fault:
        kind = OwnFunctionError if isinstance(plan.task.model, Custom) or is_own(plan.task.loss) else PlanError
        raise kind(f"{what}: {type(fault).__name__}: {first_line(fault)}") from fault
