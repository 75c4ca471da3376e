"""Exports models for devices without PyTorch: from a plan, a run, a PyTorch module or another tool's ONNX file."""

import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from uuid import uuid4

import numpy as np
from msgspec.structs import replace

from baffle.core.arrays import F32
from baffle.core.ports import Batch
from baffle.core.samples import Shape
from baffle.data.sources import data_folder
from baffle.data.sources import load as load_data
from baffle.errors import ModelError
from baffle.journal.folder import RunFolder
from baffle.journal.replay import catch_up, lineage_of
from baffle.journal.store import Journal
from baffle.plan import Onnx, Plan, load
from baffle.runtime.onnx.built_in import built_in
from baffle.runtime.onnx.foreign import graph_from_file
from baffle.runtime.onnx.graph import OnnxGraph, graph_from_folder
from baffle.runtime.onnx.loss import OnnxLoss
from baffle.runtime.onnx.model_folder import (
    AVERAGE,
    CROSS_ENTROPY,
    MANIFEST,
    MODEL,
    NO_LOSS,
    OUTER_MODEL,
    PLAN,
    WEIGHTS,
    GraphLoss,
    InputType,
    Manifest,
    graph_loss,
    write_manifest,
)
from baffle.runtime.onnx.outer import SAMPLES_TRIED, TRIED, OnnxOuter, disagreement, tried_outputs
from baffle.runtime.onnx.outer_graph import OuterModel, outer_model
from baffle.runtime.onnx.probing import made_up
from baffle.runtime.onnx.tensor_file import Stored, write_tensors
from baffle.task.load import inputs_of, load_task

if TYPE_CHECKING:
    from torch import nn


class Progress(NamedTuple):
    """The state of a run: its rounds so far, its weights, and their average if the run keeps one."""

    rounds: int
    weights: F32
    average: F32 | None


def export_plan(
    source: str, out: Path, settings: Iterable[str] = (), *, data: Path | None = None, outer: bool = False
) -> Manifest:
    """Export the model of a plan with its initial weights, together with the resolved plan. With `outer` there is also
    a graph for many outer directions; if the plan's directions share passes, it is written wherever possible."""
    _require_free(out)
    plan = load_task(load(source, settings), data).plan
    graph = _graph(plan, data)
    return _write(out, graph, Progress(0, graph.flat(), None), plan, outer=outer)


def export_run(run: Path, out: Path, *, data: Path | None = None, outer: bool = False) -> Manifest:
    """Export the model of a run with its present weights, and their average if the run keeps one."""
    _require_free(out)
    folder = RunFolder.existing(run)
    with Journal.open(folder.journal) as journal, journal.one_view():
        plan = load(str(folder.plan))
        _require_settled(plan, run)
        present = catch_up(journal, lineage_of(journal, plan))
    average = present.state.average[0] if present.state.average else None
    progress = Progress(present.round, present.state.weights, average)
    return _write(out, _graph(plan, data), progress, plan, outer=outer)


def export_module(
    module: "nn.Module",
    shape: tuple[int, ...],
    out: Path,
    *,
    input_dtype: InputType = "float32",
    loss: GraphLoss = CROSS_ENTROPY,
    outer: bool = False,
) -> Manifest:
    """Export any module with its present weights, for samples of this shape and type."""
    from baffle.runtime.onnx.from_module import graph_of

    _require_free(out)
    graph = graph_of(module, shape, np.dtype(input_dtype), loss)
    return _write(out, graph, Progress(0, graph.flat(), None), None, outer=outer)


def export_onnx(
    model: Path,
    out: Path,
    freeze: Sequence[str] = (),
    shape: Shape = (),
    loss: GraphLoss = CROSS_ENTROPY,
    *,
    outer: bool = False,
) -> Manifest:
    """Export the model in an ONNX file, with the weights in that file and this loss. If the file leaves sizes of its
    samples open, `shape` is that of one sample."""
    _require_free(out)
    graph = graph_from_file(model, freeze, shape, loss)
    return _write(out, graph, Progress(0, graph.flat(), None), None, outer=outer)


def _require_settled(plan: Plan, run: Path) -> None:
    """Refuse a run whose model was another than this version would build from its plan."""
    if unsettled := plan.task.model.unsettled():
        raise ModelError(
            f"the run in {run} is of version 0.1, whose plans had no task.model.{unsettled[0]}: this version would "
            "build another model for it; run the plan again"
        )


