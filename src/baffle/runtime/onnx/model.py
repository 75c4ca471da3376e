"""A plan's model on ONNX Runtime: one that came as ONNX, or one of BAFFLE's own."""

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from baffle.core.arrays import F32
from baffle.core.directions import Support
from baffle.core.outer import Shapes
from baffle.core.ports import Batch
from baffle.errors import ModelError, PlanError
from baffle.models.inputs import Inputs
from baffle.plan import Model, Onnx, Plan, ProbeSettings
from baffle.runtime.layers import layer_of, layers_of
from baffle.runtime.model import RunnableModel, Together
from baffle.runtime.onnx.criteria import NumpyCriterion, criterion_of, require_loss
from baffle.runtime.onnx.loss import OnnxLoss
from baffle.runtime.onnx.model_folder import (
    MODEL,
    OUTER_MODEL,
    WEIGHTS,
    Manifest,
    graph_loss,
    read_manifest,
    read_weights,
)
from baffle.runtime.onnx.outer import OnnxOuter, disagreement, tried_outputs
from baffle.runtime.outer import as_many_as_fit

if TYPE_CHECKING:
    from baffle.runtime.onnx.graph import OnnxGraph


def load(plan: Plan, inputs: Inputs) -> "OnnxModel":
    settings = plan.task.model
    if isinstance(settings, Onnx):
        return _in_folder(plan, settings, inputs)
    from baffle.runtime.onnx.built_in import built_in  # a client with an exported model has no `onnx` package

    graph = built_in(settings, inputs, plan.seed, graph_loss(plan.task.loss))
    model, weights = graph.to_bytes(), graph.flat()
    manifest = graph.manifest(model, weights)
    return OnnxModel(settings, manifest, model, lambda: weights, partial(_made_of, graph), criterion_of(plan))


def _made_of(graph: "OnnxGraph") -> "Outer":
    from baffle.runtime.onnx.outer_graph import outer_model

    return Outer(*outer_model(graph))


def _in_folder(plan: Plan, settings: Onnx, inputs: Inputs) -> "OnnxModel":
    """The model in the folder `run.model`. It must be the plan's graph and take the plan's samples."""
    if not plan.run.model:
        raise PlanError("run.model: expected the folder that `baffle export --onnx` made, got none")
    if plan.run.device != "cpu":
        raise PlanError(f'run.device: ONNX Runtime runs on "cpu" only, got {plan.run.device!r}')
    folder = Path(plan.run.model)
    manifest = read_manifest(folder)
    if settings.graph not in ("", manifest.model_sha256):
        raise ModelError(f"the graph in {folder} is not the plan's; set run.model to the right folder")
    require_loss(plan, manifest, folder)
    if not manifest.takes(inputs.shape) or manifest.classes != inputs.outputs:
        raise ModelError(
            f"the model in {folder} takes samples of {manifest.sample} and has {manifest.classes} outputs, "
            f"but {plan.task.data} has samples of {inputs.shape} and {_wanted(inputs)}"
        )
    return model_in(folder, manifest, criterion_of(plan))


def model_in(folder: Path, manifest: Manifest, criterion: NumpyCriterion | None = None) -> "OnnxModel":
    """The model in an exported folder, whose manifest was read."""
    settings, weights = Onnx(graph=manifest.model_sha256), partial(read_weights, folder / WEIGHTS, manifest)
    return OnnxModel(settings, manifest, folder / MODEL, weights, partial(_outer_in, folder, manifest), criterion)


def _outer_in(folder: Path, manifest: Manifest) -> "Outer":
    """The graph for many outer directions in a folder, or made of the graph in it."""
    if manifest.outer:
        return Outer(folder / OUTER_MODEL, manifest.outer.row_bytes)
    try:
        from baffle.runtime.onnx.graph import graph_from_folder
    except ImportError:
        raise ModelError(f"{folder} has no {OUTER_MODEL}; export the model again with --outer") from None
    return _made_of(graph_from_folder(folder))


def _wanted(inputs: Inputs) -> str:
    return f"{inputs.classes} classes" if inputs.classes else f"{inputs.outputs} numbers to predict"


class Outer(NamedTuple):
    """A graph for many outer directions, and about how many bytes its tensors take for each direction of a sample."""

    graph: Path | bytes
    row_bytes: int


class OnnxModel(RunnableModel):
    """A graph, in a file or in memory. It runs whole forward passes in the precision of the graph. `outer` gives the
    graph for many outer directions, or raises the reason why there is none."""

    packages = ("onnxruntime",)

    def __init__(
        self,
        settings: Model,
        manifest: Manifest,
        graph: Path | bytes,
        weights: Callable[[], F32],
        outer: Callable[[], Outer],
        criterion: NumpyCriterion | None = None,
    ) -> None:
        self.settings = settings
        self._criterion = criterion
        self._manifest, self._graph, self._weights = manifest, graph, weights
        self._outer = cache(outer)

    def initial_weights(self) -> F32:
        return self._weights()

    def layers(self) -> tuple[Support, ...]:
        return layers_of((tensor.layer or layer_of(tensor.name), tensor.size) for tensor in self._manifest.weights)

    def shapes(self) -> Shapes:
        return tuple(tensor.shape for tensor in self._manifest.weights if tensor.size)

    def runtime(self, probe: ProbeSettings, _precision: str) -> OnnxLoss | OnnxOuter:
        return self._for_many(probe) if probe.shares_passes else self._for_one(probe)

    def together(self, probe: ProbeSettings, batch: Batch, room: int) -> Together:
        try:
            each = self._outer().row_bytes * len(batch.y)
        except ModelError as fault:
            return Together(1, str(fault))
        weights = self.initial_weights()
        expected = tried_outputs(self._for_one(probe), weights, batch)
        if reason := disagreement(self._for_many(probe), weights, batch, expected):
            return Together(1, reason)
        return as_many_as_fit(probe.k, each, len(batch.y), room)

    def _for_one(self, probe: ProbeSettings) -> OnnxLoss:
        return OnnxLoss(self._manifest, self._graph, micro_batch=probe.micro_batch, criterion=self._criterion)

    def _for_many(self, probe: ProbeSettings) -> OnnxOuter:
        return OnnxOuter(
            self._manifest,
            self._outer().graph,
            partial(self._for_one, probe),
            together=probe.together,
            micro_batch=probe.micro_batch,
            criterion=self._criterion,
        )
