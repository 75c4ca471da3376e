"""Losses along outer directions, many of them in one forward pass of a module that stays what it is."""

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn

from baffle.core.arrays import F32, F64
from baffle.core.directions import Directions, Support
from baffle.core.outer import places
from baffle.core.probe import Loss, losses_along
from baffle.core.signs import signs
from baffle.errors import ModelError
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
        if directions.distribution.shapes != self._shapes:
            raise ModelError("probe.shapes are not those of task.model; leave them out to have them found")
        self._scratch.copy_(torch.from_numpy(weights))
        rows = list[F64]()
        passes = -(-len(supports) // self._together)
        for start, stop in pairwise(len(supports) * i // passes for i in range(passes + 1)):
            numbers = range(start, stop)
            shares = self._shares(directions, numbers, supports, step)
            parts = [self._losses(self._moved(x, shares), y) for x, y in self._micro_batches]
            rows.append(np.concatenate(parts, axis=1))
        return np.concatenate(rows)

    def _moved(self, x: Inputs, shares: Sequence[Share]) -> Tensor:
        return run_moved(lambda: call(self._module, x), self._parameters, shares)

    def _shares(self, directions: Directions, numbers: range, supports: Sequence[Support], step: float) -> list[Share]:
        """What the directions add to each parameter, a row each."""
        lengths = [length for place in places(self._shapes) for length in (place.rows, place.columns)]
        drawn = torch.from_numpy(signs(directions.key, numbers, 0, sum(lengths))).to(self._scratch)
        steps = self._steps([supports[k] for k in numbers], step)
        drawn *= torch.from_numpy(np.repeat(steps, lengths, axis=1)).to(self._scratch)
        parts = torch.split(drawn, lengths, dim=1)
        return [Share(a, b if b.numel() else None) for a, b in zip(parts[::2], parts[1::2], strict=True)]

    def _steps(self, supports: Sequence[Support], step: float) -> F32:
        """What `a` and `b` of each parameter are multiplied with: `a` with the step, or with 0 where a direction does
        not touch the parameter. A row for each direction, or one for all of them if all touch the same."""
        kinds = list(dict.fromkeys(supports))
        steps = np.ones((len(kinds), 2 * len(self._shapes)), np.float32)
        for number, place in enumerate(places(self._shapes)):
            steps[:, 2 * number] = [kind.below(place.stop) > kind.below(place.start) for kind in kinds]
        steps[:, ::2] *= np.float32(step)  # as core rounds it
        return steps if len(kinds) == 1 else steps[[kinds.index(support) for support in supports]]

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
