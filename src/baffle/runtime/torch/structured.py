"""Losses along directions that touch a part of the weights, for less than a forward pass each.

The activations of the unmoved model are computed once and kept. A direction that touches whole stages runs the model
from the first of them on. Directions that touch units of one layer are computed together, and only what they change:
their units, the channels these reach, and the response of the next layer to that change, which is added to what was
kept. A small change computed alone is also more precise than the difference of two full forward passes.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from baffle.core.arrays import F32, F64
from baffle.core.directions import NUMBERS_AT_ONCE, Directions, Support, grouped
from baffle.core.probe import Loss, losses_along
from baffle.runtime.torch.fast_forward import IN_PLACE
from baffle.runtime.torch.stages import Pipeline, Units
from baffle.runtime.torch.tensors import MicroBatch
from baffle.runtime.torch.units import Moved, Team, Unmoved, Workspace

OUTPUTS_AT_ONCE = 1 << 20
"""Model outputs (of samples times directions) that are kept before their losses are computed."""


class Structured:
    """The loss of a pipeline of stages on one batch. The criterion is given float64 outputs.

    `scratch` is the buffer that the module's parameters are views of. `plain` is the loss of the whole module, for
    directions that touch all of it.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        scratch: Tensor,
        micro_batches: Sequence[MicroBatch],
        criterion: Callable[[Tensor, Tensor], Tensor],
        plain: Loss,
    ) -> None:
        self.pipeline, self._scratch, self._micro_batches = pipeline, scratch, micro_batches
        self._criterion, self._plain = criterion, plain
        self._samples = sum(len(y) for _, y in micro_batches)
        self._space = Workspace()
        self._last: tuple[F32, Unmoved] | None = None

    @torch.inference_mode()
    def __call__(self, weights: F32) -> float:
        return sum(self._keep(weights, micro_batch).total for micro_batch in self._micro_batches) / self._samples

    @torch.inference_mode()
    def along(self, weights: F32, directions: Directions, supports: Sequence[Support], step: float) -> F64:
        """L(W + step · s_k · unit · z_k) for every k, in any order of supports."""
        teams, rest = self._split(supports)
        if not teams and all(self.pipeline.first_stage(support) == self._first for support in rest):
            # The plain loss may round otherwise; a difference to this object's loss must not show it.
            rounding = self(weights) - self._plain(weights)
            return losses_along(self._plain, weights, directions, supports, step) + rounding
        totals, scale = np.zeros(len(supports)), step * directions.distribution.unit
        for micro_batch in self._micro_batches:
            unmoved = self._keep(weights, micro_batch)
            for support, numbers in rest.items():
                self._rerun(unmoved, weights, directions, support, numbers, scale, totals)
            for team in teams:
                self._move_units(unmoved, directions, team, scale, totals)
        return totals / self._samples

    @property
    def _first(self) -> int:
        return next((i for i, stage in enumerate(self.pipeline.stages) if stage.start < stage.stop), 0)

    def _split(self, supports: Sequence[Support]) -> tuple[list[Team], dict[Support, list[int]]]:
        """Directions that move units, in teams; and the others, by support."""
        teams, rest = dict[tuple[object, ...], Team](), dict[Support, list[int]]()
        for support, numbers in grouped(supports).items():
            units = self.pipeline.units(support)
            if units is None or _is_whole_convolution(units):
                rest[support] = numbers
                continue
            ranges = self.pipeline.ranges(units)
            key = (units.layer.filters, units.biased, *(stop - start for start, stop in ranges))
            team = teams.setdefault(key, Team(units.layer, units.biased, [], []))
            team.ranges.extend([ranges] * len(numbers))
            team.numbers.extend(numbers)
        return list(teams.values()), rest

    def _keep(self, weights: F32, micro_batch: MicroBatch) -> Unmoved:
        self._scratch.copy_(torch.from_numpy(weights))
        if self._last is not None:
            where, unmoved = self._last
            if unmoved.micro_batch is micro_batch and np.array_equal(where, weights):
                return unmoved
        x, inputs, inside = micro_batch[0], list[Tensor](), dict[nn.Module, Tensor]()

        def remember(module: nn.Module, given: tuple[Tensor, ...]) -> None:
            inside[module] = given[0].clone()

        hooks = [layer.module.register_forward_pre_hook(remember) for layer in self.pipeline.layers if layer.inside]
        for stage in self.pipeline.stages:
            inputs.append(x)
            x = stage.module(x.clone() if stage.overwrites else x).contiguous()
        for hook in hooks:
            hook.remove()
        unmoved = Unmoved(micro_batch, [*inputs, x], inside, self._sums(x.double().unsqueeze(1), micro_batch[1]).item())
        self._last = weights.copy(), unmoved
        return unmoved

    def _rerun(
        self,
        unmoved: Unmoved,
        weights: F32,
        directions: Directions,
        support: Support,
        numbers: Sequence[int],
        scale: float,
        totals: F64,
    ) -> None:
        """Run the model again from the first stage that a direction touches."""
        first, parts = self.pipeline.first_stage(support), support.parts()
        here = torch.from_numpy(weights).to(self._scratch)
        at_once = max(1, NUMBERS_AT_ONCE // max(1, support.size))
        for start in range(0, len(numbers), at_once):
            some = numbers[start : start + at_once]
            rows = self._drawn(directions, some, support.size).mul_(scale)
            for k, row in zip(some, rows, strict=True):
                for touched, number in parts:
                    torch.add(here[touched], row[number], out=self._scratch[touched])
                output = self._run(range(first, len(self.pipeline.stages)), unmoved.inputs[first], ours=False)
                totals[k] += self._sums(output.double().unsqueeze(1), unmoved.micro_batch[1]).item()
        for touched, _ in parts:
            self._scratch[touched] = here[touched]

    def _drawn(self, directions: Directions, numbers: Sequence[int], size: int) -> Tensor:
        """Directions in their units, stretched, a row each."""
        rows = torch.from_numpy(directions.draw(numbers, 0, size)).to(self._scratch)
        if directions.distribution.on_sphere:
            rows *= torch.from_numpy(directions.stretch(numbers, size)).to(rows)[:, None]
        return rows

    def _run(self, numbers: range, x: Tensor, *, ours: bool = True) -> Tensor:
        """Stages one after the other. What is not ours must not be overwritten."""
        for number in numbers:
            stage = self.pipeline.stages[number]
            in_place = IN_PLACE.get(type(stage.module))
            if in_place is not None and ours:
                x = in_place(x)
            elif _halves(stage.module, x):
                rows = torch.maximum(x[:, :, 0::2], x[:, :, 1::2])
                x = torch.maximum(rows[..., 0::2], rows[..., 1::2])
            else:
                x = stage.module(x.clone() if stage.overwrites and not ours else x)
            ours = ours or not _may_be_a_view(stage.module)
        return x

    def _sums(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Losses summed over samples, for outputs of (samples, directions, ...)."""
        samples, count = outputs.shape[:2]
        losses = self._criterion(outputs.flatten(0, 1), labels.repeat_interleave(count, 0)).double()
        if losses.ndim:
            return losses.view(samples, count, -1).sum((0, 2))
        each = [self._criterion(outputs[:, k], labels).double() for k in range(count)]
        return torch.stack(each) * samples

    def _move_units(self, unmoved: Unmoved, directions: Directions, team: Team, scale: float, totals: F64) -> None:
        """The directions of a team, as many at a time as their outputs allow."""
        outputs_each = len(unmoved.micro_batch[1]) * max(1, math.prod(self.pipeline.shapes[-1]))
        at_once = max(1, min(OUTPUTS_AT_ONCE // outputs_each, 8 * NUMBERS_AT_ONCE // team.size))
        for start in range(0, len(team.numbers), at_once):
            numbers = team.numbers[start : start + at_once]
            z = self._drawn(directions, numbers, team.size)
            some = team._replace(numbers=numbers, ranges=team.ranges[start : start + at_once])
            moved = Moved(self.pipeline, unmoved, some, z, scale, self._run, self._space)
            totals[numbers] += self._sums(moved.outputs(), unmoved.micro_batch[1]).cpu().numpy()


def _is_whole_convolution(units: Units) -> bool:
    """A convolution moved as a whole is quickest run as a convolution."""
    return isinstance(units.layer.module, nn.Conv2d) and units.stop - units.start == units.layer.units


def _may_be_a_view(module: nn.Module) -> bool:
    return isinstance(module, nn.Identity | nn.Flatten | nn.Unflatten | nn.Dropout | nn.Dropout2d)


def _halves(module: nn.Module, x: Tensor) -> bool:
    """A maximum over squares of two by two, for which two maxima of slices take an eighth of the module's time."""
    return (
        isinstance(module, nn.MaxPool2d)
        and (module.kernel_size, module.stride) in ((2, 2), ((2, 2), (2, 2)))
        and (module.padding, module.dilation) in ((0, 1), ((0, 0), (1, 1)))
        and x.shape[-1] % 2 == x.shape[-2] % 2 == 0
    )
