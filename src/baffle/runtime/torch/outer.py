"""Losses along outer directions, many of them in one forward pass of a module that stays what it is."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from baffle.core.arrays import F32, F64
from baffle.core.directions import Directions, Support
from baffle.core.outer import factors, places
from baffle.core.probe import Loss, losses_along
from baffle.errors import ModelError
from baffle.runtime.torch.moved import Share, run_moved
from baffle.runtime.torch.tensors import Inputs, MicroBatch, call


class OuterLosses:
    """The losses of a module's samples, for many outer directions at once. The criterion receives outputs in float64.

    `scratch` is the buffer that the module's parameters are views of. `together` directions share a forward pass of a
    micro-batch.
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
        if directions.distribution.shapes != self._shapes:
            raise ModelError("probe.shapes are not those of task.model; leave them out to have them found")
        self._scratch.copy_(torch.from_numpy(weights))
        rows = list[F64]()
        for start in range(0, len(supports), self._together):
            numbers = range(start, min(start + self._together, len(supports)))
            shares = self._shares(directions, numbers, supports, step)
            parts = [self._losses(self._moved(x, shares), y) for x, y in self._micro_batches]
            rows.append(np.concatenate(parts, axis=1))
        return np.concatenate(rows)

    def _moved(self, x: Inputs, shares: Sequence[Share]) -> Tensor:
        return run_moved(lambda: call(self._module, x), self._parameters, shares)

    def _shares(self, directions: Directions, numbers: range, supports: Sequence[Support], step: float) -> list[Share]:
        """What the directions add to each parameter, a row each: nothing to those that they do not touch."""
        own = [supports[k] for k in numbers]
        kinds = list(dict.fromkeys(own))
        kind_of = np.array([kinds.index(support) for support in own])
        shares = list[Share]()
        drawn = factors(directions.key, numbers, self._shapes)
        for place, (a, b), parameter in zip(places(self._shapes), drawn, self._parameters.values(), strict=True):
            touched = np.array([kind.below(place.stop) > kind.below(place.start) for kind in kinds])
            steps = touched[kind_of] * np.float32(step)  # as core rounds it
            moved = torch.from_numpy(a * steps[:, None]).to(self._scratch)
            if b is None:
                shares.append(Share(moved.view(len(numbers), *parameter.shape)))
            else:
                shares.append(Share(moved, torch.from_numpy(b).to(self._scratch)))
        return shares

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


class OuterLoss:
    """The mean of these losses. `plain`, the loss of the whole module, is asked about directions that are not outer."""

    def __init__(self, losses: OuterLosses, plain: Loss) -> None:
        self._losses = losses
        self._plain = plain

    def __call__(self, weights: F32) -> float:
        return float(self._losses(weights).mean())

    def along(self, weights: F32, directions: Directions, supports: Sequence[Support], step: float) -> F64:
        if not directions.distribution.shapes:
            # The plain loss may round differently, which must not show in differences to this object's loss.
            rounding = self(weights) - self._plain(weights)
            return losses_along(self._plain, weights, directions, supports, step) + rounding
        means: F64 = self._losses.along(weights, directions, supports, step).mean(axis=1)
        return means
