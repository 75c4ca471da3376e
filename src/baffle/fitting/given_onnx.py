"""An ONNX file, or a folder that `baffle export` made, as the model of a fit. It needs no PyTorch."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from msgspec.structs import replace as changed

from baffle.core.arrays import F32
from baffle.core.ports import Batch
from baffle.core.samples import Array, Samples, count, shape_of
from baffle.errors import ModelError, PlanError
from baffle.export import export_onnx
from baffle.fitting.given_model import Function, name_of
from baffle.plan import Onnx, Plan
from baffle.runtime.model import RunnableModel
from baffle.runtime.onnx.foreign import file_with_weights, graph_with_weights, numbers_of, require_file
from baffle.runtime.onnx.loss import OnnxLoss, own_criterion
from baffle.runtime.onnx.model import model_in
from baffle.runtime.onnx.model_folder import (
    CROSS_ENTROPY,
    NO_LOSS,
    graph_loss,
    initial_weights,
    read_exported,
    read_manifest,
)

if TYPE_CHECKING:
    from onnx import ModelProto


@dataclass(frozen=True)
class GivenOnnx:
    """A graph in an exported folder, which includes the loss unless that is a function of your own. `file` is the ONNX
    file that it was made from, if one was given."""

    folder: Path
    loss: str | Function
    file: Path | None = None

    @classmethod
    def of(
        cls,
        path: Path,
        train: str | Sequence[str],
        loss: str | Function,
        folder: Path,
        few: Batch,
        *,
        head: bool = False,
    ) -> "GivenOnnx":
        """The model in an exported folder, or in an ONNX file, which is exported into a new folder. With `head`, it
        shows its last linear layer."""
        if path.is_dir():
            if train != "all":
                raise PlanError('train: an exported model says itself what is trained; expected "all"')
            return cls(path, loss)
        shape, holds = shape_of(few.x), NO_LOSS if callable(loss) else graph_loss(loss)
        export_onnx(path, folder, (), shape, holds, head=head, train=[train] if isinstance(train, str) else train)
        return cls(folder, loss, path)

    @classmethod
    def again(cls, path: Path, loss: str | Function, plan: Plan) -> "GivenOnnx":
        """The model of a run that is resumed: its file, or its folder."""
        if path.is_dir():
            return cls(path, loss)
        require_file(path, read_manifest(Path(plan.run.model)))
        return cls(Path(plan.run.model), loss, path)

    unsettled: ClassVar = Onnx()

    def on(self, _plan: Plan) -> RunnableModel:
        criterion = own_criterion(name_of(self.loss), self.loss) if callable(self.loss) else None
        return model_in(self.folder, read_exported(self.folder), criterion, "" if callable(self.loss) else self.loss)

    def outputs(self, x: Samples, weights: F32 | None = None) -> Array:
        runtime = OnnxLoss.in_folder(self.folder)
        manifest = runtime.manifest
        kind = np.int64 if manifest.loss == CROSS_ENTROPY else np.float32
        unknown = np.zeros((count(x), *manifest.label_shape), kind)
        own = initial_weights(self.folder, manifest) if weights is None else weights
        return runtime.outputs(own, Batch(x, unknown))

    def forget(self) -> None:
        if self.file:
            shutil.rmtree(self.folder, ignore_errors=True)

    def with_weights(self, weights: F32, *, int8: bool = False) -> "ModelProto":
        """The given file with these weights, or the graph in the folder. With `int8`, a last layer of integers in the
        file is one again."""
        if self.file:
            return file_with_weights(self.file, read_manifest(self.folder), weights, int8=int8)
        return graph_with_weights(self.folder, weights)

    @property
    def rounds(self) -> bool:
        """Whether its activations are rounded to integers."""
        return model_in(self.folder, read_exported(self.folder)).rounds

    def trained_numbers(self) -> tuple[int, int, Sequence[str]]:
        """How many numbers are trained, of how many, and their names."""
        exported = read_exported(self.folder)
        n, (others, zeros) = exported.manifest.n_weights, numbers_of(exported.graph)
        return n - zeros, n + others, [tensor.name for tensor in exported.manifest.weights]

    def settled(self, plan: Plan, _few: Batch) -> Plan:
        task = changed(plan.task, model=Onnx(graph=read_manifest(self.folder).model_sha256))
        return changed(plan, task=task, run=changed(plan.run, model=str(self.folder)))

    def require_known(self, plan: Plan, _few: Batch) -> None:
        model = plan.task.model
        if not isinstance(model, Onnx) or model.graph != read_manifest(self.folder).model_sha256:
            raise ModelError(
                "model: this is not the run's model, but another graph; give the one that the run began with"
            )
