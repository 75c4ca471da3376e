"""A plan's model on ONNX Runtime: one that came as ONNX, or one of BAFFLE's own."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from baffle.core.arrays import F32
from baffle.core.directions import Support
from baffle.core.head import Head
from baffle.core.outer import Shapes
from baffle.core.ports import Batch
from baffle.errors import ModelError, PlanError
from baffle.models.inputs import Inputs
from baffle.plan import Model, Onnx, Plan, ProbeSettings
from baffle.runtime.model import RunnableModel, Together, require_closed_form
from baffle.runtime.onnx.built_in import built_in
from baffle.runtime.onnx.loss import NumpyCriterion, OnnxLoss, criterion_of, require_loss
from baffle.runtime.onnx.model_folder import ExportedModel, Manifest, graph_loss, initial_weights, read_exported

ROUNDING = (b"QuantizeLinear", b"DynamicQuantize", b"QLinear", b"QGemm")
"""How the names of operators begin that round activations to integers. None is part of "DequantizeLinear"."""


def load(plan: Plan, inputs: Inputs) -> "OnnxModel":
    settings = plan.task.model
    if isinstance(settings, Onnx):
        return _in_folder(plan, settings, inputs)
    exact = plan.probe.head == "exact"
    graph = built_in(settings, inputs, plan.seed, graph_loss(plan.task.loss), head=exact)
    weights = graph.flat()
    manifest = graph.manifest(weights)
    return OnnxModel(settings, manifest, graph.model, lambda: weights, criterion_of(plan), plan.task.loss)


def _in_folder(plan: Plan, settings: Onnx, inputs: Inputs) -> "OnnxModel":
    """The model in the folder `run.model`. It must be the plan's graph and take the plan's samples."""
    if not plan.run.model:
        raise PlanError("run.model: expected the folder that `baffle export --onnx` made, got none")
    if plan.run.device != "cpu":
        raise PlanError(f'run.device: ONNX Runtime runs on "cpu" only, got {plan.run.device!r}')
    folder = Path(plan.run.model)
    exported = read_exported(folder)
    manifest = exported.manifest
    if settings.graph not in ("", manifest.model_sha256):
        raise ModelError(f"the graph in {folder} is not the plan's; set run.model to the right folder")
    require_loss(plan, manifest, folder)
    if not manifest.takes(inputs.shape) or manifest.classes != inputs.outputs:
        wanted = f"{inputs.classes} classes" if inputs.classes else f"{inputs.outputs} numbers to predict"
        raise ModelError(
            f"the model in {folder} takes samples of {manifest.sample} and has {manifest.classes} outputs, "
            f"but {plan.task.data} has samples of {inputs.shape} and {wanted}"
        )
    return model_in(folder, exported, criterion_of(plan), plan.task.loss)


def model_in(
    folder: Path, exported: ExportedModel, criterion: NumpyCriterion | None = None, loss: str = ""
) -> "OnnxModel":
    """The model in an exported folder, which was read."""
    manifest = exported.manifest
    settings, weights = Onnx(graph=manifest.model_sha256), partial(initial_weights, folder, manifest)
    return OnnxModel(settings, manifest, exported.graph, weights, criterion, loss)


@dataclass(frozen=True)
class OnnxModel(RunnableModel):
    """A graph, which runs whole forward passes. `read` reads the initial weights."""

    packages = ("onnxruntime",)

    settings: Model
    manifest: Manifest
    graph: bytes
    read: Callable[[], F32]
    criterion: NumpyCriterion | None = None
    loss: str = ""

    @property
    def rounds(self) -> bool:
        return any(operator in self.graph for operator in ROUNDING)

    def initial_weights(self) -> F32:
        return self.read()

    def layers(self) -> tuple[Support, ...]:
        return self.manifest.layers()

    def shapes(self) -> Shapes:
        return tuple(tensor.shape for tensor in self.manifest.weights if tensor.size)

    def runtime(self, probe: ProbeSettings, _precision: str) -> OnnxLoss:
        return OnnxLoss(self.manifest, self.graph, probe.micro_batch, self.criterion, self.loss)

    def head(self, loss: str, _batch: Batch) -> Head:
        require_closed_form(loss)
        return self.manifest.head_place()

    def together(self, probe: ProbeSettings, _batch: Batch, _room: int) -> Together:
        if probe.together > 1:
            raise PlanError(
                f"probe.together: ONNX Runtime takes a forward pass for each direction, got {probe.together} "
                'directions in one; set run.runtime = "torch", or start a new run with probe.together = 1'
            )
        return Together(1)
