"""A worker for devices without PyTorch: it runs an exported model on the client's own data."""

from collections.abc import Callable, Collection
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from baffle.client.worker import Worker
from baffle.core.arrays import F32
from baffle.core.freed_memory import give_back_freed_memory
from baffle.data.partition import share_out
from baffle.data.sources import Source, load, weights_for
from baffle.errors import ModelError, PlanError
from baffle.models.inputs import Inputs
from baffle.network.member.equipment import Equipment, require_most_weights
from baffle.plan import Onnx, Plan
from baffle.plan.sections import LARGEST
from baffle.runtime.model import (
    layer_supports,
    require_own_head,
    require_own_layers,
    require_own_layout,
    require_own_shapes,
)
from baffle.runtime.onnx.built_in import built_in
from baffle.runtime.onnx.loss import OnnxLoss, criterion_of, require_loss
from baffle.runtime.onnx.model_folder import (
    WEIGHTS,
    ExportedModel,
    Manifest,
    graph_loss,
    initial_weights,
    read_exported,
    read_weights,
)
from baffle.trajectory import trajectory_of

# All three save memory and hardly cost time. ONNX Runtime has its own arena, so passes are no slower.
MICRO_BATCH = 4  # at most this many samples go through the graph at once, even if the plan says more
NUMBERS_AT_ONCE = 1 << 15  # how many numbers of directions are drawn at a time: a quarter of the usual
LARGE_BLOCK = 1 << 17  # freed blocks of this many bytes go back to the system


def edge_equipment(
    plan: Plan,
    model: Path,
    number: int,
    data: Path | None = None,
    most_weights: int = LARGEST,
    *,
    part: bool = False,
    approved: Collection[str] = (),
) -> Equipment:
    """What client `number` of a resolved plan computes with: the model in a folder that `baffle export` wrote, and all
    samples in the data folder or, with `part`, its share of them. A model that is not BAFFLE's own must be `approved`,
    by the SHA-256 of its manifest."""
    if plan.estimator != "probe":
        raise PlanError('estimator: a client on ONNX Runtime can only run inference; expected "probe"')
    if not plan.probe.micro_batch or not plan.ring.n_max:
        raise PlanError("the plan is not resolved; expected the plan.toml of a run or of an exported model")
    if not 0 <= number < plan.federation.clients:
        raise PlanError(f"expected a client's number from 0 to {plan.federation.clients - 1}, got {number}")
    give_back_freed_memory(LARGE_BLOCK)
    source = load(plan.task.data, data, plan.task.pixels)
    exported = read_exported(model)
    require_most_weights(max(weights_for(plan.task, source), exported.manifest.n_weights), most_weights)
    manifest, graph, initial = _approved(plan, model, exported, source, approved)
    require_own_shapes(plan.probe, tuple(tensor.shape for tensor in manifest.weights if tensor.size))
    if plan.update.layers:
        require_own_layers(plan.update, manifest.layers())
    require_own_layout(plan.probe, layer_supports(manifest.layers(), plan.probe), manifest.n_weights)
    samples = source.train.rows(share_out(plan, source)[number]) if part else source.train
    micro_batch = min(plan.probe.micro_batch, MICRO_BATCH)
    if plan.probe.head == "exact":
        require_own_head(plan.probe, manifest.head_place())
    runtime = OnnxLoss(manifest, graph, micro_batch, criterion_of(plan), plan.task.loss)
    # Each thread would need memory. The number of threads changes no bit of a run.
    one_thread = msgspec.structs.replace(plan, run=msgspec.structs.replace(plan.run, workers=1))
    trajectory = trajectory_of(one_thread, manifest.n_weights, NUMBERS_AT_ONCE)
    worker = Worker(number, plan.probe.k, trajectory, samples, np.arange(len(samples)), lambda: nullcontext(runtime))
    return Equipment(worker, initial)


class Approved(NamedTuple):
    """A graph that this client may run, with its manifest, and the weights that it begins with."""

    manifest: Manifest
    graph: bytes
    initial: Callable[[], F32]


def _approved(plan: Plan, folder: Path, exported: ExportedModel, source: Source, approved: Collection[str]) -> Approved:
    """The plan's model. The author of a folder may put any graph into it: a loss that is a pixel, for some clients or
    some samples only. So a client makes the graph of a model that a plan describes by itself, and takes from the folder
    no more than weights that do not follow from the plan. Any other graph needs its owner's approval."""
    _require_model(plan, exported.manifest, folder)
    if plan.task.model.has_graph:
        inputs = Inputs(source.shape, source.classes, width=source.width, label_shape=source.label_shape)
        exact = plan.probe.head == "exact"
        make = partial(built_in, plan.task.model, inputs, plan.seed, graph_loss(plan.task.loss), head=exact)
        own = make()
        manifest = own.manifest(own.flat())
        stored = partial(read_weights, folder / WEIGHTS, manifest)
        return Approved(manifest, own.model, (lambda: make().flat()) if plan.task.draws_weights else stored)
    if exported.sha256 not in approved:
        raise ModelError(
            f"the model in {folder} is none of BAFFLE's own, and this client's owner has not approved it: ask "
            f"somebody you trust, who has read it, for its hash, and give that as --model-hash; here: {exported.sha256}"
        )
    require_loss(plan, exported.manifest, folder)
    _require_samples(plan, exported.manifest, source)
    return Approved(exported.manifest, exported.graph, partial(initial_weights, folder, exported.manifest))


def _require_model(plan: Plan, manifest: Manifest, folder: Path) -> None:
    if isinstance(plan.task.model, Onnx):
        if plan.task.model.graph not in (manifest.model_sha256, manifest.instead_of):
            raise ModelError(f"the graph in {folder} is another than the plan's; copy the server's folder")
    elif manifest.architecture != plan.model_digest().hex():
        raise ModelError(f"the model in {folder} was exported for another plan; export it from this plan")


def _require_samples(plan: Plan, manifest: Manifest, source: Source) -> None:
    if not manifest.takes(source.shape) or source.width != manifest.classes:
        raise ModelError(
            f"the model takes samples of {manifest.sample} and has {manifest.classes} outputs, but "
            f"{plan.task.data} has {source.shape} and needs {source.width}; export it from this plan"
        )
