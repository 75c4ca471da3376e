"""The loss of a graph, computed by ONNX Runtime: no PyTorch is needed."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from baffle.core.arrays import F32, F64, I64, Samples
from baffle.core.ports import Batch
from baffle.core.probe import Loss
from baffle.errors import ModelError, first_line
from baffle.runtime.onnx.model_folder import LOGITS, LOSS, MODEL, WEIGHT, Manifest, X, Y, read_manifest


class BoundMicroBatch(NamedTuple):
    """A micro-batch bound to the session. It keeps the arrays alive whose memory is bound."""

    binding: Any
    samples: Samples
    labels: I64


class OnnxLoss:
    """The loss of a graph as a function of its weights.

    Weights, samples and the loss are bound to memory that this object owns, so a forward pass copies none of them.
    Samples are run in micro-batches; the graph averages their losses in float64. Use one object per thread.
    """

    def __init__(self, manifest: Manifest, model: Path | bytes, *, micro_batch: int = 0) -> None:
        self.manifest = manifest
        self.n_weights = manifest.n_weights
        self._micro_batch_size = micro_batch
        self._scratch: F32 = np.zeros(self.n_weights, np.float32)
        self._views = self.manifest.split(self._scratch)
        self._loss: F64 = np.zeros((), np.float64)
        with _translated("the model" if isinstance(model, bytes) else str(model)):
            self._session = _open(model)

    @classmethod
    def in_folder(cls, folder: Path, *, micro_batch: int = 0) -> "OnnxLoss":
        """The loss of the model in a folder that `baffle export` wrote."""
        return cls(read_manifest(folder), folder / MODEL, micro_batch=micro_batch)

    @property
    def scratch(self) -> F32:
        """The memory that the graph reads its weights from; write into it."""
        return self._scratch

    def on(self, batch: Batch) -> Loss:
        """The loss on one batch, to be called for many weights."""
        return BatchLoss(self, self._micro_batches(batch, LOSS))

    def mean_loss(self, micro_batches: Sequence[BoundMicroBatch]) -> float:
        """The loss at the weights in `scratch`."""
        total = 0.0
        with _translated("a forward pass"):
            for micro_batch in micro_batches:
                self._session.run_with_iobinding(micro_batch.binding)
                total += float(self._loss) * len(micro_batch.labels)
        return total / sum(len(micro_batch.labels) for micro_batch in micro_batches)

    def outputs(self, weights: F32, batch: Batch) -> F32:
        """The model's logits, one row per sample."""
        self._scratch[:] = weights
        rows = list[F32]()
        with _translated("a forward pass"):
            for micro_batch in self._micro_batches(batch, LOGITS):
                self._session.run_with_iobinding(micro_batch.binding)
                rows += micro_batch.binding.copy_outputs_to_cpu()
        return np.concatenate(rows)

    def _micro_batches(self, batch: Batch, output: str) -> list[BoundMicroBatch]:
        if batch.x.shape[1:] != self.manifest.input_shape:
            raise ModelError(
                f"the model takes samples of shape {self.manifest.input_shape}, got {batch.x.shape[1:]}; "
                "was it exported for other data?"
            )
        x = self._samples(batch.x)
        y = np.ascontiguousarray(batch.y, np.int64)
        size = self._micro_batch_size or len(y)
        return [self._bound(x[i : i + size], y[i : i + size], output) for i in range(0, len(y), size)]

    def _samples(self, x: Samples) -> Samples:
        """Samples in the type of the graph's input. Integers may be token ids, so a conversion must not change any."""
        wanted = np.dtype(self.manifest.input_dtype)
        integers = np.issubdtype(x.dtype, np.integer)
        if integers == (wanted.kind == "i"):
            converted: Samples = np.ascontiguousarray(x, wanted)
            if not integers or np.array_equal(converted, x):
                return converted
        raise ModelError(f"the model takes {wanted} samples, got {x.dtype}; was it exported for other data?")

    def _bound(self, x: Samples, y: I64, output: str) -> BoundMicroBatch:
        binding = self._session.io_binding()
        inputs: dict[str, NDArray[Any]] = {WEIGHT + name: view for name, view in self._views.items()}
        for name, array in (inputs | {X: x, Y: y}).items():
            binding.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
        if output == LOSS:
            binding.bind_output(LOSS, "cpu", 0, np.float64, (), self._loss.ctypes.data)
        else:
            binding.bind_output(LOGITS)
        return BoundMicroBatch(binding, x, y)


class BatchLoss:
    """A graph's loss on one batch. Probes change the graph's weights in place, in `scratch`, so nothing is copied."""

    def __init__(self, runtime: OnnxLoss, micro_batches: Sequence[BoundMicroBatch]) -> None:
        self._runtime = runtime
        self._micro_batches = micro_batches

    @property
    def scratch(self) -> F32:
        return self._runtime.scratch

    def __call__(self, weights: F32) -> float:
        if weights is not self.scratch:
            self.scratch[:] = weights
        return self._runtime.mean_loss(self._micro_batches)


def _open(model: Path | bytes) -> Any:
    """Open a session with one thread, so that sums are always added in the same order.

    The memory arena stays on. All passes are alike, so with small micro-batches the arena is small; without it, every
    pass would ask the system for the same pages again.
    """
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    onnxruntime.disable_telemetry_events()
    source = model if isinstance(model, bytes) else str(model)
    return onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])


@contextmanager
def _translated(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as fault:  # ONNX Runtime's errors have no narrower common ancestor
        raise ModelError(f"ONNX Runtime {onnxruntime.__version__} refuses {what}: {first_line(fault)}") from None
