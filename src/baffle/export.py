"""Exports models for devices without PyTorch: from a plan, a run or another tool's ONNX file."""

import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from uuid import uuid4

import numpy as np

from baffle.core.arrays import F32
from baffle.core.ports import Batch
from baffle.core.samples import Shape
from baffle.data.sources import data_folder, load as load_data
from baffle.errors import ModelError
from baffle.files import replace
from baffle.journal.folder import RunFolder
from baffle.journal.replay import catch_up, lineage_of
from baffle.journal.store import Journal
from baffle.plan import Onnx, Plan, load
from baffle.plan.arithmetic import vouch_for
from baffle.plan.functions import require_own_code
from baffle.runtime.onnx import model_folder
from baffle.runtime.onnx.built_in import built_in
from baffle.runtime.onnx.graph import OnnxGraph
from baffle.runtime.onnx.loss import OnnxLoss
from baffle.runtime.onnx.model_folder import CROSS_ENTROPY, MODEL, WEIGHTS, GraphLoss, Manifest
from baffle.runtime.onnx.tensor_file import Stored, read_stored, write_tensors
from baffle.task.load import inputs_of, load_task


def export_plan(source: str, out: Path, settings: Iterable[str] = (), *, data: Path | None = None) -> Manifest:
    """Export the model of a plan with its initial weights, and the resolved plan."""
    _require_free(out)
    plan = load_task(load(source, settings), data).plan
    graph = _graph(plan, data)
    return write_export(out, graph, graph.flat(), plan)


def export_run(run: Path, out: Path, *, data: Path | None = None, own_code: bool = False) -> Manifest:
    """Export the model of a run with its present weights, and their average if the run keeps one. Functions that the
    run's plan names are called only with `own_code`."""
    _require_free(out)
    folder = RunFolder.existing(run)
    with Journal.open(folder.journal) as journal, journal.one_view():
        plan = load(str(folder.plan))
        require_own_code(plan, run, own_code=own_code)
        vouch_for(plan)
        if unsettled := plan.task.model.unsettled():
            raise ModelError(
                f"the run in {run} is of version 0.1, whose plans had no task.model.{unsettled[0]}: this version would "
                "build another model for it; run the plan again"
            )
        present = catch_up(journal, lineage_of(journal, plan))
    average = present.state.average[0] if present.state.average else None
    return write_export(out, _graph(plan, data), present.state.weights, plan, rounds=present.round, average=average)


def export_plain(run: Path, out: Path, *, data: Path | None = None, own_code: bool = False) -> None:
    """Write the trained model of a run as one ONNX file that any runtime takes: from samples, `x` or `x/NAME` each, to
    `logits`. Its weights are those that the run hands back: averaged if the run keeps an average."""
    if out.exists():
        raise ModelError(f"{out} exists; give another --out")
    try:
        from baffle.runtime.onnx.foreign import graph_with_weights
    except ModuleNotFoundError as fault:
        raise ModelError("a plain ONNX file needs the package onnx: pip install 'baffle[onnx]'") from fault
    folder = RunFolder.existing(run)
    last = folder.summary.is_file() and folder.read_summary().get("returned") == "last"
    with TemporaryDirectory() as scratch:
        exported = Path(scratch) / "model"
        export_run(run, exported, data=data, own_code=own_code)
        with Journal.open(folder.journal) as journal:
            lineage = lineage_of(journal, load(str(folder.plan)))
            state = catch_up(journal, lineage).state
        model = graph_with_weights(exported, state.weights if last else lineage.trajectory.rule.smooth_weights(state))
    try:
        replace(out, model.SerializeToString(deterministic=True))
    except OSError as fault:
        raise ModelError(f"{out} cannot be written: {fault.strerror or fault}; give another --out") from None


def export_onnx(
    model: Path,
    out: Path,
    freeze: Sequence[str] = (),
    shape: Shape = (),
    loss: GraphLoss = CROSS_ENTROPY,
    *,
    head: bool = False,
    output: str = "",
    train: Sequence[str] = ("all",),
) -> Manifest:
    """Export the model in an ONNX file. If the file leaves sizes of its samples open, `shape` is that of one sample.
    With `head`, plans may ask for the exact gradient of its last linear layer. `output` chooses one of several, `train`
    what of the model is trained."""
    _require_free(out)
    from baffle.runtime.onnx.foreign import graph_from_file  # needs the `onnx` package, which other exports do not

    graph = graph_from_file(model, freeze, shape, loss, head=head, output=output, train=train)
    return write_export(out, graph, graph.flat())


