"""The loss of a graph, computed by ONNX Runtime: no PyTorch is needed."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from baffle.core.arrays import F32, F64
from baffle.core.ports import Batch
from baffle.core.probe import InPlace, Loss, SampleLosses
from baffle.core.samples import Array, Labels, arrays, pieces
from baffle.errors import ModelError, PlanError
from baffle.runtime.model import ONLY_A_MEAN
from baffle.runtime.onnx.criteria import NumpyCriterion, sample_losses
from baffle.runtime.onnx.feeding import fitting_labels, fitting_samples
from baffle.runtime.onnx.model_folder import (
    LOGITS,
    LOSS,
    MODEL,
    NO_LOSS,
    WEIGHT,
    Manifest,
    Y,
    read_manifest,
)
from baffle.runtime.onnx.session import open_session, translated


class BoundMicroBatch(NamedTuple):
    """A micro-batch bound to the session. It keeps the arrays alive whose memory is bound. `labels` are as they came,
    `given` as the graph takes them."""

    binding: Any
    samples: tuple[Array, ...]
    labels: Labels
    given: Labels


class OnnxLoss:
    """The loss of a graph as a function of its weights.

    Weights, samples and the loss are bound to memory that this object owns, so a forward pass copies none of them.
    Samples are run in micro-batches; the graph averages their losses in float64. A criterion is applied to the graph's
    outputs instead. Use one object per thread.
    """

    def __init__(
        self,
        manifest: Manifest,
        model: Path | bytes,
        *,
        micro_batch: int = 0,
        criterion: NumpyCriterion | None = None,
    ) -> None:
        self.manifest = manifest
        self._criterion = criterion
        self.n_weights = manifest.n_weights
        self._micro_batch_size = micro_batch
        self._scratch: F32 = np.zeros(self.n_weights, np.float32)
        self._views = self.manifest.split(self._scratch)
        self._loss: F64 = np.zeros((), np.float64)
        self._session = open_session(model)

    @classmethod
    def in_folder(cls, folder: Path, *, micro_batch: int = 0, criterion: NumpyCriterion | None = None) -> "OnnxLoss":
        """The loss of the model in a folder that `baffle export` wrote."""
        return cls(read_manifest(folder), folder / MODEL, micro_batch=micro_batch, criterion=criterion)

    @property
    def scratch(self) -> F32:
        """The memory that the graph reads its weights from; write into it."""
        return self._scratch

    def on(self, batch: Batch) -> Loss:
        """The loss on one batch, to be called for many weights."""
        if self._criterion is None and self.manifest.loss == NO_LOSS:
            raise ModelError("the graph holds no loss; export it with one, or give task.loss as a function")
        micro_batches = self._micro_batches(batch, LOGITS if self._criterion else LOSS)
        return InPlace(self._scratch, partial(self.mean_loss, micro_batches))

    def samples_on(self, batch: Batch) -> SampleLosses:
        """Each sample's loss on one batch, to be called for many weights. The graph itself gives only their mean."""
        return InPlace(self._scratch, partial(self._sample_losses, self._micro_batches(batch, LOGITS)))

    def _sample_losses(self, micro_batches: Sequence[BoundMicroBatch]) -> F64:
        losses = list[F64]()
        for micro_batch in micro_batches:
            self._run(micro_batch)
            (outputs,) = micro_batch.binding.copy_outputs_to_cpu()
            criterion = self._criterion or partial(sample_losses, self.manifest.loss)
            losses.append(criterion(outputs, micro_batch.labels))
        if not all(part.ndim for part in losses):
            raise PlanError(ONLY_A_MEAN)
        return np.concatenate(losses)

    def mean_loss(self, micro_batches: Sequence[BoundMicroBatch]) -> float:
        """The loss at the weights in `scratch`."""
        total = 0.0
        for micro_batch in micro_batches:
            self._run(micro_batch)
            loss = float(self._loss)
            if self._criterion:
                (outputs,) = micro_batch.binding.copy_outputs_to_cpu()
                loss = float(np.mean(self._criterion(outputs, micro_batch.labels)))
            total += loss * len(micro_batch.labels)
        return total / sum(len(micro_batch.labels) for micro_batch in micro_batches)

    def outputs(self, weights: F32, batch: Batch) -> F32:
        """The model's logits, one row per sample."""
        self._scratch[:] = weights
        rows = list[F32]()
        for micro_batch in self._micro_batches(batch, LOGITS):
            self._run(micro_batch)
            rows += micro_batch.binding.copy_outputs_to_cpu()
        return np.concatenate(rows)

    def _run(self, micro_batch: BoundMicroBatch) -> None:
        with translated("a forward pass"):
            self._session.run_with_iobinding(micro_batch.binding)

    def _micro_batches(self, batch: Batch, output: str) -> list[BoundMicroBatch]:
        whole = Batch(fitting_samples(self.manifest, batch.x), batch.y)
        given = fitting_labels(self.manifest, batch.y)
        rows = pieces(len(given), self._micro_batch_size)
        return [self._bound(whole.take(piece), given[piece], output) for piece in rows]

    def _bound(self, batch: Batch, given: Labels, output: str) -> BoundMicroBatch:
        binding = self._session.io_binding()
        inputs: dict[str, NDArray[Any]] = {WEIGHT + name: view for name, view in self._views.items()}
        samples = arrays(batch.x)
        inputs |= {wanted.in_graph: x for wanted, x in zip(self.manifest.arrays, samples, strict=True)}
        inputs |= {} if self.manifest.loss == NO_LOSS else {Y: given}
        for name, array in inputs.items():
            binding.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
        if output == LOSS:
            binding.bind_output(LOSS, "cpu", 0, np.float64, (), self._loss.ctypes.data)
        else:
            binding.bind_output(LOGITS)
        return BoundMicroBatch(binding, samples, batch.y, given)
