"""PyTorch as a runtime: any nn.Module with any loss, its trainable weights as one flat vector.

Probes and evaluation run a module in evaluation mode: dropout is off, and a BatchNorm with running statistics uses
them as they were when the run began. Backpropagation, the baseline, trains as usual, with dropout on. Running
statistics do not change there either, because they are not among the weights and so would reach no other client.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from operator import itemgetter

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from baffle.core.arrays import F32, F64, ranks
from baffle.core.blas import one_blas_thread
from baffle.core.directions import Support
from baffle.core.head import Head, HeadPass, LookIntoHead
from baffle.core.ports import Batch, Runtime
from baffle.core.probe import InPlace, Loss, SampleLosses, Value
from baffle.core.samples import PADDING, each, pieces
from baffle.errors import PlanError
from baffle.plan import Plan
from baffle.plan.functions import own_function
from baffle.plan.tasks import is_own
from baffle.runtime.model import ONLY_A_MEAN, as_criterion, loss_of_numbers, slopes_of
from baffle.runtime.torch.fast_forward import FastForward
from baffle.runtime.torch.head import linear_layers, rows, watched
from baffle.runtime.torch.outer import OuterLoss, OuterLosses
from baffle.runtime.torch.stages import Pipeline, pipeline_of
from baffle.runtime.torch.structured import Structured
from baffle.runtime.torch.tensors import Inputs, MicroBatch, as_tensors, call, trained_parameters

TorchCriterion = Callable[[Tensor, Tensor], Tensor]  # model outputs and labels → one loss per sample, or their mean


def cross_entropy(output: Tensor, labels: Tensor) -> Tensor:
    """Means without padding. The class axis is the last if all others are those of the labels, and else axis 1."""
    if labels.ndim == 1 and output.ndim == 2:
        return F.cross_entropy(output, labels, reduction="none")
    if output.shape[:-1] == labels.shape:
        output = output.movedim(-1, 1)
    losses = F.cross_entropy(output, labels, ignore_index=PADDING, reduction="none").double()
    counted = (labels != PADDING).flatten(1).sum(1)
    return losses.flatten(1).sum(1) / counted.clamp(min=1)


def bce(output: Tensor, target: Tensor) -> Tensor:
    """By PyTorch's own function: another formula would change the last bits of runs that are repeated."""
    logits, targets = (each.double().reshape(len(output), -1) for each in (output, target))
    return F.binary_cross_entropy_with_logits(logits, targets, reduction="none").mean(1)


OF_PYTORCH: Mapping[str, TorchCriterion] = {"cross_entropy": cross_entropy, "bce": bce}


def criterion_named(name: str) -> TorchCriterion:
    """One of BAFFLE's own losses."""
    if name in OF_PYTORCH:
        return OF_PYTORCH[name]
    return lambda output, target: loss_of_numbers(name, torch, output.double(), target.double())


def criterion_of(plan: Plan) -> TorchCriterion:
    """The plan's loss."""
    name = plan.task.loss
    return own_criterion(name, own_function("task.loss", name)) if is_own(name) else criterion_named(name)


own_criterion = partial(as_criterion, torch.as_tensor)
"""A function of the user's own as a loss. It need not give a tensor, and need not have a derivative."""

GENERATOR = threading.Lock()  # held by the thread whose module draws from PyTorch's generator


def keeps_statistics(module: nn.Module) -> bool:
    """Whether a layer keeps running statistics in training."""
    return isinstance(module, _NormBase) and module.track_running_stats


def advice_on_modes(module: nn.Module, *, backpropagates: bool = False) -> list[str]:
    """Remarks for the user about a model with dropout or running statistics."""
    advice = []
    names = dict(module.named_modules())
    dropping = [name for name, layer in names.items() if isinstance(layer, _DropoutNd) and layer.p > 0]
    keeping = [name for name, layer in names.items() if keeps_statistics(layer)]
    if dropping and not backpropagates:
        advice.append(f"task.model: dropout in {_few(dropping)} is off, because probes run a model in evaluation mode")
    if keeping:
        advice.append(
            f"task.model: {_few(keeping)} uses its initial running statistics throughout, because they are not among "
            "the weights that clients send; GroupNorm, or track_running_stats=False, needs none"
        )
    return advice


def _few(names: list[str]) -> str:
    """At most three of a module's layers, by name."""
    shown = ", ".join(f"layer {name}" if name else "the module itself" for name in names[:3])
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown


def weights_of(module: nn.Module) -> F32:
    """A copy of the trainable weights as one vector, in the order of `parameters()`."""
    parts = [p.detach().cpu().numpy().reshape(-1) for p in trained_parameters(module)]
    return np.concatenate([np.empty(0, np.float32), *parts]).astype(np.float32)


