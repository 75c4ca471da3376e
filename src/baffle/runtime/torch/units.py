"""Output units of one layer, moved along many directions at once: what becomes of the model's outputs.

    units of the layer  →  the channels they reach (tail)  →  the next layer's response to their change  →  the rest

Directions and samples go through in tiles that stay in cache. A tile is (samples, directions, channels, ...).
"""

import itertools
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from baffle.runtime.torch.stages import Layer, Pipeline
from baffle.runtime.torch.tensors import MicroBatch

TILE = 1 << 20
"""Numbers in the largest tensor of an inner loop: few enough to stay in cache."""


class Unmoved(NamedTuple):
    """The unmoved model on one piece: what each stage is given, then what the model gives; and the losses' sum."""

    micro_batch: MicroBatch
    inputs: list[Tensor]
    inside: dict[nn.Module, Tensor]
    """What the layers inside stages are given."""
    total: float


class Team(NamedTuple):
    """Directions whose units lie in one layer and move equally many channels everywhere: computed together."""

    layer: Layer
    biased: bool
    numbers: list[int]
    ranges: list[list[tuple[int, int]]]
    """For each direction, the channels it moves: in the layer's output, and after each stage of its tail."""

    @property
    def width(self) -> int:
        start, stop = self.ranges[0][0]
        return stop - start

    @property
    def size(self) -> int:
        """Weights that one direction touches."""
        return self.width * (self.layer.fan + self.biased)


class Workspace:
    """Tensors that an inner loop writes again and again, because memory asked for anew must be cleared anew."""

    def __init__(self) -> None:
        self._tensors = dict[str, Tensor]()

    def take(self, name: str, like: Tensor, *shape: int) -> Tensor:
        size = math.prod(shape)
        if name not in self._tensors or self._tensors[name].numel() < size:
            self._tensors[name] = like.new_empty(size)
        return self._tensors[name][:size].view(shape)


