"""The loss of a graph, computed by ONNX Runtime: no PyTorch is needed."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from baffle.core.arrays import F32, F64
from baffle.core.head import Head, HeadPass, LookIntoHead
from baffle.core.ports import Batch
from baffle.core.probe import InPlace, Loss, SampleLosses
from baffle.core.samples import PADDING, Array, Labels, Samples, arrays, describe, pieces, shape_of
from baffle.errors import ModelError, PlanError
from baffle.plan import Plan
from baffle.plan.functions import own_function
from baffle.plan.tasks import is_own
from baffle.runtime.model import ONLY_A_MEAN, as_criterion, loss_of_numbers, slopes_of
from baffle.runtime.onnx import model_folder
from baffle.runtime.onnx.model_folder import (
    CROSS_ENTROPY,
    HEAD_INPUTS,
    HEAD_OUTPUTS,
    LOGITS,
    LOSS,
    NO_LOSS,
    WEIGHT,
    Input,
    Manifest,
    Y,
)
from baffle.runtime.onnx.session import open_session, translated

NumpyCriterion = Callable[[Array, Labels], F64]  # model outputs and labels → one loss per sample, or their mean


def criterion_of(plan: Plan) -> NumpyCriterion | None:
    """The plan's loss, to be taken of a graph's outputs; None if the graph holds it."""
    name = plan.task.loss
    if is_own(name):
        return own_criterion(name, own_function("task.loss", name))
    return partial(sample_losses, name) if model_folder.graph_loss(name) == NO_LOSS else None


own_criterion = partial(as_criterion, lambda losses: np.asarray(losses, np.float64))
"""A function of the user's own as a loss."""


def sample_losses(loss: str, outputs: Array, labels: Labels) -> F64:
    """One of BAFFLE's own losses, for each sample."""
    rows: F64 = outputs.astype(np.float64)
    if loss == CROSS_ENTROPY:
        return _cross_entropy(rows, labels)
    losses: F64 = loss_of_numbers(loss, np, rows, labels.astype(np.float64))
    return losses


def _cross_entropy(outputs: F64, labels: Labels) -> F64:
    """Means without padding. The class axis is the last if all others are those of the labels, and else axis 1."""
    if outputs.shape[:-1] != labels.shape:
        outputs = np.moveaxis(outputs, 1, -1)
    shifted = outputs - outputs.max(axis=-1, keepdims=True)
    logarithms = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    counted = labels != PADDING
    chosen = np.take_along_axis(logarithms, np.where(counted, labels, 0)[..., None], axis=-1)[..., 0]
    counted, losses = (array.reshape(len(labels), -1) for array in (counted, np.where(counted, -chosen, 0.0)))
    means: F64 = losses.sum(axis=1) / np.maximum(counted.sum(axis=1), 1)
    return means


def require_loss(plan: Plan, manifest: Manifest, where: Path) -> None:
    """Refuse a graph that holds another loss than the plan asks for."""
    if manifest.loss != model_folder.graph_loss(plan.task.loss):
        held = next((name for name, stored in model_folder.GRAPH_LOSSES.items() if stored == manifest.loss), NO_LOSS)
        wanted = plan.task.loss if plan.task.loss in model_folder.GRAPH_LOSSES else NO_LOSS
        raise ModelError(
            f'the graph in {where} holds the loss "{held}", but task.loss is "{plan.task.loss}"; export it again from '
            f"this plan, or with --loss {wanted}"
        )


class BoundMicroBatch(NamedTuple):
    """A micro-batch, whose bound arrays it keeps alive. `given` are the labels as the graph takes them."""

    binding: Any
    samples: tuple[Array, ...]
    labels: Labels
    given: Labels