class TorchLoss:
    """The loss of a module as a function of its trainable weights. The module's trainable parameters become views into
    one scratch buffer that this object owns, so setting all weights is one copy. Frozen parameters and buffers do not
    change; the module runs in evaluation mode. Samples are run in micro-batches, and their losses are summed in
    float64; losses of half-precision outputs are computed in float32. `structured` makes directions cheaper that touch
    only a part of the weights; `together` is the number of outer directions that share a forward pass. Use one object
    per thread."""

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
        head_at: Support | None = None,
        loss_name: str = "",
    ) -> None:
        self._module = module.to(device=device, dtype=dtype).eval()
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
        self._draws: bool | None = None
        heads = {place: layer for place, layer in linear_layers(module).items() if place.support == head_at}
        self.head = next(iter(heads), Head((0, 0)))
        self._head_layer = heads.get(self.head)
        self._loss_name = loss_name
        views = torch.split(self._scratch, [parameter.numel() for parameter in self._parameters])
        for parameter, view in zip(self._parameters, views, strict=True):
            parameter.data = view.view_as(parameter).copy_(parameter.detach())

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

    def head_on(self, batch: Batch, loss: Loss) -> LookIntoHead:
        """The loss on one batch, and what the pass knows about the module's last linear layer."""
        if self._head_layer is None:
            raise PlanError("probe.head_at is not the place of task.model's last linear layer; leave it out")
        layer = self._head_layer

        def look(weights: F32) -> HeadPass:
            with watched(layer) as seen:
                value = loss(weights)
            inputs, outputs = (rows(each) for each in zip(*seen, strict=True))
            return HeadPass(value, slopes_of(self._loss_name, outputs, batch.y), inputs)

        return look

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

    def gradient_on(self, batch: Batch, seed: int | None = 0) -> Callable[[F32], tuple[float, F32]]:
        """Loss and gradient by backpropagation. The seed determines what dropout drops; None: nothing."""
        micro_batches = self._micro_batches(batch)

        def loss_and_gradient(weights: F32) -> tuple[float, F32]:
            with torch.no_grad():
                self._scratch.copy_(torch.from_numpy(weights))
            total, gradient = 0.0, torch.zeros_like(self._scratch)
            with nullcontext() if seed is None else self._training(seed):
                for x, y in micro_batches:
                    loss = self._summed(call(self._module, x), y) / len(batch.y)
                    if not loss.requires_grad:
                        raise PlanError(
                            "task.loss: it has no derivative, which backpropagation needs; expected a loss that "
                            'PyTorch can differentiate, or estimator = "probe"'
                        )
                    parts = torch.autograd.grad(loss, self._parameters)
                    gradient += torch.cat([part.reshape(-1) for part in parts])
                    total += float(loss.detach())
            return total, gradient.to("cpu", torch.float32).numpy()

        return loss_and_gradient

    @contextmanager
    def _training(self, seed: int) -> Iterator[None]:
        """The module is in training mode inside, but running statistics stay as they are. PyTorch has one random
        generator for all threads, so modules that draw from it take turns. Whether a module does is found out when it
        is first trained; others run side by side."""
        self._module.train()
        for layer in self._module.modules():
            if keeps_statistics(layer):
                layer.eval()
        try:
            if self._draws is False:
                yield
                return
            with GENERATOR, torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                before = torch.get_rng_state()
                yield
                self._draws = self._draws or not torch.equal(before, torch.get_rng_state())
        finally:
            self._module.eval()

    @torch.inference_mode()
    def outputs(self, weights: F32, batch: Batch) -> F32:
        """The model's outputs, one row per sample."""
        self.set_weights(weights)
        parts = [self._forward(x).to("cpu", torch.float32) for x, _ in self._micro_batches(batch)]
        return torch.cat(parts).numpy()

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
        x, y = as_tensors(batch.x, self._device, self._dtype), torch.from_numpy(batch.y).to(self._device)
        return [(each(itemgetter(rows), x), y[rows]) for rows in pieces(len(y), self._micro_batch_size)]


@contextmanager
def one_thread_each() -> Iterator[None]:
    """Run PyTorch's operators and NumPy's BLAS on one thread, so that sums are always added in the same order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with one_blas_thread():
            yield
    finally:
        torch.set_num_threads(before)


def accuracy(runtime: Runtime, weights: F32, batch: Batch) -> float:
    return float(np.mean(ranks(runtime.outputs(weights, batch), batch.y) == 0))
