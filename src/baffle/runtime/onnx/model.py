"""A plan's model that is an ONNX graph, on ONNX Runtime."""

from pathlib import Path

from baffle.core.arrays import F32
from baffle.errors import ModelError, PlanError
from baffle.models.inputs import Inputs
from baffle.plan import Onnx, Plan, ProbeSettings
from baffle.runtime.model import RunnableModel
from baffle.runtime.onnx.loss import OnnxLoss
from baffle.runtime.onnx.model_folder import WEIGHTS, read_manifest, read_weights


def load(plan: Plan, inputs: Inputs) -> "OnnxModel":
    """The model in the folder `run.model`. It must be the plan's graph and take the plan's samples."""
    settings = plan.task.model
    assert isinstance(settings, Onnx)
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
    return OnnxModel(folder, Onnx(graph=manifest.model_sha256))


class OnnxModel(RunnableModel):
    """An exported model. It runs whole forward passes in the precision of its graph."""

    packages = ("onnxruntime",)

    def __init__(self, folder: Path, settings: Onnx) -> None:
        self.settings = settings
        self._folder = folder

    def initial_weights(self) -> F32:
        return read_weights(self._folder / WEIGHTS, read_manifest(self._folder))

    def runtime(self, probe: ProbeSettings, _precision: str) -> OnnxLoss:
        return OnnxLoss(self._folder, micro_batch=probe.micro_batch)