def export_beside(model: Path, folder: Path, out: Path, output: str = "") -> Manifest:
    """Export the model in an ONNX file for a client of runs whose model is another, in an exported folder: with the
    same trained weights, and other frozen parts."""
    _require_free(out)
    from baffle.runtime.onnx.foreign import graph_beside

    graph = graph_beside(model, folder, output)
    return write_export(out, graph, graph.flat())


def _graph(plan: Plan, data: Path | None) -> OnnxGraph:
    if isinstance(plan.task.model, Onnx):
        return graph_from_folder(Path(plan.run.model))
    folder = data_folder(data)
    source = load_data(plan.task.data, folder, plan.task.pixels)
    inputs = inputs_of(plan, source, folder)
    loss, head = model_folder.graph_loss(plan.task.loss), plan.probe.head == "exact"
    if plan.task.draws_weights:
        return built_in(plan.task.model, inputs, plan.seed, loss, head=head)
    from baffle.runtime.onnx.from_module import graph_of
    from baffle.runtime.torch.model import initial_module

    shape = inputs.one_shape()
    kind = source.example(1).x.dtype
    return graph_of(initial_module(plan, inputs), shape, kind, loss, source.label_shape, head=head)


def graph_from_folder(folder: Path) -> OnnxGraph:
    """The graph in an exported folder, unchanged."""
    manifest, graph, _ = model_folder.read_exported(folder)
    trained = {name for tensor in manifest.weights for name in (tensor.name, *tensor.also)}
    stored = read_stored(folder / WEIGHTS)
    return OnnxGraph(
        graph,
        manifest.opset,
        manifest.split(model_folder.read_weights(folder / WEIGHTS, manifest)),
        manifest.arrays,
        manifest.classes,
        frozen={name: tensor for name, tensor in stored.items() if name not in trained},
        tied={tensor.name: tensor.also for tensor in manifest.weights if tensor.also},
        layers={tensor.name: tensor.layer for tensor in manifest.weights if tensor.layer},
        loss=manifest.loss,
        label_shape=manifest.label_shape,
        head=manifest.head,
    )


def write_export(
    out: Path, graph: OnnxGraph, weights: F32, plan: Plan | None = None, rounds: int = 0, average: F32 | None = None
) -> Manifest:
    """Write a graph, its weights, their average if any, and a manifest into a new folder, and try the graph."""
    manifest = graph.manifest(weights, rounds, plan)
    with _all_or_nothing(out) as folder:
        (folder / MODEL).write_bytes(graph.model)
        write_tensors(folder / WEIGHTS, _state(graph, manifest, weights))
        if average is not None:
            write_tensors(folder / model_folder.AVERAGE, _state(graph, manifest, average))
        if plan:
            (folder / model_folder.PLAN).write_text(plan.to_toml())
        model_folder.write_manifest(folder, manifest)
        _try_out(folder, manifest, weights)
    return manifest


def _state(graph: OnnxGraph, manifest: Manifest, weights: F32) -> dict[str, Stored]:
    """The model's state dict with these trained weights, under all of their names."""
    trained = {name: Stored("F32", values) for name, values in manifest.split(weights).items()}
    tied = {other: trained[tensor.name] for tensor in manifest.weights for other in tensor.also}
    return trained | tied | dict(graph.frozen)


@contextmanager
def _all_or_nothing(out: Path) -> Iterator[Path]:
    """A new folder to write an export into. On success it becomes `out`; after any failure nothing is left. The new
    folder is created beside `out` and renamed at the end. An existing `out` may be a mount or the working directory,
    and has an owner and permissions, so it is not replaced: the new folder is created inside it, and its files are
    moved up. The manifest is moved last, because no reader accepts a folder without it."""
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
        for file in sorted(building.iterdir(), key=lambda file: file.name == model_folder.MANIFEST):
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
    """Run the graph on one sample and on three, so that an export that cannot run fails here, not on a device. All
    numbers, and so all token ids, are 1."""
    runtime = OnnxLoss.in_folder(folder)
    for count in (1, 3):
        made = tuple(np.ones((count, *wanted.shape), wanted.dtype) for wanted in manifest.arrays)
        labels = np.zeros((count, *manifest.label_shape), np.int64)
        batch = Batch(made if len(made) > 1 else made[0], labels)
        runtime.outputs(weights, batch)
        if manifest.loss != model_folder.NO_LOSS:
            runtime.on(batch)(weights)
