"""A worker for devices without PyTorch: it runs an exported model on the client's own data."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from baffle.client.worker import Worker
from baffle.core.arrays import F32
from baffle.core.ports import Runtime
from baffle.data.partition import share_out
from baffle.data.sources import Dataset, load
from baffle.errors import ModelError, PlanError
from baffle.plan import Onnx, Plan
from baffle.runtime.model import require_own_shapes
from baffle.runtime.onnx.criteria import criterion_of, require_loss
from baffle.runtime.onnx.loss import OnnxLoss
from baffle.runtime.onnx.model_folder import MODEL, OUTER_MODEL, WEIGHTS, Manifest, read_manifest, read_weights
from baffle.runtime.onnx.outer import SAMPLES_TRIED, OnnxOuter, disagreement, tried_outputs
from baffle.trajectory import trajectory_of

MICRO_BATCH = 4
"""At most this many samples go through the graph at once, even if the plan says more: this takes less memory and hardly
more time."""

NUMBERS_AT_ONCE = 1 << 15
"""How many numbers of directions are drawn at a time: a quarter of the usual, which takes a quarter of the memory."""

SHARED_PASS = 2 << 20
"""Bytes of tensors up to which outer directions share a pass."""

MMAP_THRESHOLD, LARGE = -3, 1 << 17
"""glibc's setting M_MMAP_THRESHOLD, and a value for it in bytes: larger blocks get a separate mapping, which goes
back to the system when they are freed."""


def edge_worker(
    plan: Plan, model: Path, number: int, k: int, data: Path | None = None, *, part: bool = False
) -> Worker:
    """A worker for client `number` of a resolved plan, with the model in a folder that `baffle export` wrote. It
    evaluates the first `k` directions of a round.

    All training samples in the data folder are this client's. With `part` the folder holds every client's samples, and
    this one takes its share by the plan's partition.
    """
    _require_fit(plan, number)
    give_memory_back()
    manifest = read_manifest(model)
    _require_model(plan, manifest, model)
    require_loss(plan, manifest, model)
    require_own_shapes(plan.probe, tuple(tensor.shape for tensor in manifest.weights if tensor.size))
    samples = _samples(plan, manifest, number, data, part=part)
    runtime = _runtime(plan, manifest, model, samples)
    # Each thread would need memory. The number of threads changes no bit of a run.
    one_thread = msgspec.structs.replace(plan, run=msgspec.structs.replace(plan.run, workers=1))
    trajectory = trajectory_of(one_thread, manifest.n_weights, NUMBERS_AT_ONCE)

    @contextmanager
    def borrow() -> Iterator[Runtime]:
        yield runtime

    return Worker(number, k, trajectory, samples, np.arange(len(samples)), borrow)


def _runtime(plan: Plan, manifest: Manifest, folder: Path, samples: Dataset) -> Runtime:
    """The model. Outer directions share passes if the plan says so and the folder has a graph for that; as many as do
    not take more memory than a pass for one direction would."""
    probe, criterion = plan.probe, criterion_of(plan)
    micro_batch = min(probe.micro_batch, MICRO_BATCH)
    plain = partial(OnnxLoss, manifest, folder / MODEL, micro_batch=micro_batch, criterion=criterion)
    if not probe.shares_passes or manifest.outer is None or not len(samples):
        return plain()
    few, weights = samples.batch(np.arange(min(len(samples), SAMPLES_TRIED))), initial_weights(folder)
    expected = tried_outputs(plain(), weights, few)  # before the other session takes its memory
    together = max(1, min(probe.together, SHARED_PASS // (manifest.outer.row_bytes * micro_batch)))
    graph = folder / OUTER_MODEL
    outer = OnnxOuter(manifest, graph, plain, together=together, micro_batch=micro_batch, criterion=criterion)
    if reason := disagreement(outer, weights, few, expected):
        raise ModelError(f"{graph} does not fit {MODEL}: {reason}; export the model again, or copy both files")
    return outer


def initial_weights(model: Path) -> F32:
    """The weights in a model's folder, with which a run of it begins."""
    return read_weights(model / WEIGHTS, read_manifest(model))


def give_memory_back() -> None:
    """Make large blocks of NumPy and Python go back to the system when they are freed. By default glibc raises its
    threshold over time and keeps larger and larger blocks. ONNX Runtime has its own arena, so forward passes are no
    slower."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(MMAP_THRESHOLD, LARGE)


def _require_fit(plan: Plan, number: int) -> None:
    if plan.estimator == "backprop":
        raise PlanError('estimator: a client on ONNX Runtime can only run inference; expected "probe"')
    if not plan.probe.micro_batch or not plan.ring.n_max:
        raise PlanError("the plan is not resolved; expected the plan.toml of a run or of an exported model")
    if not 0 <= number < plan.federation.clients:
        raise PlanError(f"expected a client's number from 0 to {plan.federation.clients - 1}, got {number}")


def _require_model(plan: Plan, manifest: Manifest, folder: Path) -> None:
    if isinstance(plan.task.model, Onnx):
        if manifest.model_sha256 != plan.task.model.graph:
            raise ModelError(f"the graph in {folder} is another than the plan's; copy the server's folder")
    elif manifest.architecture not in ("", plan.model_digest().hex()):
        raise ModelError(f"the model in {folder} was exported for another plan; export it from this plan")


def _samples(plan: Plan, manifest: Manifest, number: int, folder: Path | None, *, part: bool) -> Dataset:
    """This client's samples alone, so that those of the others are freed."""
    source = load(plan.task.data, folder, plan.task.pixels)
    if not manifest.takes(source.shape) or source.width != manifest.classes:
        raise ModelError(
            f"the model takes samples of {manifest.sample} and has {manifest.classes} outputs, but "
            f"{plan.task.data} has {source.shape} and needs {source.width}; export it from this plan"
        )
    if not part:
        return source.train
    return source.train.rows(share_out(plan, source)[number])
