"""PyTorch as a runtime: any nn.Module with any loss, its trainable weights as one flat vector."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from baffle.core.arrays import F32, F64
from baffle.core.blas import one_blas_thread
from baffle.core.ports import Batch, Runtime
from baffle.core.probe import InPlace, Loss, SampleLosses, Value
from baffle.core.ranks import ranks
from baffle.errors import PlanError
from baffle.runtime.model import ONLY_A_MEAN
from baffle.runtime.outer import OuterLoss
from baffle.runtime.torch.criteria import TorchCriterion, cross_entropy
from baffle.runtime.torch.fast_forward import FastForward
from baffle.runtime.torch.modes import TrainingMode
from baffle.runtime.torch.outer import OuterLosses
from baffle.runtime.torch.stages import Pipeline, pipeline_of
from baffle.runtime.torch.structured import Structured
from baffle.runtime.torch.tensors import Inputs, MicroBatch, as_tensors, call, split, trained_parameters

NO_DERIVATIVE = (
    'task.loss: it has no derivative, which estimator = "backprop" needs; expected a loss that PyTorch can '
    'differentiate, or estimator = "probe"'
)


def weights_of(module: nn.Module) -> F32:
    """A copy of the trainable weights as one vector, in the order of `parameters()`."""
    parts = [p.detach().cpu().numpy().reshape(-1) for p in trained_parameters(module)]
    return np.concatenate([np.empty(0, np.float32), *parts]).astype(np.float32)


class TorchLoss:
    """The loss of a module as a function of its trainable weights.

    The module's trainable parameters become views into one scratch buffer that this object owns, so setting all weights
    is one copy. Frozen parameters and buffers do not change; the module runs in evaluation mode. Samples are run in
    micro-batches, and their losses are summed in float64; losses of half-precision outputs are computed in float32.
    `structured` makes directions cheaper that touch only a part of the weights; so many outer directions go through the
    module `together`. Use one object per thread.
    """

    def __init__(
        self,
        module: nn.Module,
        loss: TorchCriterion = cross_entropy,
        *,
        micro_batch: int = 0,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        structured: bool = False,
        together: int = 1,
    ) -> None:
        self._module = module.to(device=device, dtype=dtype).eval()
        self._training = TrainingMode(self._module)
        self._loss = loss
        self._micro_batch_size = micro_batch
        self._dtype = dtype
        self._device = torch.device(device)
        self._parameters = trained_parameters(module)
        self.n_weights = sum(p.numel() for p in self._parameters)
        self._scratch = torch.empty(self.n_weights, dtype=dtype, device=device)
        self._structured = structured
        self._together = together
        self._pipelines = dict[torch.Size, Pipeline | None]()
        self._forward = FastForward(self._module, plain=self._device.type != "cpu" or dtype != torch.float32)
        start = 0
        for parameter in self._parameters:
            view = self._scratch[start : start + parameter.numel()].view_as(parameter)
            view.copy_(parameter.detach())
            parameter.data = view
            start += parameter.numel()

    def on(self, batch: Batch) -> Loss:
        """The loss on one batch, to be called for many weights."""
        micro_batches = self._micro_batches(batch)
        # A single micro-batch is arranged once for all directions. Several are arranged one by one as they run, because
        # copies of all of them would take more memory than one.
        single = len(micro_batches) == 1 and self._together <= 1
        arranged = [(self._forward.arranged(x), y) for x, y in micro_batches] if single else micro_batches
        plain = self._in_place(partial(self.mean_loss, arranged))
        if self._together > 1:
            return OuterLoss(self._outer(micro_batches), plain)
        pipeline = self._pipeline_for(micro_batches[0][0]) if self._structured else None
        return Structured(pipeline, self._scratch, micro_batches, self._loss, plain) if pipeline else plain

    def samples_on(self, batch: Batch) -> SampleLosses:
        """Each sample's loss on one batch, to be called for many weights."""
        micro_batches = self._micro_batches(batch)
        if self._together > 1:
            return self._outer(micro_batches)
        return self._in_place(partial(self.sample_losses, micro_batches))

    def _outer(self, micro_batches: Sequence[MicroBatch]) -> OuterLosses:
        return OuterLosses(self._module, self._scratch, micro_batches, self._loss, self._together)

    @torch.inference_mode()
    def set_weights(self, weights: F32) -> None:
        self._scratch.copy_(torch.from_numpy(weights))

    def _in_place(self, value: Callable[[], Value]) -> Callable[[F32], Value]:
        """A value of whole forward passes, as a function of the weights. On a CPU, probes write into the module's own
        weights. NumPy cannot view weights on another device or in half precision, so these are copied."""
        if self._device.type == "cpu" and self._dtype.itemsize >= 4:
            return InPlace(self._scratch.numpy(), value)

        def copying(weights: F32) -> Value:
            self.set_weights(weights)
            return value()

        return copying

    @torch.inference_mode()
    def mean_loss(self, micro_batches: Sequence[MicroBatch]) -> float:
        """The loss at the weights that the module has now."""
        total = sum(self._summed(self._forward(x), y) for x, y in micro_batches)
        return float(total) / sum(len(y) for _, y in micro_batches)

    @torch.inference_mode()
    def sample_losses(self, micro_batches: Sequence[MicroBatch]) -> F64:
        """Each sample's loss at the weights that the module has now."""
        losses = [self._losses(self._forward(x), y) for x, y in micro_batches]
        if not all(part.ndim for part in losses):
            raise PlanError(ONLY_A_MEAN)
        return torch.cat(losses).cpu().numpy()

    def gradient_on(self, batch: Batch, seed: int = 0) -> Callable[[F32], tuple[float, F32]]:
        """Loss and gradient by backpropagation, for the baseline. The module is in training mode, as usual, and the
        seed determines what dropout drops."""
        micro_batches = self._micro_batches(batch)

        def loss_and_gradient(weights: F32) -> tuple[float, F32]:
            with torch.no_grad():
                self._scratch.copy_(torch.from_numpy(weights))
            total = 0.0
            gradient = torch.zeros_like(self._scratch)
            with self._training.seeded(seed):
                for x, y in micro_batches:
                    loss = self._summed(call(self._module, x), y) / len(batch.y)
                    if not loss.requires_grad:
                        raise PlanError(NO_DERIVATIVE)
                    parts = torch.autograd.grad(loss, self._parameters)
                    gradient += torch.cat([part.reshape(-1) for part in parts])
                    total += float(loss.detach())
            return total, gradient.to("cpu", torch.float32).numpy()

        return loss_and_gradient

    @torch.inference_mode()
    def outputs(self, weights: F32, batch: Batch) -> F32:
        """The model's outputs, one row per sample."""
        self.set_weights(weights)
        rows = [self._forward(x).to("cpu", torch.float32) for x, _ in self._micro_batches(batch)]
        return torch.cat(rows).numpy()

    def _summed(self, output: Tensor, y: Tensor) -> Tensor:
        losses = self._losses(output, y)
        return losses.sum() if losses.ndim else losses * len(y)

    def _losses(self, output: Tensor, y: Tensor) -> Tensor:
        return self._loss(output if output.dtype.itemsize >= 4 else output.float(), y).double()

    def _pipeline_for(self, x: Inputs) -> Pipeline | None:
        """The module as a pipeline of stages, or None. It is determined once for each shape of samples."""
        if not isinstance(x, Tensor):
            return None
        if x.shape[1:] not in self._pipelines:
            self._pipelines[x.shape[1:]] = pipeline_of(self._module, x)
        return self._pipelines[x.shape[1:]]

    def _micro_batches(self, batch: Batch) -> list[MicroBatch]:
        x = as_tensors(batch.x, self._device, self._dtype)
        y = torch.from_numpy(batch.y).to(self._device)
        size = self._micro_batch_size or len(y)
        return list(zip(split(x, size), torch.split(y, size), strict=True))


@contextmanager
def one_thread_each() -> Iterator[None]:
    """Run PyTorch's operators and NumPy's BLAS on one thread, so that sums are always added in the same order. Clients
    run in parallel."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with one_blas_thread():
            yield
    finally:
        torch.set_num_threads(before)


def accuracy(runtime: Runtime, weights: F32, batch: Batch) -> float:
    return float(np.mean(ranks(runtime.outputs(weights, batch), batch.y) == 0))