class Moved:
    """One team's directions z, scaled, on one piece. `run` runs stages on a tensor that it may overwrite."""

    def __init__(
        self,
        pipeline: Pipeline,
        unmoved: Unmoved,
        team: Team,
        z: Tensor,
        scale: float,
        run: Callable[[range, Tensor], Tensor],
        space: Workspace,
    ) -> None:
        self._pipeline, self._unmoved, self._team, self._scale, self._run = pipeline, unmoved, team, scale, run
        self._space = space
        self._route = pipeline.route(team.layer)
        self._separate = all(pipeline.stages[number].separate for number in self._route.rest)
        filters = z[:, : team.width * team.layer.fan].reshape(-1, team.layer.fan)
        biases = z[:, team.width * team.layer.fan :].reshape(-1, 1)
        self._z = torch.cat([filters, biases], 1) if team.biased else filters
        starts = torch.tensor([[start for start, _ in one] for one in team.ranges], device=z.device)
        widths = [stop - start for start, stop in team.ranges[0]]
        self._channels = [
            starts[:, step, None] + torch.arange(width, device=z.device) for step, width in enumerate(widths)
        ]
        """Like the team's ranges, as one tensor of (directions, channels) for each step of the way."""

    def outputs(self) -> Tensor:
        """The model's outputs in float64: (samples, directions, ...)."""
        base = self._unmoved.inputs[-1]
        samples, count = len(base), len(self._team.numbers)
        result = torch.empty((samples, count, *base.shape[1:]), dtype=torch.float64, device=base.device)
        samples_at_once, rows = self._tile(samples, count)
        for first in range(0, samples, samples_at_once):
            some = slice(first, min(first + samples_at_once, samples))
            patches = self._patches(some)
            for start in range(0, count, rows):
                here = slice(start, min(start + rows, count))
                x = self._tail(self._units(patches, some, here), some, here)
                for part, y in self._ends(x, some, here):
                    result[some, part] = y
        return result

    def _tile(self, samples: int, count: int) -> tuple[int, int]:
        """How many samples, and directions, go through together."""
        layer, shapes = self._team.layer, self._pipeline.shapes
        positions = math.prod(shapes[layer.stage + 1][1:])
        rows = min(count, max(1, TILE // (self._team.width * positions)))
        if not self._separate:
            return samples, max(1, rows // samples)
        together = TILE // (rows * self._team.width * positions)
        together = min(together, TILE // self._largest_after())
        if positions > 1:
            together = min(together, 4 * TILE // (layer.fan * positions))
        return max(1, min(samples, together)), rows

    def _largest_after(self) -> int:
        return max((math.prod(self._pipeline.shapes[number]) for number in self._route.rest), default=1)

    def _patches(self, some: slice) -> Tensor:
        """What the filters are multiplied with, and ones for the biases: (samples, inputs) for a linear layer,
        (samples, inputs, positions) for a convolution."""
        layer, biased = self._team.layer, self._team.biased
        x = (self._unmoved.inside[layer.module] if layer.inside else self._unmoved.inputs[layer.stage])[some]
        if isinstance(layer.module, nn.Linear):
            return F.pad(x, (0, 1), value=1.0) if biased else x
        view = patches_of(layer.module, x, self._pipeline.shapes[layer.stage + 1])
        patches = self._space.take("patches", x, len(x), layer.fan + biased, math.prod(view.shape[4:]))
        patches[:, : layer.fan].view(view.shape).copy_(view)
        patches[:, layer.fan :] = 1.0
        return patches

    def _units(self, patches: Tensor, some: slice, here: slice) -> Tensor:
        """The moved units, before any activation."""
        width, scale = self._team.width, self._scale
        base = self._unmoved.inputs[self._team.layer.stage + 1][some]
        z = self._z[here.start * width : here.stop * width]
        x = self._space.take("units", base, len(base), len(z), *base.shape[2:])
        torch.index_select(base, 1, self._channels[0][here].reshape(-1), out=x)
        if patches.ndim == 2:
            x.addmm_(patches, z.T, alpha=scale)
        else:
            for one, patch in zip(x.flatten(2), patches, strict=True):
                one.addmm_(z, patch, alpha=scale)
        return _by_width(x, width)

    def _tail(self, x: Tensor, some: slice, here: slice) -> Tensor:
        """The moved channels after the stages that keep channels apart."""
        rows = x.shape[1]
        for step, number in enumerate(self._route.tail):
            module = self._pipeline.stages[number].module
            if isinstance(module, nn.GroupNorm):
                x = self._normalised(module, self._filled(x, number, step, some, here), step, here)
            else:
                x = _by_width(self._run(range(number, number + 1), x.flatten(0, 1)), rows, dim=0)
        return x

    def _filled(self, x: Tensor, number: int, step: int, some: slice, here: slice) -> Tensor:
        """The moved channels among the unmoved ones of their groups."""
        before, after = self._channels[step][here], self._channels[step + 1][here]
        if before.shape == after.shape:
            return x
        whole = self._unmoved.inputs[number][some].index_select(1, after.reshape(-1))
        place = _places(before - after[:, :1], after.shape[1])
        return _by_width(whole.index_copy_(1, place, x.flatten(1, 2)), after.shape[1])

    def _normalised(self, module: nn.GroupNorm, x: Tensor, step: int, here: slice) -> Tensor:
        groups = x.shape[2] * module.num_groups // module.num_channels
        y = F.group_norm(x.flatten(0, 1), groups, eps=module.eps).view_as(x)
        if module.affine:
            channels = self._channels[step + 1][here]
            shape = (1, *channels.shape, *[1] * (x.ndim - 3))
            y.mul_(module.weight[channels].view(shape)).add_(module.bias[channels].view(shape))
        return y

    def _ends(self, x: Tensor, some: slice, here: slice) -> Iterator[tuple[slice, Tensor]]:
        """The outputs of some directions at a time."""
        stop = self._route.tail.stop
        base = self._unmoved.inputs[stop][some]
        if not self._route.answers:
            yield from self._replaced(base, x, here)
            return
        module, next_base = self._pipeline.stages[stop].module, self._unmoved.inputs[stop + 1][some]
        change = x.flatten(1, 2).sub_(base.index_select(1, self._channels[-1][here].reshape(-1))).view_as(x)
        if isinstance(module, nn.Conv2d):
            yield from self._through_convolution(module, next_base, change, here)
        elif isinstance(module, nn.Linear):
            yield from self._through_linear(module, next_base, change, here)

    def _replaced(self, base: Tensor, x: Tensor, here: slice) -> Iterator[tuple[slice, Tensor]]:
        """The rest of the pipeline on everything, with the moved channels among it."""
        if not self._route.rest:
            base, x = base.double(), x.double()
        for part in self._by_size(here, len(x) * max(base[0].numel(), self._largest_after())):
            own = slice(part.start - here.start, part.stop - here.start)
            place = _places(self._channels[-1][part], base.shape[1])
            whole = base.repeat_interleave(part.stop - part.start, 0).view(len(x), -1, *base.shape[2:])
            whole.index_copy_(1, place, x[:, own].flatten(1, 2))
            yield part, self._after(_by_width(whole, base.shape[1]))

    def _through_linear(
        self, module: nn.Linear, base: Tensor, change: Tensor, here: slice
    ) -> Iterator[tuple[slice, Tensor]]:
        """A linear layer's response to some of its inputs is in the columns of its matrix."""
        if not self._route.rest:
            base = base.double()
        if change.shape[2] == 1:
            yield here, self._after(base[:, None] + change * module.weight.T[self._channels[-1][here, 0]])
            return
        for part in self._alike(here):
            start, stop = self._team.ranges[part.start][-1]
            own = change[:, part.start - here.start : part.stop - here.start]
            yield part, self._after(base[:, None] + own @ module.weight[:, start:stop].T)

    def _through_convolution(
        self, module: nn.Conv2d, base: Tensor, change: Tensor, here: slice
    ) -> Iterator[tuple[slice, Tensor]]:
        """A convolution's response to some of its input channels, as one product added to what was kept."""
        size = len(change) * max(base[0].numel(), self._largest_after())
        for alike in self._alike(here):
            start, stop = self._team.ranges[alike.start][-1]
            filters = module.weight[:, start:stop].flatten(1)
            for part in self._by_size(alike, size):
                own = change[:, part.start - here.start : part.stop - here.start]
                view = patches_of(module, own.flatten(0, 1), base.shape[1:])
                patches = self._space.take("changes", view, len(view), filters.shape[1], math.prod(view.shape[4:]))
                patches.view(view.shape).copy_(view)
                x = self._space.take("responses", base, *own.shape[:2], *base.shape[1:])
                x.copy_(base[:, None].expand_as(x))
                x.view(len(view), len(filters), -1).baddbmm_(filters.expand(len(view), -1, -1), patches)
                yield part, self._after(x)

    def _alike(self, here: slice) -> Iterator[slice]:
        """Neighbours that move the same channels."""
        start = here.start
        for _, same in itertools.groupby(self._team.ranges[here]):
            stop = start + sum(1 for _ in same)
            yield slice(start, stop)
            start = stop

    def _by_size(self, here: slice, size: int) -> Iterator[slice]:
        """Neighbours in tiles, if each takes `size` numbers."""
        most = max(1, TILE // size)
        for start in range(here.start, here.stop, most):
            yield slice(start, min(start + most, here.stop))

    def _after(self, x: Tensor) -> Tensor:
        """The rest of the pipeline on (samples, directions, ...), the directions apart if samples see each other."""
        if self._separate:
            return _by_width(self._run(self._route.rest, x.flatten(0, 1)), x.shape[1], dim=0)
        return torch.stack([self._run(self._route.rest, one.contiguous()) for one in x.unbind(1)], 1)


def patches_of(module: nn.Conv2d, x: Tensor, shape: torch.Size) -> Tensor:
    """Where a convolution's filters meet its input, as a view: (samples, channels, height and width of a filter, of the
    output). `shape` is the output's, for one sample."""
    assert not isinstance(module.padding, str)
    (up, left), (down, right), (gap, apart) = module.padding, module.stride, module.dilation
    x = F.pad(x, (left, left, up, up)).contiguous()
    every, channel, line, one = x.stride()
    return x.as_strided(
        (*x.shape[:2], *module.kernel_size, *shape[1:]),
        (every, channel, gap * line, apart * one, down * line, right * one),
    )


def _by_width(x: Tensor, width: int, dim: int = 1) -> Tensor:
    """Neighbours along one dimension, `width` at a time, in a dimension of their own."""
    return x.view(*x.shape[:dim], -1, width, *x.shape[dim + 1 :])


def _places(channels: Tensor, width: int) -> Tensor:
    """Where each direction's channels are when the directions' `width` channels stand in one row."""
    return (torch.arange(len(channels), device=channels.device)[:, None] * width + channels).reshape(-1)
