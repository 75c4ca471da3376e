"""Losses along outer directions, many of them in one forward pass of a module that stays what it is."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from baffle.core.arrays import F32, F64
from baffle.core.directions import Directions, Support
from baffle.runtime.outer import lengths, passes, steps
from baffle.runtime.torch.moved import run_moved
from baffle.runtime.torch.shares import Share
from baffle.runtime.torch.tensors import Inputs, MicroBatch, call


class OuterLosses:
    """The losses of a module's samples, for many outer directions at once. The criterion receives outputs in float64.

    `scratch` is the buffer that the module's parameters are views of. At most `together` directions share a forward
    pass of a micro-batch.
    """

    def __init__(
        self,
        module: nn.Module,
        scratch: Tensor,
        micro_batches: Sequence[MicroBatch],
        criterion: Callable[[Tensor, Tensor], Tensor],
        together: int,
    ) -> None:
        self._module = module
        self._parameters = {name: p for name, p in module.named_parameters() if p.requires_grad and p.numel()}
        self._shapes = tuple(tuple(parameter.shape) for parameter in self._parameters.values())
        self._scratch = scratch
        self._micro_batches = micro_batches
        self._criterion = criterion
        self._together = together

    @torch.inference_mode()
    def __call__(self, weights: F32) -> F64:
        """Each sample's loss."""
        self._scratch.copy_(torch.from_numpy(weights))
        parts = [self._losses(call(self._module, x)[None], y)[0] for x, y in self._micro_batches]
        return np.concatenate(parts)

    @torch.inference_mode()
    def along(self, weights: F32, directions: Directions, supports: Sequence[Support], step: float) -> F64:
        """Each sample's loss at W + step · z_k, a row for every k."""
        self._scratch.copy_(torch.from_numpy(weights))
        rows = list[F64]()
        for numbers in passes(len(supports), self._together):
            drawn = steps(directions, numbers, supports, step, self._shapes)
            factors = torch.split(torch.from_numpy(drawn).to(self._scratch), lengths(self._shapes), dim=1)
            shares = [Share(a, b if b.numel() else None) for a, b in zip(factors[::2], factors[1::2], strict=True)]
            parts = [self._losses(self._moved(x, shares), y) for x, y in self._micro_batches]
            rows.append(np.concatenate(parts, axis=1))
        return np.concatenate(rows)

    def _moved(self, x: Inputs, shares: Sequence[Share]) -> Tensor:
        return run_moved(lambda: call(self._module, x), self._parameters, shares)

    def _losses(self, outputs: Tensor, labels: Tensor) -> F64:
        """The losses of outputs of shape (directions, samples, ...). If the criterion gives only a mean, it stands for
        each sample."""
        count, samples = outputs.shape[:2]
        outputs = outputs.double()
        losses = self._criterion(outputs.flatten(0, 1), labels.repeat(count, *[1] * (labels.ndim - 1))).double()
        if not losses.ndim:
            means = torch.stack([self._criterion(moved, labels).double() for moved in outputs])
            losses = means[:, None].expand(count, samples)
        return losses.reshape(count, samples).cpu().numpy()
