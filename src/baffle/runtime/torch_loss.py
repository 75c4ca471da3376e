"""PyTorch as a runtime: any nn.Module and loss, its weights one flat vector."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from baffle.core.arrays import F32, I64
from baffle.core.ports import Batch
from baffle.core.probe import Loss

TorchCriterion = Callable[[Tensor, Tensor], Tensor]
"""Model output and labels → one loss per sample, or their mean."""


def cross_entropy(output: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(output, labels, reduction="none")


def weights_of(module: nn.Module) -> F32:
    """The trainable weights, in the order of `parameters()`, as one vector of their own."""
    parts = [p.detach().cpu().numpy().reshape(-1) for p in _trainable(module)]
    return np.concatenate([np.empty(0, np.float32), *parts]).astype(np.float32)


class TorchLoss:
    """The loss of a module as a function of its trainable weights.

    The module's trainable parameters become views into one scratch buffer that this object owns, so setting all
    weights is one copy. Frozen parameters and buffers are left alone; the module runs in evaluation mode. Samples go
    through in micro-batches, and their losses are summed in float64. Use one object per thread.
    """

    def __init__(
        self,
        module: nn.Module,
        loss: TorchCriterion = cross_entropy,
        *,
        micro_batch: int = 0,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
    ) -> None:
        self._module = module.to(device=device, dtype=dtype).eval()
        self._loss = loss
        self._micro_batch = micro_batch
        self._dtype, self._device = dtype, torch.device(device)
        self._parameters = _trainable(module)
        self.n_weights = sum(p.numel() for p in self._parameters)
        self._scratch = torch.empty(self.n_weights, dtype=dtype, device=device)
        start = 0
        for parameter in self._parameters:
            view = self._scratch[start : start + parameter.numel()].view_as(parameter)
            view.copy_(parameter.detach())
            parameter.data = view
            start += parameter.numel()

    def on(self, batch: Batch) -> Loss:
        """The loss on one batch, to be called for many weights."""
        pieces = self._pieces(batch)

        @torch.inference_mode()
        def loss(weights: F32) -> float:
            self._scratch.copy_(torch.from_numpy(weights))
            return float(sum(self._sum(x, y) for x, y in pieces)) / len(batch.y)

        return loss

    def gradient_on(self, batch: Batch) -> Callable[[F32], tuple[float, F32]]:
        """Loss and gradient by backpropagation, for the baseline."""
        pieces = self._pieces(batch)

        def loss_and_gradient(weights: F32) -> tuple[float, F32]:
            with torch.no_grad():
                self._scratch.copy_(torch.from_numpy(weights))
            total, gradient = 0.0, torch.zeros_like(self._scratch)
            for x, y in pieces:
                loss = self._sum(x, y) / len(batch.y)
                parts = torch.autograd.grad(loss, self._parameters)
                gradient += torch.cat([part.reshape(-1) for part in parts])
                total += float(loss.detach())
            return total, gradient.to("cpu", torch.float32).numpy()

        return loss_and_gradient

    @torch.inference_mode()
    def outputs(self, weights: F32, batch: Batch) -> F32:
        """What the model says, a row per sample."""
        self._scratch.copy_(torch.from_numpy(weights))
        rows = [self._module(x).to("cpu", torch.float32) for x, _ in self._pieces(batch)]
        return torch.cat(rows).numpy()

    def _sum(self, x: Tensor, y: Tensor) -> Tensor:
        losses = self._loss(self._module(x), y).double()
        return losses.sum() if losses.ndim else losses * len(y)

    def _pieces(self, batch: Batch) -> list[tuple[Tensor, Tensor]]:
        x = torch.from_numpy(batch.x).to(self._device, self._dtype)
        y = torch.from_numpy(batch.y).to(self._device)
        size = self._micro_batch or len(y)
        return list(zip(torch.split(x, size), torch.split(y, size), strict=True))


def accuracy(runtime: TorchLoss, weights: F32, batch: Batch) -> float:
    right: I64 = runtime.outputs(weights, batch).argmax(1) == batch.y
    return float(np.mean(right))


def _trainable(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters() if p.requires_grad]