@dataclass
class OnnxLoss:
    """The loss of a graph as a function of its weights. Weights, samples and the loss are bound to memory that this
    object owns, so a forward pass copies none of them. Samples are run in micro-batches; the graph averages their
    losses in float64. A criterion is applied to the graph's outputs instead. Use one object per thread."""

    manifest: Manifest
    model: bytes
    micro_batch: int = 0
    criterion: NumpyCriterion | None = None
    loss: str = ""  # its name in the plan, for an exact head

    def __post_init__(self) -> None:
        self.n_weights = self.manifest.n_weights
        self._scratch: F32 = np.zeros(self.n_weights, np.float32)
        self._views = self.manifest.split(self._scratch)
        self._loss: F64 = np.zeros((), np.float64)
        self._session = open_session(self.model)

    @classmethod
    def in_folder(cls, folder: Path, *, micro_batch: int = 0, criterion: NumpyCriterion | None = None) -> "OnnxLoss":
        """The loss of the model in a folder that `baffle export` wrote."""
        exported = model_folder.read_exported(folder)
        return cls(exported.manifest, exported.graph, micro_batch, criterion)

    def on(self, batch: Batch) -> Loss:
        """The loss on one batch, to be called for many weights."""
        if self.criterion is None and self.manifest.loss == NO_LOSS:
            raise ModelError("the graph holds no loss; export it with one, or give task.loss as a function")
        micro_batches = self._micro_batches(batch, LOGITS if self.criterion else LOSS)
        return InPlace(self._scratch, partial(self._mean_loss, micro_batches))

    @property
    def head(self) -> Head:
        return self.manifest.head_place()

    def head_on(self, batch: Batch, _loss: Loss) -> LookIntoHead:
        """The loss on one batch, and what the pass knows about the graph's last linear layer."""
        shown = (LOGITS if self.criterion else LOSS, HEAD_INPUTS, HEAD_OUTPUTS)
        micro_batches = self._micro_batches(batch, *shown)

        def look(weights: F32) -> HeadPass:
            self._scratch[:] = weights
            total, inputs, outputs = 0.0, list[Array](), list[Array]()
            for micro_batch in micro_batches:
                self._run(micro_batch)
                value, h, o = (np.asarray(array) for array in micro_batch.binding.copy_outputs_to_cpu())
                mean = float(np.mean(self.criterion(value, micro_batch.labels))) if self.criterion else float(value)
                total += mean * len(micro_batch.labels)
                inputs.append(h)
                outputs.append(o)
            h, o = (np.concatenate(parts).astype(np.float64) for parts in (inputs, outputs))
            return HeadPass(
                total / len(batch.y), slopes_of(self.loss, o, batch.y), h.reshape(len(batch.y), -1, h.shape[-1])
            )

        return look

    def samples_on(self, batch: Batch) -> SampleLosses:
        """Each sample's loss on one batch, to be called for many weights. The graph itself gives only their mean."""
        return InPlace(self._scratch, partial(self._sample_losses, self._micro_batches(batch, LOGITS)))

    def _sample_losses(self, micro_batches: Sequence[BoundMicroBatch]) -> F64:
        criterion = self.criterion or partial(sample_losses, self.manifest.loss)
        losses = [criterion(self._outputs(micro_batch), micro_batch.labels) for micro_batch in micro_batches]
        if not all(part.ndim for part in losses):
            raise PlanError(ONLY_A_MEAN)
        return np.concatenate(losses)

    def _mean_loss(self, micro_batches: Sequence[BoundMicroBatch]) -> float:
        """The loss at the weights that the graph reads now."""
        total = 0.0
        for micro_batch in micro_batches:
            if self.criterion:
                loss = float(np.mean(self.criterion(self._outputs(micro_batch), micro_batch.labels)))
            else:
                self._run(micro_batch)
                loss = float(self._loss)
            total += loss * len(micro_batch.labels)
        return total / sum(len(micro_batch.labels) for micro_batch in micro_batches)

    def outputs(self, weights: F32, batch: Batch) -> F32:
        """The model's logits, one row per sample."""
        self._scratch[:] = weights
        return np.concatenate([self._outputs(micro_batch) for micro_batch in self._micro_batches(batch, LOGITS)])

    def _outputs(self, micro_batch: BoundMicroBatch) -> F32:
        self._run(micro_batch)
        (outputs,) = micro_batch.binding.copy_outputs_to_cpu()
        return np.asarray(outputs)

    def _run(self, micro_batch: BoundMicroBatch) -> None:
        with translated("a forward pass"):
            self._session.run_with_iobinding(micro_batch.binding)

    def _micro_batches(self, batch: Batch, *outputs: str) -> list[BoundMicroBatch]:
        whole = Batch(_fitting_samples(self.manifest, batch.x), batch.y)
        given = _fitting_labels(self.manifest, batch.y)
        rows = pieces(len(given), self.micro_batch)
        return [self._bound(whole.take(piece), given[piece], outputs) for piece in rows]

    def _bound(self, batch: Batch, given: Labels, outputs: Sequence[str]) -> BoundMicroBatch:
        binding = self._session.io_binding()
        inputs: dict[str, NDArray[Any]] = {WEIGHT + name: view for name, view in self._views.items()}
        samples = arrays(batch.x)
        inputs |= {wanted.in_graph: x for wanted, x in zip(self.manifest.arrays, samples, strict=True)}
        inputs |= {} if self.manifest.loss == NO_LOSS else {Y: given}
        for name, array in inputs.items():
            binding.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
        for name in outputs:
            if name == LOSS:
                binding.bind_output(LOSS, "cpu", 0, np.float64, (), self._loss.ctypes.data)
            else:
                binding.bind_output(name)
        return BoundMicroBatch(binding, samples, batch.y, given)


def _fitting_samples(manifest: Manifest, x: Samples) -> tuple[Array, ...]:
    """The arrays of samples, in the order of the graph's inputs."""
    if not manifest.takes(shape_of(x)):
        raise ModelError(
            f"the model takes samples of {manifest.sample}, got {describe(x)}; was it exported for other data?"
        )
    names = [wanted.name for wanted in manifest.arrays]
    by_name = x if isinstance(x, dict) else dict(zip(names, arrays(x), strict=True))
    return tuple(_converted(wanted, by_name[wanted.name]) for wanted in manifest.arrays)


def _converted(wanted: Input, x: Array) -> Array:
    """Samples in the type of the graph's input. Integers may be token ids, so a conversion must not change any.
    Booleans, as in a mask, become 1 or 0, and a graph that takes booleans takes these."""
    kind = np.dtype(wanted.dtype)
    x = x.astype(kind) if x.dtype.kind == "b" else x
    integers = x.dtype.kind in "iub"
    if integers == (kind.kind in "iub"):
        converted: Array = np.ascontiguousarray(x, kind)
        if not integers or np.array_equal(converted, x):
            return converted
    what = f"{kind} {wanted.name}" if wanted.name else f"{kind} samples"
    raise ModelError(f"the model takes {what}, got {x.dtype}; was it exported for other data?")


def _fitting_labels(manifest: Manifest, y: Labels) -> Labels:
    """Labels in the type and shape of the graph's input. A target of shape (n,) fits an output of (n, 1)."""
    shape = (len(y), *manifest.label_shape)
    if manifest.loss == NO_LOSS:
        return y
    if y.size != math.prod(shape):
        raise ModelError(
            f"the model takes labels of shape {manifest.label_shape} for each sample, got {y.shape[1:]}; was it "
            "exported for other data?"
        )
    dtype = np.int64 if manifest.loss == CROSS_ENTROPY else np.float32
    return np.ascontiguousarray(y.reshape(shape), dtype)
