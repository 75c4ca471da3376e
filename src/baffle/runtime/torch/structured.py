"""Losses along directions that touch a part of the weights, each for less than a forward pass.

The activations of the unmoved model are computed once and kept. For a direction that touches whole stages, the model
runs from the first of them on. Directions that touch units of one layer are computed together, and only what they
change: their units, the channels that these reach, and the response of the next layer to that change, which is added
to the kept activations. A small change computed alone is also more precise than the difference of two full forward
passes.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from baffle.core.arrays import F32, F64
from baffle.core.directions import NUMBERS_AT_ONCE, Directions, Support, grouped
from baffle.core.probe import Loss, losses_along
from baffle.core.samples import pieces
from baffle.runtime.torch.fast_forward import IN_PLACE, max_of_tiles, tile_size
from baffle.runtime.torch.stages import Pipeline
from baffle.runtime.torch.tensors import MicroBatch
from baffle.runtime.torch.units import Bundle, MovedUnits, Unmoved, Workspace

OUTPUTS_AT_ONCE = 1 << 20  # model outputs (samples times directions) that are kept before their losses are computed


@dataclass
class Structured:
    """The loss of a pipeline of stages on one batch. The criterion receives outputs in float64. `scratch` is the buffer
    that the module's parameters are views of. `plain` is the loss of the whole module, for directions that touch all of
    it."""

    pipeline: Pipeline
    scratch: Tensor
    micro_batches: Sequence[MicroBatch]
    criterion: Callable[[Tensor, Tensor], Tensor]
    plain: Loss
    _space: Workspace = field(default_factory=Workspace)
    _last: tuple[F32, Unmoved] | None = None

    @torch.inference_mode()
    def __call__(self, weights: F32) -> float:
        losses = [self._unmoved(weights, micro_batch).loss_sum for micro_batch in self.micro_batches]
        return sum(losses) / sum(len(y) for _, y in self.micro_batches)

    @torch.inference_mode()
    def along(self, weights: F32, directions: Directions, supports: Sequence[Support], step: float) -> F64:
        """L(W + step · s_k · unit · z_k) for every k, in any order of supports."""
        bundles, rest = self._split(supports)
        if not bundles and all(self.pipeline.first_stage(s) == self.pipeline.first_trained for s in rest):
            # The plain loss may round differently, which must not show in differences to this object's loss.
            rounding = self(weights) - self.plain(weights)
            return losses_along(self.plain, weights, directions, supports, step) + rounding
        totals = np.zeros(len(supports))
        scale = step * directions.distribution.unit
        for micro_batch in self.micro_batches:
            unmoved = self._unmoved(weights, micro_batch)
            for support, numbers in rest.items():
                totals[numbers] += self._rerun(unmoved, weights, directions, support, numbers, scale)
            for bundle in bundles:
                self._move_units(unmoved, directions, bundle, scale, totals)
        return totals / sum(len(y) for _, y in self.micro_batches)

    def _split(self, supports: Sequence[Support]) -> tuple[list[Bundle], dict[Support, list[int]]]:
        """Directions that move units, in bundles; and all others, by support."""
        bundles = dict[tuple[object, ...], Bundle]()
        rest = dict[Support, list[int]]()
        for support, numbers in grouped(supports).items():
            units = self.pipeline.units(support)
            if units is None or (isinstance(units.layer.module, nn.Conv2d) and units.width == units.layer.units):
                rest[support] = numbers  # all of a convolution is fastest run as a whole
                continue
            ranges = self.pipeline.ranges(units)
            key = (units.layer.filters, units.biased, *(stop - start for start, stop in ranges))
            bundle = bundles.setdefault(key, Bundle(units.layer, units.biased, support, [], []))
            bundle.ranges.extend([ranges] * len(numbers))
            bundle.numbers.extend(numbers)
        return list(bundles.values()), rest

    def _unmoved(self, weights: F32, micro_batch: MicroBatch) -> Unmoved:
        """The model's activations at these weights; those of the last call are remembered."""
        self.scratch.copy_(torch.from_numpy(weights))
        if self._last is not None:
            last_weights, unmoved = self._last
            if unmoved.micro_batch is micro_batch and np.array_equal(last_weights, weights):
                return unmoved
        x, labels = micro_batch
        assert isinstance(x, Tensor)  # only single tensors go through a pipeline
        activations = [x]
        layer_inputs = dict[nn.Module, Tensor]()

        def remember(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            layer_inputs[module] = inputs[0].clone()

        hooks = [layer.module.register_forward_pre_hook(remember) for layer in self.pipeline.layers if layer.inside]
        for stage in self.pipeline.stages:
            x = stage.module(x.clone() if stage.overwrites else x).contiguous()
            activations.append(x)
        for hook in hooks:
            hook.remove()
        loss_sum = self._sums(x.double().unsqueeze(1), labels).item()
        unmoved = Unmoved(micro_batch, activations, layer_inputs, loss_sum)
        self._last = weights.copy(), unmoved
        return unmoved

    def _rerun(
        self, unmoved: Unmoved, weights: F32, directions: Directions, support: Support, numbers: list[int], scale: float
    ) -> list[float]:
        """Run the model again from the first stage that a direction touches: the sum of losses for each direction."""
        first, parts = self.pipeline.first_stage(support), support.parts()
        base, sums = torch.from_numpy(weights).to(self.scratch), list[float]()
        for at in pieces(len(numbers), max(1, NUMBERS_AT_ONCE // max(1, support.size))):
            for row in self._drawn(directions, numbers[at], support).mul_(scale):
                for touched, part in parts:
                    torch.add(base[touched], row[part], out=self.scratch[touched])
                output = self._run(range(first, len(self.pipeline.stages)), unmoved.activations[first], owned=False)
                sums.append(self._sums(output.double().unsqueeze(1), unmoved.micro_batch[1]).item())
        for touched, _ in parts:
            self.scratch[touched] = base[touched]
        return sums

    def _drawn(self, directions: Directions, numbers: Sequence[int], support: Support) -> Tensor:
        """Directions, one row each, before scaling."""
        rows = torch.from_numpy(directions.over(support, numbers)).to(self.scratch)
        if directions.distribution.on_sphere:
            rows *= torch.from_numpy(directions.stretch(numbers, support.size)).to(rows)[:, None]
        return rows

    def _run(self, numbers: range, x: Tensor, *, owned: bool = True) -> Tensor:
        """Run stages one after the other. `x` may be overwritten only if it is `owned`."""
        for number in numbers:
            stage = self.pipeline.stages[number]
            in_place = IN_PLACE.get(type(stage.module))
            if in_place is not None and owned:
                x = in_place(x)
            elif (size := tile_size(stage.module)) and min(x.shape[-2:]) >= size:
                x = max_of_tiles(size, x)  # takes an eighth of the time of torch's pooling
            else:
                x = stage.module(x.clone() if stage.overwrites and not owned else x)
            views = nn.Identity | nn.Flatten | nn.Unflatten | nn.Dropout | nn.Dropout2d
            owned = owned or not isinstance(stage.module, views)
        return x

    def _sums(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Losses summed over samples, one for each direction, from outputs of shape (samples, directions, ...)."""
        samples, count = outputs.shape[:2]
        losses = self.criterion(outputs.flatten(0, 1), labels.repeat_interleave(count, 0)).double()
        if losses.ndim:
            return losses.view(samples, count, -1).sum((0, 2))
        means = [self.criterion(outputs[:, k], labels).double() for k in range(count)]
        return torch.stack(means) * samples

    def _move_units(self, unmoved: Unmoved, directions: Directions, bundle: Bundle, scale: float, totals: F64) -> None:
        """Move along the directions of a bundle, as many at a time as their outputs allow."""
        outputs_each = len(unmoved.micro_batch[1]) * max(1, math.prod(self.pipeline.shapes[-1]))
        at_once = max(1, min(OUTPUTS_AT_ONCE // outputs_each, 8 * NUMBERS_AT_ONCE // bundle.size))
        for at in pieces(len(bundle.numbers), at_once):
            numbers = bundle.numbers[at]
            z = self._drawn(directions, numbers, bundle.support)
            part = bundle._replace(numbers=numbers, ranges=bundle.ranges[at])
            moved = MovedUnits(self.pipeline, unmoved, part, z, scale, self._run, self._space)
            totals[numbers] += self._sums(moved.outputs(), unmoved.micro_batch[1]).cpu().numpy()
