"""From a plan to what a run works on: data, clients' shares, models, initial weights."""

import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue

import msgspec
import torch
from torch import nn

from baffle.core.arrays import F32, I64
from baffle.core.seeds import Seeds
from baffle.core.supports import rows_of
from baffle.data.partition import share_out
from baffle.data.sources import Source, data_folder, load
from baffle.errors import BaffleError, ModelError, PlanError
from baffle.models.build import build
from baffle.plan import Onnx, Plan, Softmax
from baffle.runtime.onnx.model_folder import read_manifest
from baffle.runtime.torch.fast_forward import give_back_freed_memory
from baffle.runtime.torch.layouts import propose
from baffle.runtime.torch.loss import TorchLoss, one_thread_each, weights_of
from baffle.schedule import tiers_of
from baffle.task.features import Backbones, halves, source_of_features
from baffle.task.memory import Footprint
from baffle.task.micro_batch import RULE, SIZES, quickest

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Task:
    """What a plan's [task] and [federation] name, loaded."""

    plan: Plan
    source: Source
    shares: list[I64]
    """Each client's samples, as indices into the training set."""
    tiers: list[int]
    """How many directions each client evaluates."""
    module: Callable[[], nn.Module]
    """Makes a model with the run's initial weights: the head alone where samples are features of a frozen backbone."""
    head_only: bool = False

    def initial_weights(self) -> F32:
        weights = weights_of(self.module())
        if not len(weights):
            raise PlanError("task.model has no trainable weights; expected at least one")
        return weights

    @property
    def dtype(self) -> torch.dtype:
        """What probes are computed in; backpropagation is computed in float32."""
        return DTYPES[self.plan.probe.precision] if self.plan.estimator == "probe" else torch.float32

    def runtime(self, dtype: torch.dtype | None = None) -> TorchLoss:
        probe, device, dtype = self.plan.probe, self.plan.run.device, dtype or self.dtype
        if probe.memory_mb:
            give_back_freed_memory()
        return TorchLoss(
            self.module(),
            micro_batch=probe.micro_batch,
            dtype=dtype,
            device=device,
            structured=not self.runs_whole(dtype),
        )

    def runs_whole(self, dtype: torch.dtype | None = None) -> bool:
        """Whether a probe is a forward pass of all of the model. Of a head alone, or of softmax regression, many are
        one matrix product, but of weights that nobody has rounded."""
        linear = self.head_only or isinstance(self.plan.task.model, Softmax)
        return self.plan.probe.supports == "dense" and not (linear and (dtype or self.dtype).itemsize >= 4)

    def footprint(self) -> Footprint:
        """The memory of this task's probes, where each is a whole forward pass."""
        sample = self.source.train.batch(self.shares[0][:1])

        def with_micro_batch(size: int) -> TorchLoss:
            return self.with_probe(micro_batch=size).runtime()

        return Footprint(with_micro_batch, self.initial_weights(), sample, self.plan.probe.k)

    def with_probe(self, **settings: object) -> "Task":
        """The same task with some of its probe's settings changed."""
        probe = msgspec.structs.replace(self.plan.probe, **settings)
        return replace(self, plan=msgspec.structs.replace(self.plan, probe=probe))


class Runtimes:
    """As many runtimes as threads, lent out one at a time."""

    def __init__(self, task: Task, count: int, dtype: torch.dtype | None = None) -> None:
        self._free: SimpleQueue[TorchLoss] = SimpleQueue()
        for _ in range(count):
            self._free.put(task.runtime(dtype))

    @contextmanager
    def borrow(self) -> Iterator[TorchLoss]:
        runtime = self._free.get()
        try:
            yield runtime
        finally:
            self._free.put(runtime)


def load_task(
    plan: Plan,
    folder: Path | None = None,
    backbones: Backbones | None = None,
    share: Callable[[Plan, Source], list[I64]] = share_out,
) -> Task:
    """Load what the plan names and resolve what it leaves open; the task's plan is the run's own. Tasks that are loaded
    with the same `backbones` share the features of a frozen one. `share` says who holds what."""
    _require_device(plan.run.device)
    plan, folder = _with_graph(plan), data_folder(folder)
    source = load(plan.task.data, folder, plan.task.pixels)
    if plan.task.augment and source.train.augment is None:
        raise PlanError(f"task.augment: {plan.task.data} has no augmentation; leave it out")
    shares = share(plan, source)
    task = Task(resolve(plan, shares), source, shares, tiers_of(plan), partial(initial_module, plan, source, folder))
    _require_fit(task)
    task = _behind_backbone(task, folder, backbones or Backbones())
    if plan.estimator != "probe":
        return task
    given = plan.probe.micro_batch > 0
    return _laid_out(_within_memory(_measured(task, given=given), given=given))


def initial_module(plan: Plan, source: Source, folder: Path | None) -> nn.Module:
    """The whole model with its initial weights, whatever of it is frozen."""
    if isinstance(plan.task.model, Onnx):
        return _from_onnx(plan, source)
    key = Seeds(plan.seed, b"").key("init")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int.from_bytes(key[:8], "big") >> 1)
        return build(plan.task.model, source.shape, source.classes, scale=source.pixel_scale, folder=folder)


