"""A plan's model on ONNX Runtime: one that came as ONNX, or one of BAFFLE's own."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from baffle.core.arrays import F32
from baffle.core.directions import Support
from baffle.errors import ModelError, PlanError
from baffle.models.inputs import Inputs
from baffle.plan import Model, Onnx, Plan, ProbeSettings
from baffle.runtime.layers import layer_of, layers_of
from baffle.runtime.model import RunnableModel
from baffle.runtime.onnx.criteria import NumpyCriterion, criterion_of, require_loss
from baffle.runtime.onnx.loss import OnnxLoss
from baffle.runtime.onnx.model_folder import MODEL, WEIGHTS, Manifest, graph_loss, read_manifest, read_weights


def load(plan: Plan, inputs: Inputs) -> "OnnxModel":
    settings = plan.task.model
    if isinstance(settings, Onnx):
        return _in_folder(plan, settings, inputs)
    from baffle.runtime.onnx.built_in import built_in  # a client with an exported model has no `onnx` package

    graph = built_in(settings, inputs, plan.seed, graph_loss(plan.task.loss))
    model, weights = graph.to_bytes(), graph.flat()
    return OnnxModel(settings, graph.manifest(model, weights), model, lambda: weights, criterion_of(plan))


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
    weights = partial(read_weights, folder / WEIGHTS, manifest)
    return OnnxModel(Onnx(graph=manifest.model_sha256), manifest, folder / MODEL, weights, criterion_of(plan))


def _wanted(inputs: Inputs) -> str:
    return f"{inputs.classes} classes" if inputs.classes else f"{inputs.outputs} numbers to predict"


class OnnxModel(RunnableModel):
    """A graph, in a file or in memory. It runs whole forward passes in the precision of the graph."""

    packages = ("onnxruntime",)

    def __init__(
        self,
        settings: Model,
        manifest: Manifest,
        graph: Path | bytes,
        weights: Callable[[], F32],
        criterion: NumpyCriterion | None = None,
    ) -> None:
        self.settings = settings
        self._criterion = criterion
        self._manifest, self._graph, self._weights = manifest, graph, weights

    def initial_weights(self) -> F32:
        return self._weights()

    def layers(self) -> tuple[Support, ...]:
        return layers_of((tensor.layer or layer_of(tensor.name), tensor.size) for tensor in self._manifest.weights)

    def runtime(self, probe: ProbeSettings, _precision: str) -> OnnxLoss:
        return OnnxLoss(self._manifest, self._graph, micro_batch=probe.micro_batch, criterion=self._criterion)
