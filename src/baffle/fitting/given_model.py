"""Models, losses and metrics that were given as objects: their names in a plan, and how a resumed run recognises
them."""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import numpy as np
from msgspec.structs import replace as changed

from baffle.core.arrays import F32
from baffle.core.ports import Batch
from baffle.core.samples import Array, Samples
from baffle.core.state import FLOAT
from baffle.errors import ModelError, PlanError
from baffle.plan import Custom, Plan
from baffle.plan.functions import GIVEN
from baffle.runtime.model import FLOAT32, RunnableModel
from baffle.task.metrics import Metric, own_metric

if TYPE_CHECKING:
    from torch import nn

    from baffle.fitting.given_onnx import GivenOnnx

GivenModel: TypeAlias = "GivenModule | GivenOnnx"
"""A model that was given as an object or as an ONNX file, with its loss. Both classes have the same methods."""

Function = Callable[[Any, Any], Any]  # a loss or a metric of outputs and targets; a loss may give one for each sample
KEPT_OUTPUTS = 8  # outputs in a plan that identify a model
CLOSE = 1e-3  # how far outputs may differ on another machine


@dataclass(frozen=True)
class GivenModule:
    """A user's module, which is never changed, the part that is trained (as in `task.model.train`), and the loss."""

    module: "nn.Module"
    train: tuple[str, ...]
    loss: str | Function
    rounds: ClassVar = False  # its activations are not rounded to integers

    @classmethod
    def of(cls, module: object, train: str | Sequence[str], loss: str | Function) -> "GivenModule":
        from baffle.runtime.torch.model import require_module

        patterns = (train,) if isinstance(train, str) else tuple(train)
        return cls(require_module(module), () if patterns == ("all",) else patterns, loss)

    def trained(self) -> "nn.Module":
        """A copy in which exactly the trained part requires gradients."""
        from baffle.models.build import choose_trained

        return choose_trained(deepcopy(self.module), self.train)

    def trained_numbers(self) -> tuple[int, int, Sequence[str]]:
        """How many numbers are trained, of how many, and their names."""
        named = dict(self.trained().named_parameters())
        trains = {name: values.numel() for name, values in named.items() if values.requires_grad}
        return sum(trains.values()), sum(values.numel() for values in named.values()), list(trains)

    def starting_at(self, weights: F32) -> "GivenModule":
        """The same model with these weights in its trained part."""
        from baffle.runtime.torch.model import restored

        return replace(self, module=restored(self.module, self.trained(), weights))

    def forget(self) -> None:
        """Remove files that were written for a run: none."""

    def with_weights(self, weights: F32) -> "nn.Module":
        """A copy of the module with these weights in its trained part."""
        return self.starting_at(weights).module

    def on(self, plan: Plan) -> RunnableModel:
        """The model as a run has it."""
        from baffle.runtime.torch.loss import own_criterion
        from baffle.runtime.torch.model import TorchModel

        criterion = own_criterion(name_of(self.loss), self.loss) if callable(self.loss) else None
        return TorchModel(plan, plan.task.model, partial(deepcopy, self.trained()), criterion=criterion)

    @property
    def unsettled(self) -> Custom:
        """The model's settings in a plan before they are complete."""
        return Custom(factory=_named(type(self.module)), train=self.train)

    def outputs(self, x: Samples, weights: F32 | None = None) -> Array:
        """The model's outputs, a row for each sample, with its own weights or with others."""
        from baffle.runtime.torch.model import outputs

        return outputs(self.module if weights is None else self.starting_at(weights).module, x)

    def settled(self, plan: Plan, few: Batch) -> Plan:
        """The plan with the settings that identify the model."""
        return changed(plan, task=changed(plan.task, model=self._known_as(plan, few)))

    def _known_as(self, plan: Plan, batch: Batch) -> Custom:
        """The settings that identify the model: its initial weights, and its outputs and loss on a few samples."""
        model = self.on(plan)
        weights = model.initial_weights()
        loss = model.runtime(plan.probe, FLOAT32).on(batch)(weights)
        said = [*self.outputs(batch.x).reshape(-1)[:KEPT_OUTPUTS].tolist(), loss]
        digest = sha256(weights.astype(FLOAT).tobytes()).hexdigest()
        return changed(self.unsettled, weights=digest, says=tuple(float(f"{number:.6g}") for number in said))

    def require_known(self, plan: Plan, few: Batch) -> None:
        """Refuse a model or a loss whose values differ from the run's own, at the weights that the run began with."""
        theirs = plan.task.model
        assert isinstance(theirs, Custom)
        ours = self._known_as(plan, few)
        remedy = "give the one that the run began with"
        same_kind = ours.weights == theirs.weights and len(ours.says) == len(theirs.says)
        close = np.isclose(ours.says, theirs.says if same_kind else np.nan, rtol=CLOSE, atol=CLOSE)
        if not close[:-1].all():
            raise ModelError(
                f"model: this is not the run's model: with the same weights it has other outputs; {remedy}"
            )
        if not close[-1]:
            raise PlanError(f"loss: this is not the run's loss: it gives another value; {remedy}")


def with_names(plan: Plan, model: GivenModel, metrics: Sequence[str | Function], data: str) -> Plan:
    """The plan with names for the given objects. `data` identifies the data."""
    task = changed(
        plan.task,
        data=f"{GIVEN}:{data}",
        model=model.unsettled,
        loss=_named(model.loss) if callable(model.loss) else model.loss,
        metrics=tuple(_named(metric) if callable(metric) else metric for metric in metrics),
    )
    return changed(plan, task=task)


def given_metrics(metrics: Sequence[str | Function]) -> Mapping[str, Metric]:
    """The metrics that were given as functions, by their names in the plan."""
    return {_named(metric): own_metric(name_of(metric), metric) for metric in metrics if callable(metric)}


def name_of(function: object) -> str:
    """A name for a function in results."""
    name = str(getattr(function, "__name__", type(function).__name__))
    return name if name.isidentifier() else "function"


def _named(thing: object) -> str:
    return f"{GIVEN}:{name_of(thing)}"


def what_trains(model: GivenModel) -> str:
    """How much of a model is trained, for people."""
    count, of, names = model.trained_numbers()
    some = [*names[:3], "…", names[-1]] if len(names) > 5 else names
    return f"{count:,} of {of:,} numbers train: {', '.join(some)}"