def _with_graph(plan: Plan) -> Plan:
    """The plan with the digest of its graph, where its model came as ONNX."""
    model = plan.task.model
    if not isinstance(model, Onnx):
        return plan
    if not plan.run.model:
        raise PlanError("run.model: expected the folder that `baffle export --onnx` made, got none")
    found = read_manifest(Path(plan.run.model)).model_sha256
    if model.graph not in ("", found):
        raise ModelError(f"the graph in {plan.run.model} is another than the plan's; set run.model to the right folder")
    return msgspec.structs.replace(plan, task=msgspec.structs.replace(plan.task, model=Onnx(graph=found)))


def _from_onnx(plan: Plan, source: Source) -> nn.Module:
    from baffle.runtime.onnx.as_module import OnnxClassifier

    module = OnnxClassifier(Path(plan.run.model))
    takes = module.manifest.input_shape, module.manifest.classes
    if takes != (source.shape, source.classes):
        raise ModelError(
            f"the model in {plan.run.model} takes samples of shape {takes[0]} and {takes[1]} classes, but "
            f"{plan.task.data} has {source.shape} and {source.classes}"
        )
    return module


def _behind_backbone(task: Task, folder: Path | None, backbones: Backbones) -> Task:
    """The task as the head of its model sees it, where the front is frozen."""
    sample = task.source.train.batch(task.shares[0][:2]).x
    split = halves(task.module(), sample)
    if split is None:
        return task
    if task.plan.task.augment:
        raise PlanError("task.augment: features of a frozen backbone are computed once; leave it out")

    plan = task.plan
    data = (plan.task.data, plan.task.pixels, folder, plan.run.features_mb, plan.run.device)
    with one_thread_each():
        source = backbones.source(
            data,
            split.front,
            lambda: source_of_features(task.source, split.front, plan.run.features_mb * 2**20, plan.run.device),
        )
    return replace(task, source=source, module=partial(deepcopy, split.head), head_only=True)


def resolve(plan: Plan, shares: list[I64]) -> Plan:
    """Fill in what a plan leaves to be chosen (0), so that the run's own plan says everything."""
    largest = max(len(share) for share in shares)
    n_max = plan.ring.n_max or (1 if plan.federation.weighting == "uniform" else largest)
    micro_batch = plan.probe.micro_batch or min(RULE, plan.federation.batch or largest)
    plan = msgspec.structs.replace(
        plan,
        ring=msgspec.structs.replace(plan.ring, n_max=n_max),
        probe=msgspec.structs.replace(plan.probe, micro_batch=micro_batch),
    )
    if plan.per_round * n_max >= 2**29:
        raise PlanError(
            f"ring.n_max: {plan.per_round} clients of up to {n_max} samples overflow the ring; set ring.n_max to "
            f'at most {(2**29 - 1) // plan.per_round} (larger clients count as that much), or weighting = "uniform"'
        )
    return plan


def _measured(task: Task, *, given: bool) -> Task:
    """The task with the quickest size of micro-batches, where its batches are larger than the rule's."""
    if given:
        return task
    share = max(task.shares, key=len)[: task.plan.federation.batch or None]
    if len(share) <= RULE:
        return task
    with one_thread_each():
        batch = task.source.train.batch(share[: max(SIZES)])
        size = quickest(lambda size: task.with_probe(micro_batch=size).runtime(), task.initial_weights(), batch)
    return task.with_probe(micro_batch=size)


def _within_memory(task: Task, *, given: bool) -> Task:
    """The task with micro-batches that keep to probe.memory_mb."""
    probe = task.plan.probe
    if not probe.memory_mb:
        return task
    if not task.runs_whole():
        raise PlanError(
            "probe.memory_mb: only whole forward passes have a bound, and these probes keep activations of a batch; "
            'leave it out, or set probe.supports = "dense" (with a frozen backbone, train all of the model)'
        )
    size = min(probe.micro_batch, task.plan.federation.batch or max(len(share) for share in task.shares))
    return task.with_probe(micro_batch=task.footprint().within(probe.memory_mb, size, given=given))


def _laid_out(task: Task) -> Task:
    """The task with its directions shared out over parts of the model, by what each of them costs."""
    probe = task.plan.probe
    if probe.supports == "dense" or probe.layout:
        return task
    with one_thread_each():
        batch = task.source.train.batch(max(task.shares, key=len)[: task.plan.federation.batch or None])
        return task.with_probe(layout=tuple(rows_of(propose(task.module(), batch, probe.supports, probe.k))))


def _require_fit(task: Task) -> None:
    """Try the model on two samples: whatever it cannot do is said here, before a run has a folder."""
    batch = task.source.train.batch(task.shares[0][:2])
    with _explained(f"task.model cannot run on samples of shape {batch.x.shape[1:]}"):
        task.runtime(torch.float32).on(batch)(task.initial_weights())
    if task.dtype != torch.float32:
        name = task.plan.probe.precision
        with _explained(f'probe.precision: this machine cannot run the model in {name}, set it to "float32"'):
            task.runtime().on(batch)(task.initial_weights())


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """Say in one line what a runtime could not do, with its own reason."""
    try:
        yield
    except BaffleError:
        raise
    except Exception as fault:
        reason = str(fault).splitlines()[0] if str(fault) else type(fault).__name__
        raise PlanError(f"{what}: {reason}") from fault


def _require_device(name: str) -> None:
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as fault:  # what torch raises for a device that is not there
        raise PlanError(f"run.device: {name!r} cannot be used: {str(fault).splitlines()[0]}") from None


def versions() -> dict[str, str]:
    """What a run was computed with."""
    from importlib.metadata import version

    packages = {name: version(name) for name in ("baffle", "numpy", "torch", "msgspec", "cryptography")}
    return packages | {"python": platform.python_version(), "machine": platform.machine()}
