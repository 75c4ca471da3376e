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
from baffle.core.directions import DISTRIBUTIONS, OUTER
from baffle.core.ports import Runtime, SampleRuntime
from baffle.core.samples import describe
from baffle.core.supports import row_of, rows_of
from baffle.data.partition import share_out
from baffle.data.sources import Source, data_folder, load
from baffle.errors import DataError, PlanError, UnusableDataError
from baffle.models.inputs import Inputs
from baffle.plan import Plan
from baffle.plan.privacy import with_noise
from baffle.runtime.model import FLOAT32, RunnableModel
from baffle.runtime.registry import load_model
from baffle.schedule import tiers_of
from baffle.task.agreement import explained, require_kind_of_labels, require_targets, try_out
from baffle.task.features import Backbones, source_of_features
from baffle.task.memory import LARGEST_PASS, SHARED_PASS, Footprint
from baffle.task.metrics import Metric, metrics_of
from baffle.task.micro_batch import RULE, SIZES, quickest, samples_interact

ShareOut = Callable[[Plan, Source], list[I64]]
"""A plan and its data → each client's samples, as indices into the training set."""


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
    task = _with_layers(_behind_backbone(task, folder, backbones or Backbones()))
    task = _with_noise(_with_shapes(task))
    if plan.estimator != "probe":
        return task
    _require_separate_samples(task)
    given = plan.probe.micro_batch > 0
    size = samples_at_once(plan, largest)
    return _shared(_laid_out(_within_memory(_measured(task, size, given=given), size, given=given), size), size)


def inputs_of(source: Source, folder: Path | None) -> Inputs:
    """What a model is built for."""
    return Inputs(source.shape, source.classes, source.pixel_scale, folder, source.width, source.label_shape)


def samples_at_once(plan: Plan, largest: int) -> int:
    """The samples of a probe: those of one client, or of all clients of a round if they are stacked."""
    return (plan.federation.batch or largest) * (plan.per_round if plan.probe.stacked else 1)


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


def _measured(task: ServerTask, size: int, *, given: bool) -> ServerTask:
    """The task with the fastest size of micro-batches, if its batches are larger than the rule's size."""
    if given or size <= RULE:
        return task
    with task.model.one_thread_each():
        batch = task.source.example(min(size, max(SIZES)))
        fastest = quickest(lambda size: task.with_probe(micro_batch=size).runtime(), task.initial_weights(), batch)
    return task.with_probe(micro_batch=fastest)


def _within_memory(task: ServerTask, size: int, *, given: bool) -> ServerTask:
    """The task with micro-batches small enough for probe.memory_mb."""
    probe = task.plan.probe
    if not probe.memory_mb:
        return task
    if not task.runs_whole():
        raise PlanError(
            "probe.memory_mb: only whole forward passes have a bound, but these probes keep activations of a batch; "
            'leave it out, or set probe.supports = "dense" (with a frozen backbone, train all of the model)'
        )
    wanted = min(probe.micro_batch, size)
    alone = task.with_probe(together=1).footprint()  # directions share what is left
    return task.with_probe(micro_batch=alone.within(probe.memory_mb, wanted, given=given))


def _laid_out(task: ServerTask, size: int) -> ServerTask:
    """The task with its directions shared out among parts of the model, according to what a direction costs there."""
    probe = task.plan.probe
    if probe.supports == "dense" or probe.layout:
        return task
    layout = task.model.layout(probe, task.source.example(size))
    return task.with_probe(layout=tuple(rows_of(layout)))


def _shared(task: ServerTask, size: int) -> ServerTask:
    """The task with the number of outer directions that share a forward pass. If the plan gives it, a model that does
    not allow it is refused; else directions take a pass each, and the user is told why."""
    probe = task.plan.probe
    if probe.distribution != OUTER or not probe.moves_whole_models or probe.together == 1:
        return task
    batch = task.source.example(min(size, probe.micro_batch))
    count, remark = task.model.together(probe, batch, _room(task))
    if not probe.together:
        alone = f"every outer direction takes a forward pass of its own: {remark}"
        return replace(task.with_probe(together=count), remarks=(*task.remarks, *([alone] if remark else [])))
    if remark or 1 < count < min(probe.together, probe.k):
        reason = remark or f"more than {count} of them take too much memory"
        raise PlanError(
            f"probe.together: {probe.together} outer directions cannot share a forward pass: {reason}; set it to "
            f"{count}, or leave it out"
        )
    return task


def _room(task: ServerTask) -> int:
    """Bytes for the tensors of a pass that directions share. Without a limit, it is what pays if the number of
    directions is chosen here, and what no machine should mind if somebody else chose it."""
    probe = task.plan.probe
    rule = LARGEST_PASS if probe.together else SHARED_PASS
    return min(rule, task.footprint().room(probe.memory_mb)) if probe.memory_mb else rule


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


def _with_shapes(task: ServerTask) -> ServerTask:
    """The task with the shapes of the model's tensors in its plan, if its directions are outer products."""
    probe = task.plan.probe
    if probe.distribution != OUTER or probe.shapes or task.plan.estimator != "probe":
        return task
    shapes = task.model.shapes()
    if shapes is None:
        raise PlanError(
            "probe.distribution: this runtime does not know the shapes of its models' tensors; expected one of "
            f"{', '.join(map(repr, DISTRIBUTIONS))}, got {probe.distribution!r}"
        )
    return task.with_probe(shapes=shapes)


def _require_separate_samples(task: ServerTask) -> None:
    """Refuse to stack clients whose samples cannot be told apart afterwards."""
    if not task.plan.probe.stacked:
        return
    batch, weights = task.source.example(8), task.initial_weights()
    with task.model.one_thread_each():
        runtime = task.with_probe(together=1).runtime()
        if not isinstance(runtime, SampleRuntime):
            raise PlanError("probe.stacked: this runtime gives the mean loss of a batch alone; leave it out")
        runtime.samples_on(batch)(weights)
        if samples_interact(lambda size: task.with_probe(micro_batch=size).runtime(), weights, batch):
            raise PlanError(
                "probe.stacked: what the model says about a sample depends on the others in its batch, so a client's "
                "samples must be alone; leave it out"
            )


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


@contextmanager
def suppress_missing() -> Iterator[None]:
    """A data set that is not there is no fault; one that cannot be used is."""
    try:
        yield
    except UnusableDataError:
        raise
    except DataError:
        pass


def versions(model: RunnableModel) -> dict[str, str]:
    """The versions of the libraries that a run is computed with, and the machine."""
    packages = ("baffle", "numpy", *model.packages, "msgspec", "cryptography")
    installed = {name: version(name) for name in packages}
    return installed | {"python": platform.python_version(), "machine": platform.machine()}
