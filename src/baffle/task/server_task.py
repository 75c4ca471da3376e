"""What a server needs of a plan: its model, its data, and how its probes run; and whether loss, data and model fit
together, which is tried on two samples before a run has a folder."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Self

import msgspec

from baffle.core.arrays import F32
from baffle.core.ports import Batch, GradientRuntime, Runtime
from baffle.core.samples import Array, describe
from baffle.data.sources import Dataset, Source
from baffle.errors import BaffleError, DataError, OwnFunctionError, PlanError, UnusableDataError, first_line
from baffle.plan import Custom, Plan
from baffle.plan.privacy import scalars_of, with_noise
from baffle.plan.tasks import LOSSES, is_of_numbers, is_own
from baffle.runtime.model import FLOAT32, RunnableModel
from baffle.task.memory import Footprint
from baffle.task.metrics import Metric, metrics_of


@dataclass(frozen=True)
class ServerTask:
    """What a server needs: a plan with nothing left open, its model, and a source that may have a test set.

    Only the test set of the source is ever read, so a server starts on a machine without training samples.
    """

    plan: Plan
    model: RunnableModel
    source: Source
    metrics: tuple[Metric, ...] | None = None  # what is measured on the test set; None for what the plan names
    remarks: tuple[str, ...] = ()  # choices that were made for the plan and that the user should know about

    def require_measurable(self) -> tuple[Metric, ...]:
        """The metrics, after a check that they and the test set, if there is one, can be used."""
        if self.source.has_test:
            try:
                require_targets(self.plan, self.source.test, "test")
            except UnusableDataError:
                raise
            except DataError:  # it is missing, which the run says later
                pass
        return metrics_of(self.plan, self.source) if self.metrics is None else self.metrics

    @property
    def draws_directions(self) -> bool:
        """Whether there is anything to probe: an exact head may be all of the model."""
        plan = self.plan
        return plan.estimator == "probe" and scalars_of(plan, len(self.initial_weights())) > 0

    def initial_weights(self) -> F32:
        weights = self.model.initial_weights()
        if not len(weights):
            raise PlanError("task.model has no trainable weights; expected at least one")
        return weights

    @property
    def precision(self) -> str:
        """The precision of probes; backpropagation uses float32."""
        return self.plan.probe.precision if self.plan.estimator == "probe" else FLOAT32

    def runtime(self, precision: str = "") -> Runtime:
        """The model for one thread, in the plan's precision unless another is named."""
        return self.model.runtime(self.plan.probe, precision or self.precision)

    def runs_whole(self) -> bool:
        """Whether every probe is a forward pass of the whole model."""
        return self.model.runs_whole(self.plan.probe, self.precision)

    def footprint(self) -> Footprint:
        """The memory of this task's probes, if every probe is a whole forward pass."""
        return Footprint(self.model, self.plan.probe, len(self.initial_weights()), self.source.example(1))

    def with_noise_of(self, plan: Plan) -> Self:
        """The same task under a plan with other settings of [privacy], and what follows from them filled in."""
        return replace(self, plan=with_noise(plan, len(self.initial_weights())))

    def with_probe(self, **settings: object) -> Self:
        """The same task with these settings of [probe] changed."""
        return self.with_section("probe", **settings)

    def with_section(self, section: str, **settings: object) -> Self:
        """The same task with these settings of a section of its plan changed."""
        return replace(self, plan=with_settings(self.plan, **{section: settings}))


def with_settings(plan: Plan, **sections: Mapping[str, object]) -> Plan:
    """The plan with these settings of its sections changed."""
    changed = {name: msgspec.structs.replace(getattr(plan, name), **new) for name, new in sections.items()}
    return msgspec.structs.replace(plan, **changed)


def require_kind_of_labels(plan: Plan, source: Source) -> None:
    """Refuse a loss of classes for data that has none, and a loss of numbers for classes."""
    loss, data = plan.task.loss, plan.task.data
    if loss == "cross_entropy" and not source.classes:
        others = ", ".join(f'"{name}"' for name in LOSSES if is_of_numbers(name))
        raise PlanError(
            f'task.loss: "cross_entropy" needs classes, but {data} has none; set it to {others} or a function of your '
            "own, or say how many classes the source has"
        )
    if is_of_numbers(loss) and source.classes:
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


def try_out(task: ServerTask, runtime: Runtime, weights: F32, batch: Batch) -> None:
    """Run the model and the loss on a few samples, and refuse what cannot run or does not fit."""
    plan = task.plan
    with explained(plan, f"task.model cannot run on samples: {describe(batch.x)}"):
        outputs = runtime.outputs(weights, batch)
    if len(outputs) != len(batch.y):
        raise PlanError(
            f"task.model: the model gives {len(outputs)} rows for {len(batch.y)} samples; expected a row for each"
        )
    if plan.task.loss == "cross_entropy":
        _require_classes(task.source.classes, outputs, batch.y)
    elif is_of_numbers(plan.task.loss) and outputs[0].size != batch.y[0].size:
        raise PlanError(
            f"task.model: the model has {outputs[0].size} outputs, but the data has {batch.y[0].size} numbers to "
            "predict for each sample; give the model as many outputs"
        )
    with explained(plan, f"task.loss cannot be taken of outputs of shape {outputs.shape[1:]}"):
        runtime.on(batch)(weights)
    if plan.estimator != "probe" and isinstance(runtime, GradientRuntime):
        try:
            runtime.gradient_on(batch)(weights)
        except OwnFunctionError as fault:  # it ran without gradients, so these are the cause
            raise PlanError(
                f'task.loss: {plan.task.loss} has no derivative, which estimator = "{plan.estimator}" needs: '
                f'{first_line(fault.__cause__ or fault)}; set estimator = "probe"'
            ) from fault


def _require_classes(classes: int, outputs: Array, labels: Array) -> None:
    if outputs.ndim > 1 and outputs.shape[:-1] == labels.shape:
        found = outputs.shape[-1]
    elif outputs.ndim > 1 and (outputs.shape[0], *outputs.shape[2:]) == labels.shape:
        found = outputs.shape[1]
    else:
        raise PlanError(
            f"task.model: the model gives outputs of shape {outputs.shape[1:]} for a sample whose labels have shape "
            f"{labels.shape[1:]}; expected {(*labels.shape[1:], classes)}"
        )
    if found != classes:
        raise PlanError(
            f"task.model: the model has {found} outputs, but the data has {classes} classes; make them equal"
        )


@contextmanager
def explained(plan: Plan, what: str) -> Iterator[None]:
    """Turn an error of a runtime into a PlanError of one line: `what` failed, and the runtime's reason. Any other error
    in a user's own model or loss is a bug there and keeps its traceback."""
    try:
        yield
    except BaffleError:
        raise
    except (RuntimeError, ValueError, IndexError) as fault:
        raise PlanError(f"{what}: {first_line(fault)}") from fault
    except Exception as fault:
        kind = OwnFunctionError if isinstance(plan.task.model, Custom) or is_own(plan.task.loss) else PlanError
        raise kind(f"{what}: {type(fault).__name__}: {first_line(fault)}") from fault
