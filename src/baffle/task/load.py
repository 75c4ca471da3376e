"""Loads what a plan names: its model, a test set for the server, and shares of the data for the clients."""

import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from queue import SimpleQueue

from baffle.core.arrays import I64
from baffle.core.ports import Batch, Runtime
from baffle.data.partition import share_out
from baffle.data.sources import Source, data_folder, load, source_of
from baffle.errors import PlanError, UnusableDataError
from baffle.models.inputs import Inputs
from baffle.plan import MobileNet, Plan
from baffle.runtime.model import RunnableModel
from baffle.runtime.registry import load_model
from baffle.schedule import tiers_of
from baffle.stopwatch import Stopwatch
from baffle.task.features import Backbones
from baffle.task.server_task import ServerTask, require_kind_of_labels, require_targets
from baffle.task.settle import Circumstances, settle

ShareOut = Callable[[Plan, Source], list[I64]]  # each client's samples, as indices into the training set


@dataclass(frozen=True)
class Task(ServerTask):
    """What a simulation needs: the server's task, and the clients' samples and tiers."""

    shares: list[I64] = field(default_factory=list)  # each client's samples, as indices into the training set
    tiers: list[int] = field(default_factory=list)  # how many directions each client evaluates

    @property
    def largest(self) -> int:
        """Samples of the largest client."""
        return max(map(len, self.shares))

    def first_batch(self) -> Batch:
        """A batch of the first client, for measurements."""
        return self.source.train.batch(self.shares[0][: self.plan.federation.batch or None])


class Runtimes:
    """One runtime per thread, each lent to one borrower at a time."""

    def __init__(self, task: ServerTask, count: int, precision: str = "") -> None:
        self._free: SimpleQueue[Runtime] = SimpleQueue()
        for _ in range(count):
            self._free.put(task.runtime(precision))

    @contextmanager
    def borrow(self) -> Iterator[Runtime]:
        runtime = self._free.get()
        try:
            yield runtime
        finally:
            self._free.put(runtime)


def load_task(
    plan: Plan,
    folder: str | Path | None = None,
    backbones: Backbones | None = None,
    share: ShareOut = share_out,
    *,
    source: Source | None = None,
    model: RunnableModel | None = None,
    stopwatch: Stopwatch | None = None,
) -> Task:
    """Load what the plan names and resolve what it leaves open. Tasks loaded with the same `backbones` share the
    features of a frozen backbone. `share` decides which client holds which samples. `source` and `model` may be given
    instead of being loaded. `stopwatch` times what is measured on the way."""
    folder = data_folder(folder)
    source = source_of(plan.task, folder, source)
    if plan.task.augment and source.train.augment is None:
        raise PlanError(f"task.augment: {plan.task.data} has no augmentation; leave it out")
    require_kind_of_labels(plan, source)
    require_targets(plan, source.train, "training")
    shares = share(plan, source)
    if empty := [number for number, samples in enumerate(shares) if not len(samples)]:
        others = f" and {len(empty) - 1} more" if len(empty) > 1 else ""
        raise UnusableDataError(
            f"client {empty[0]}{others} of {len(shares)} has no samples; leave it out, or give it some"
        )
    server = load_server_task(plan, folder, max(map(len, shares)), source, backbones, model, stopwatch)
    return Task(server.plan, server.model, server.source, None, server.remarks, shares, tiers_of(server.plan))


def load_server_task(
    plan: Plan,
    folder: str | Path | None,
    largest: int,
    source: Source | None = None,
    backbones: Backbones | None = None,
    model: RunnableModel | None = None,
    stopwatch: Stopwatch | None = None,
) -> ServerTask:
    """The server's part of a plan whose largest client has `largest` samples. No sample is read: the model is tried and
    measured on this machine with made-up samples. `source` and `model` may be given instead of being loaded."""
    folder = data_folder(folder)
    source = source or load(plan.task.data, folder, plan.task.pixels)
    require_kind_of_labels(plan, source)
    model = model or load_model(plan, inputs_of(plan, source, folder))
    by = Circumstances(largest, plan.probe.micro_batch > 0, stopwatch or Stopwatch(), folder, backbones or Backbones())
    return settle(ServerTask(plan, model, source), by)


def inputs_of(plan: Plan, source: Source, folder: Path | None) -> Inputs:
    """What a model is built for. A source that does not state its scale may have to read samples to know it, so only a
    model that scales pixels asks."""
    scale = source.pixel_scale if isinstance(plan.task.model, MobileNet) else None
    return Inputs(source.shape, source.classes, scale, folder, source.width, source.label_shape)


def versions(model: RunnableModel) -> dict[str, str]:
    """The versions of the libraries that a run is computed with, and the machine."""
    packages = ("baffle", "numpy", *model.packages, "msgspec", "cryptography")
    installed = {name: version(name) for name in packages}
    return installed | {"python": platform.python_version(), "machine": platform.machine()}
