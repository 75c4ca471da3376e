"""Loads what a plan names: its model, a test set for the server, and shares of the data for the clients."""

import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from queue import SimpleQueue

import msgspec

from baffle.core.arrays import F32, I64
from baffle.core.ports import Runtime
from baffle.core.samples import describe
from baffle.core.supports import row_of
from baffle.data.partition import share_out
from baffle.data.sources import Source, data_folder, load
from baffle.errors import PlanError, UnusableDataError
from baffle.models.inputs import Inputs
from baffle.plan import Plan
from baffle.runtime.model import FLOAT32, RunnableModel
from baffle.runtime.registry import load_model
from baffle.schedule import tiers_of
from baffle.task.agreement import explained, require_kind_of_labels, require_targets, try_out
from baffle.task.features import Backbones, source_of_features
from baffle.task.micro_batch import RULE
from baffle.task.server_task import ServerTask
from baffle.task.settling import require_stackable, samples_at_once, settle_probes

ShareOut = Callable[[Plan, Source], list[I64]]
"""A plan and its data → each client's samples, as indices into the training set."""


@dataclass(frozen=True)
class Task:
    """What a simulation needs: the server's task, and the clients' samples and tiers."""

    server: ServerTask
    shares: list[I64]
    """Each client's samples, as indices into the training set."""
    tiers: list[int]
    """How many directions each client evaluates."""

    @property
    def plan(self) -> Plan:
        return self.server.plan

    @property
    def model(self) -> RunnableModel:
        return self.server.model

    @property
    def source(self) -> Source:
        return self.server.source

    def initial_weights(self) -> F32:
        return self.server.initial_weights()

    def runtime(self, precision: str = "") -> Runtime:
        return self.server.runtime(precision)


class Runtimes:
    """One runtime per thread, each lent to one borrower at a time."""

    def __init__(self, task: ServerTask | Task, count: int, precision: str = "") -> None:
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
) -> Task:
    """Load what the plan names and resolve what it leaves open. Tasks loaded with the same `backbones` share the
    features of a frozen backbone. `share` decides which client holds which samples. `source` and `model` may be given
    instead of being loaded."""
    folder = data_folder(folder)
    source = source or load(plan.task.data, folder, plan.task.pixels)
    if plan.task.augment and source.train.augment is None:
        raise PlanError(f"task.augment: {plan.task.data} has no augmentation; leave it out")
    require_kind_of_labels(plan, source)
    require_targets(plan, source.train, "training")
    shares = share(plan, source)
    _require_samples(shares)
    largest = max(len(samples) for samples in shares)
    server = load_server_task(plan, folder, largest, source=source, backbones=backbones, model=model)
    return Task(server, shares, tiers_of(server.plan))


def _require_samples(shares: list[I64]) -> None:
    """Refuse clients without samples."""
    empty = [number for number, samples in enumerate(shares) if not len(samples)]
    if empty:
        others = f" and {len(empty) - 1} more" if len(empty) > 1 else ""
        raise UnusableDataError(
            f"client {empty[0]}{others} of {len(shares)} has no samples; leave it out, or give it some"
        )


def load_server_task(
    plan: Plan,
    folder: str | Path | None,
    largest: int,
    *,
    source: Source | None = None,
    backbones: Backbones | None = None,
    model: RunnableModel | None = None,
) -> ServerTask:
    """The server's part of a plan whose largest client has `largest` samples. No sample is read: the model is tried and
    measured on this machine with made-up samples. `source` and `model` may be given instead of being loaded."""
    folder = data_folder(folder)
    source = source or load(plan.task.data, folder, plan.task.pixels)
    require_kind_of_labels(plan, source)
    model = model or load_model(plan, inputs_of(source, folder))
    plan = msgspec.structs.replace(plan, task=msgspec.structs.replace(plan.task, model=model.settings))
    task = ServerTask(resolve(plan, largest), model, source)
    _require_fit(task)
    task = _with_noise(_with_layers(_behind_backbone(task, folder, backbones or Backbones())))
    if plan.estimator != "probe":
        return task
    require_stackable(task)
    return settle_probes(task, largest, given=plan.probe.micro_batch > 0)


def inputs_of(source: Source, folder: Path | None) -> Inputs:
    """What a model is built for."""
    return Inputs(source.shape, source.classes, source.pixel_scale, folder, source.width, source.label_shape)


def resolve(plan: Plan, largest: int) -> Plan:
    """Replace settings that leave the choice to the program (0), so that the run's own plan states everything."""
    n_max = plan.ring.n_max or (1 if plan.federation.weighting == "uniform" else largest)
    micro_batch = plan.probe.micro_batch or min(RULE, samples_at_once(plan, largest))
    plan = msgspec.structs.replace(
        plan,
        ring=msgspec.structs.replace(plan.ring, n_max=n_max),
        probe=msgspec.structs.replace(plan.probe, micro_batch=micro_batch),
    )
    if plan.per_round * n_max >= 2**29:
        raise PlanError(
            f"ring.n_max: {plan.per_round} clients of up to {n_max} samples overflow the ring; set ring.n_max to "
            f'at most {(2**29 - 1) // plan.per_round} (larger clients count as that many), or weighting = "uniform"'
        )
    return plan


def _behind_backbone(task: ServerTask, folder: Path | None, backbones: Backbones) -> ServerTask:
    """If the model's front is frozen: the task of its head, on features. Otherwise the task unchanged."""
    plan = task.plan
    split = task.model.split(task.source.example(2))
    if split is None:
        return task
    if plan.task.augment:
        raise PlanError(
            "task.augment: features of a frozen backbone are computed once, without augmentation; leave it out"
        )
    data = (plan.task.data, plan.task.pixels, folder, plan.run.features_mb, plan.run.device)
    features = partial(source_of_features, task.source, split.front, plan.run.features_mb * 2**20)
    return replace(task, source=backbones.source((data, split.front.key), features), model=split.head)


def _with_layers(task: ServerTask) -> ServerTask:
    """The task with the model's layers in its plan, if the optimizer has one second moment for each."""
    update = task.plan.update
    if update.moments == "weights" or update.layers:
        return task
    layers = task.model.layers()
    if layers is None:
        raise PlanError('update.moments: this runtime does not know the layers of its models; expected "weights"')
    settled = msgspec.structs.replace(update, layers=tuple(map(row_of, layers)))
    return replace(task, plan=msgspec.structs.replace(task.plan, update=settled))


def _with_noise(task: ServerTask) -> ServerTask:
    """The task with all that follows from the plan's [privacy]. Without a clipping norm nothing follows yet."""
    return task.with_noise_of(task.plan) if task.plan.privacy.clip else task


def _require_fit(task: ServerTask) -> None:
    """Try the model and the loss on two samples, so that what cannot run is refused before the run has a folder."""
    batch = task.source.example(2)
    with explained(task.plan, f"task.model cannot be built for samples: {describe(batch.x)}"):
        weights = task.initial_weights()
    try_out(task.plan, task.source, task.runtime(FLOAT32), weights, batch)
    if task.precision != FLOAT32:
        name = task.precision
        what = f'probe.precision: this machine cannot run the model in {name}, set it to "float32"'
        with explained(task.plan, what):
            task.runtime().on(batch)(weights)


def versions(model: RunnableModel) -> dict[str, str]:
    """The versions of the libraries that a run is computed with, and the machine."""
    packages = ("baffle", "numpy", *model.packages, "msgspec", "cryptography")
    installed = {name: version(name) for name in packages}
    return installed | {"python": platform.python_version(), "machine": platform.machine()}
