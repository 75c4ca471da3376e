"""A worker for devices without PyTorch: it runs an exported model on the client's own data."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np

from baffle.client.worker import Worker
from baffle.core.arrays import F32
from baffle.core.directions import merge
from baffle.core.freed_memory import give_back_freed_memory
from baffle.core.ports import Runtime
from baffle.data.partition import share_out
from baffle.data.sources import Dataset, load
from baffle.errors import ModelError, PlanError
from baffle.plan import Onnx, Plan
from baffle.runtime.model import require_own_layout, require_own_shapes
from baffle.runtime.onnx.loss import OnnxLoss, criterion_of, require_loss
from baffle.runtime.onnx.model_folder import MODEL, WEIGHTS, Manifest, read_manifest, read_weights
from baffle.trajectory import trajectory_of

# All three save memory and hardly cost time. ONNX Runtime has its own arena, so passes are no slower.
MICRO_BATCH = 4  # at most this many samples go through the graph at once, even if the plan says more
NUMBERS_AT_ONCE = 1 << 15  # how many numbers of directions are drawn at a time: a quarter of the usual
LARGE_BLOCK = 1 << 17  # freed blocks of this many bytes go back to the system


def edge_worker(
    plan: Plan, model: Path, number: int, k: int, data: Path | None = None, *, part: bool = False
) -> Worker:
    """A worker for client `number` of a resolved plan, with the model in a folder that `baffle export` wrote and the
    first `k` directions of a round. Its samples are all in the data folder or, with `part`, its share of them."""
    if plan.estimator == "backprop":
        raise PlanError('estimator: a client on ONNX Runtime can only run inference; expected "probe"')
    if not plan.probe.micro_batch or not plan.ring.n_max:
        raise PlanError("the plan is not resolved; expected the plan.toml of a run or of an exported model")
    if not 0 <= number < plan.federation.clients:
        raise PlanError(f"expected a client's number from 0 to {plan.federation.clients - 1}, got {number}")
    give_back_freed_memory(LARGE_BLOCK)
    manifest = read_manifest(model)
    _require_model(plan, manifest, model)
    require_loss(plan, manifest, model)
    require_own_shapes(plan.probe, tuple(tensor.shape for tensor in manifest.weights if tensor.size))
    require_own_layout(plan.probe, merge(manifest.layers(), plan.probe.k), manifest.n_weights)
    samples = _samples(plan, manifest, number, data, part=part)
    micro_batch = min(plan.probe.micro_batch, MICRO_BATCH)
    runtime = OnnxLoss(manifest, model / MODEL, micro_batch=micro_batch, criterion=criterion_of(plan))
    # Each thread would need memory. The number of threads changes no bit of a run.
    one_thread = msgspec.structs.replace(plan, run=msgspec.structs.replace(plan.run, workers=1))
    trajectory = trajectory_of(one_thread, manifest.n_weights, NUMBERS_AT_ONCE)

    @contextmanager
    def borrow() -> Iterator[Runtime]:
        yield runtime

    return Worker(number, k, trajectory, samples, np.arange(len(samples)), borrow)


def initial_weights(model: Path) -> F32:
    """The weights in a model's folder, with which a run of it begins."""
    return read_weights(model / WEIGHTS, read_manifest(model))


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
    return source.train.rows(share_out(plan, source)[number]) if part else source.train
