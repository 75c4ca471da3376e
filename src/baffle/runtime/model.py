"""A plan's model on one runtime. Tasks, clients and servers ask it; none of them knows which runtime it is."""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Set
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

from threadpoolctl import threadpool_limits

from baffle.core.arrays import F32, Samples
from baffle.core.ports import Batch, Runtime
from baffle.core.supports import Layout
from baffle.errors import PlanError
from baffle.plan import Model, ProbeSettings

FLOAT32, FLOAT64 = "float32", "float64"
"""Precisions of forward passes: the one that every runtime has, and the one that probes are compared with."""


class Front(Protocol):
    """The frozen front of a model. Equal keys mean equal features."""

    @property
    def key(self) -> Hashable: ...

    def features(self, samples: Samples) -> F32: ...


@dataclass(frozen=True)
class Split:
    """A model in two: a front without trained weights, and the head behind it, which has them all."""

    front: Front
    head: "RunnableModel"


class RunnableModel(ABC):
    """What a runtime must supply: initial weights, and runtimes for threads. The rest it may, if it can."""

    packages: tuple[str, ...] = ()
    """Libraries whose versions a run writes down."""

    precisions: Set[str] = frozenset({FLOAT32})
    """What its forward passes can be computed in."""

    settings: Model
    """The plan's [task.model], with everything filled in that is found out when a model is loaded."""

    @abstractmethod
    def initial_weights(self) -> F32:
        """The trained weights before round 0, as one flat vector."""

    @abstractmethod
    def runtime(self, probe: ProbeSettings, precision: str) -> Runtime:
        """The model for one thread, which computes in a precision."""

    def advice(self) -> list[str]:
        """What a person should know before this model is trained."""
        return []

    def runs_whole(self, _probe: ProbeSettings, _precision: str) -> bool:
        """Whether every probe is a forward pass of the whole model."""
        return True

    def split(self, _sample: Batch) -> Split | None:
        """The model's frozen front and its head; none if nothing worth keeping is frozen."""
        return None

    def layout(self, probe: ProbeSettings, _batch: Batch) -> Layout:
        """How directions are shared out over parts of the model, by what each of them costs on a batch."""
        raise PlanError(f'probe.supports: this runtime runs whole models; expected "dense", got "{probe.supports}"')

    def pass_bytes(self, _probe: ProbeSettings, _batch: Batch) -> int | None:
        """The most memory that tensors take at one time during a whole forward pass; none if it is not known."""
        return None

    def activation_bytes(self, _batch: Batch) -> int | None:
        """The memory of all activations of a batch, as a backpropagation keeps them; none if it is not known."""
        return None

    def one_thread_each(self) -> AbstractContextManager[None]:
        """Operators run on one thread each, so that sums have one order. Parallelism is over clients."""
        return one_blas_thread()


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """NumPy's BLAS on one thread: threads that wait for each other between small products took nine times as long."""
    with threadpool_limits(limits=1, user_api="blas"):
        yield
