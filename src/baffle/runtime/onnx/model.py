"""A plan's model on ONNX Runtime: one that came as ONNX, or one of BAFFLE's own."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from baffle.core.arrays import F32
from baffle.errors import ModelError, PlanError
from baffle.models.inputs import Inputs
from baffle.plan import Model, Onnx, Plan, ProbeSettings
from baffle.runtime.model import RunnableModel
from baffle.runtime.onnx.loss import OnnxLoss
from baffle.runtime.onnx.model_folder import MODEL, WEIGHTS, Manifest, read_manifest, read_weights


def load(plan: Plan, inputs: Inputs) -> "OnnxModel":
    settings = plan.task.model
    if isinstance(settings, Onnx):
        return _in_folder(plan, settings, inputs)
    from baffle.runtime.onnx.built_in import built_in  # a client with an exported model has no `onnx` package

    graph = built_in(settings, inputs, plan.seed)
    model, weights = graph.to_bytes(), graph.flat()
    return OnnxModel(settings, graph.manifest(model, weights), model, lambda: weights)


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
    if (manifest.input_shape, manifest.classes) != (inputs.shape, inputs.classes):
        raise ModelError(
            f"the model in {folder} takes samples of shape {manifest.input_shape} and {manifest.classes} classes, but "
            f"{plan.task.data} has {inputs.shape} and {inputs.classes}"
        )
    weights = partial(read_weights, folder / WEIGHTS, manifest)
    return OnnxModel(Onnx(graph=manifest.model_sha256), manifest, folder / MODEL, weights)


class OnnxModel(RunnableModel):
    """A graph, in a file or in memory. It runs whole forward passes in the precision of the graph."""

    packages = ("onnxruntime",)

    def __init__(self, settings: Model, manifest: Manifest, graph: Path | bytes, weights: Callable[[], F32]) -> None:
        self.settings = settings
        self._manifest, self._graph, self._weights = manifest, graph, weights

    def initial_weights(self) -> F32:
        return self._weights()

    def runtime(self, probe: ProbeSettings, _precision: str) -> OnnxLoss:
        return OnnxLoss(self._manifest, self._graph, micro_batch=probe.micro_batch)