def _graph(plan: Plan, data: Path | None) -> OnnxGraph:
    if isinstance(plan.task.model, Onnx):
        return graph_from_folder(Path(plan.run.model))
    folder = data_folder(data)
    source = load_data(plan.task.data, folder, plan.task.pixels)
    inputs = inputs_of(source, folder)
    loss = graph_loss(plan.task.loss)
    if plan.task.draws_weights:
        return built_in(plan.task.model, inputs, plan.seed, loss)
    from baffle.runtime.onnx.from_module import graph_of
    from baffle.runtime.torch.model import initial_module

    shape = inputs.one_shape()
    return graph_of(initial_module(plan, inputs), shape, source.example(1).x.dtype, loss, source.label_shape)


def _write(out: Path, graph: OnnxGraph, progress: Progress, plan: Plan | None, *, outer: bool = False) -> Manifest:
    model = graph.to_bytes()
    manifest = graph.manifest(model, progress.weights, progress.rounds, plan)
    shares = plan is not None and plan.probe.shares_passes
    many = _for_many(graph, manifest, progress.weights, required=outer) if outer or shares else None
    manifest = replace(manifest, outer=many and many.file())
    with _all_or_nothing(out) as folder:
        (folder / MODEL).write_bytes(model)
        if many:
            (folder / OUTER_MODEL).write_bytes(many.graph)
        write_tensors(folder / WEIGHTS, _state(graph, manifest, progress.weights))
        if progress.average is not None:
            write_tensors(folder / AVERAGE, _state(graph, manifest, progress.average))
        if plan:
            (folder / PLAN).write_text(plan.to_toml())
        write_manifest(folder, manifest)
        _try_out(folder, manifest, progress.weights)
    return manifest


def _for_many(graph: OnnxGraph, manifest: Manifest, weights: F32, *, required: bool) -> OuterModel | None:
    """The graph for many outer directions, tried out; None if there is none and none is required."""
    try:
        many = outer_model(graph)
        plain, batch = OnnxLoss(manifest, graph.to_bytes()), _example(manifest, SAMPLES_TRIED)
        runtime = OnnxOuter(manifest, many.graph, lambda: plain, together=TRIED)
        if reason := disagreement(runtime, weights, batch, tried_outputs(plain, weights, batch)):
            raise ModelError(reason)
    except ModelError as fault:
        if required:
            raise ModelError(f"--outer: directions of this model cannot share a pass: {fault}") from None
        return None
    return many


def _state(graph: OnnxGraph, manifest: Manifest, weights: F32) -> dict[str, Stored]:
    """The model's state dict with these trained weights, under all of their names."""
    trained = {name: Stored("F32", values) for name, values in manifest.split(weights).items()}
    tied = {other: trained[tensor.name] for tensor in manifest.weights for other in tensor.also}
    return trained | tied | dict(graph.frozen)


@contextmanager
def _all_or_nothing(out: Path) -> Iterator[Path]:
    """A new folder to write an export into. On success it becomes `out`; after any failure nothing is left.

    The new folder is created beside `out` and renamed at the end. An existing `out` may be a mount or the working
    directory, and has an owner and permissions, so it is not replaced: the new folder is created inside it, and its
    files are moved up. The manifest is moved last, because no reader accepts a folder without it.
    """
    existed = out.is_dir()
    parent = out if existed else out.parent
    missing = [folder for folder in (parent, *parent.parents) if not folder.exists()]
    building = parent / f".export-{uuid4().hex}"
    moved = list[Path]()
    try:
        building.mkdir(parents=True)
        yield building
        if not existed:
            building.rename(out)
            return
        for file in sorted(building.iterdir(), key=lambda file: file.name == MANIFEST):
            moved.append(out / file.name)
            file.rename(moved[-1])
        building.rmdir()
    except BaseException as fault:
        shutil.rmtree(building, ignore_errors=True)
        for file in moved:
            file.unlink(missing_ok=True)
        for folder in missing:
            with suppress(OSError):
                folder.rmdir()
        if isinstance(fault, OSError):
            raise ModelError(f"{out} cannot be written: {fault.strerror or fault}; give another --out") from None
        if isinstance(fault, ModelError):
            raise ModelError(str(fault).replace(str(building), str(out))) from None
        raise


def _require_free(out: Path) -> None:
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ModelError(f"{out} exists and is not an empty folder; give another --out")


def _try_out(folder: Path, manifest: Manifest, weights: F32) -> None:
    """Run the graph on one sample and on three, so that an export that cannot run fails here, not on a device."""
    runtime = OnnxLoss.in_folder(folder)
    for count in (1, 3):
        batch = _example(manifest, count)
        runtime.outputs(weights, batch)
        if manifest.loss != NO_LOSS:
            runtime.on(batch)(weights)


def _example(manifest: Manifest, count: int) -> Batch:
    made = tuple(made_up(wanted, count) for wanted in manifest.arrays)
    return Batch(made if len(made) > 1 else made[0], np.zeros((count, *manifest.label_shape), np.int64))
