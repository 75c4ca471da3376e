"""What a server needs of a plan: its model, its data, and how its probes run."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import msgspec

from baffle.core.arrays import F32
from baffle.core.ports import Runtime
from baffle.data.sources import Source
from baffle.errors import DataError, PlanError, UnusableDataError
from baffle.plan import Plan
from baffle.plan.privacy import with_noise
from baffle.runtime.model import FLOAT32, RunnableModel
from baffle.task.agreement import require_targets
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
    metrics: tuple[Metric, ...] | None = None
    """What is measured on the test set; None for what the plan names."""
    remarks: tuple[str, ...] = ()
    """What the user should know about choices that were made for the plan."""

    def require_measurable(self) -> tuple[Metric, ...]:
        """The metrics, after a check that they and the test set, if there is one, can be used."""
        if self.source.has_test:
            with suppress_missing():
                require_targets(self.plan, self.source.test, "test")
        return metrics_of(self.plan, self.source) if self.metrics is None else self.metrics

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

    def with_noise_of(self, plan: Plan) -> "ServerTask":
        """The same task under a plan with other settings of [privacy], and what follows from them filled in."""
        return replace(self, plan=with_noise(plan, len(self.initial_weights())))

    def with_probe(self, **settings: object) -> "ServerTask":
        """The same task with these settings of [probe] changed."""
        probe = msgspec.structs.replace(self.plan.probe, **settings)
        return replace(self, plan=msgspec.structs.replace(self.plan, probe=probe))


@contextmanager
def suppress_missing() -> Iterator[None]:
    """A data set that is not there is no fault; one that cannot be used is."""
    try:
        yield
    except UnusableDataError:
        raise
    except DataError:
        pass
