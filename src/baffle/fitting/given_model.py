"""A model, a loss and metrics that were given as objects: their names in a plan, and how they are known again."""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import numpy as np

from baffle.core.arrays import F32
from baffle.core.ports import Batch
from baffle.core.samples import Array, Samples
from baffle.core.state import FLOAT
from baffle.errors import ModelError, PlanError
from baffle.plan import Custom, Model, Plan
from baffle.plan.functions import GIVEN
from baffle.runtime.model import FLOAT32, RunnableModel
from baffle.task.metrics import Metric, own_metric

if TYPE_CHECKING:
    from torch import nn

Function = Callable[[Any, Any], Any]
"""A loss or a metric: outputs and targets → a number, or for a loss one for each sample."""

SAID = 8
"""How many of a model's outputs a plan keeps, so that the model is known again."""

CLOSE = 1e-3
"""How far these may differ on another machine."""


class GivenModel(Protocol):
    """A model that was given as an object, with its loss."""

    @property
    def loss(self) -> str | Function: ...

    @property
    def unsettled(self) -> Model:
        """How a plan names this model before it is known what it says."""
        ...

    def on(self, plan: Plan) -> RunnableModel:
        """The model as a run has it."""
        ...

    def says(self, x: Samples, weights: F32 | None = None) -> Array:
        """The model's outputs, a row for each sample, with its own weights or with others."""
        ...

    def with_weights(self, weights: F32) -> Any:
        """A copy of what was given, with these weights in what is trained: a module, or an ONNX model."""
        ...

    def forget(self) -> None:
        """Remove what was written to give the model to a run."""
        ...

    def settled(self, plan: Plan, few: Batch) -> Plan:
        """The plan, with that by which the model is known again."""
        ...

    def require_known(self, plan: Plan, few: Batch) -> None:
        """Refuse a model or a loss that is not the run's."""
        ...


@dataclass(frozen=True)
class GivenModule:
    """A user's module, what of it is trained (as in `task.model.train`), and the loss. The module is never changed."""

    module: "nn.Module"
    train: tuple[str, ...]
    loss: str | Function

    @classmethod
    def of(cls, module: object, train: str | Sequence[str], loss: str | Function) -> "GivenModule":
        from baffle.runtime.torch.given import require_module

        patterns = (train,) if isinstance(train, str) else tuple(train)
        return cls(require_module(module), () if patterns == ("all",) else patterns, loss)

    def trained(self) -> "nn.Module":
        """A copy in which exactly what is trained requires gradients."""
        from baffle.models.trained_part import choose_trained

        return choose_trained(deepcopy(self.module), self.train)

    def starting_at(self, weights: F32) -> "GivenModule":
        """The same model with these weights in what is trained."""
        from baffle.runtime.torch.given import restored

        return replace(self, module=restored(self.module, self.trained(), weights))

    def forget(self) -> None:
        """Nothing was written."""

    def with_weights(self, weights: F32) -> "nn.Module":
        return self.starting_at(weights).module

    def on(self, plan: Plan) -> RunnableModel:
        """The model as a run has it."""
        from baffle.runtime.torch.criteria import own_criterion
        from baffle.runtime.torch.model import TorchModel

        criterion = own_criterion(name_of(self.loss), self.loss) if callable(self.loss) else None
        return TorchModel(plan, plan.task.model, partial(deepcopy, self.trained()), criterion=criterion)

    @property
    def unsettled(self) -> Custom:
        return Custom(factory=_named(type(self.module)), train=self.train)

    def says(self, x: Samples, weights: F32 | None = None) -> Array:
        from baffle.runtime.torch.given import outputs

        return outputs(self.module if weights is None else self.starting_at(weights).module, x)

    def settled(self, plan: Plan, few: Batch) -> Plan:
        return msgspec.structs.replace(plan, task=msgspec.structs.replace(plan.task, model=self._known_as(plan, few)))

    def _known_as(self, plan: Plan, batch: Batch) -> Custom:
        """How a plan knows this model: by its initial weights, and by what it and its loss say about a few samples."""
        model = self.on(plan)
        weights = model.initial_weights()
        loss = model.runtime(plan.probe, FLOAT32).on(batch)(weights)
        said = [*self.says(batch.x).reshape(-1)[:SAID].tolist(), loss]
        return msgspec.structs.replace(
            self.unsettled,
            weights=sha256(weights.astype(FLOAT).tobytes()).hexdigest(),
            says=tuple(float(f"{number:.6g}") for number in said),
        )

    def require_known(self, plan: Plan, few: Batch) -> None:
        """Refuse a model or a loss that says something else than the run's own, with the weights that it began with."""
        theirs = plan.task.model
        assert isinstance(theirs, Custom)
        ours = self._known_as(plan, few)
        remedy = "give the one that the run began with"
        same_kind = ours.weights == theirs.weights and len(ours.says) == len(theirs.says)
        close = np.isclose(ours.says, theirs.says if same_kind else np.nan, rtol=CLOSE, atol=CLOSE)
        if not close[:-1].all():
            raise ModelError(
                f"model: this is not the run's model: with the same weights it says other things; {remedy}"
            )
        if not close[-1]:
            raise PlanError(f"loss: this is not the run's loss: it gives another value; {remedy}")


def with_names(plan: Plan, model: GivenModel, metrics: Sequence[str | Function], data: str) -> Plan:
    """The plan with names for what was given as objects. `data` identifies the data."""
    task = msgspec.structs.replace(
        plan.task,
        data=f"{GIVEN}:{data}",
        model=model.unsettled,
        loss=_named(model.loss) if callable(model.loss) else model.loss,
        metrics=tuple(_named(metric) if callable(metric) else metric for metric in metrics),
    )
    return msgspec.structs.replace(plan, task=task)


def given_metrics(metrics: Sequence[str | Function]) -> Mapping[str, Metric]:
    """The metrics that were given as functions, by their names in the plan."""
    return {_named(metric): own_metric(name_of(metric), metric) for metric in metrics if callable(metric)}


def name_of(function: object) -> str:
    """A name for a function in results."""
    name = str(getattr(function, "__name__", type(function).__name__))
    return name if name.isidentifier() else "function"


def _named(thing: object) -> str:
    return f"{GIVEN}:{name_of(thing)}"
