"""The model's outputs when output units of one layer move along many directions at once.

    units of the layer  →  the channels they reach (tail)  →  the next layer's response to their change  →  the rest

Directions and samples are computed in tiles that stay in cache. A tile has the shape (samples, directions, channels,
...).
"""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from baffle.core.directions import Support
from baffle.core.samples import pieces
from baffle.runtime.torch.stages import Layer, Pipeline
from baffle.runtime.torch.tensors import MicroBatch

TILE = 1 << 20  # the size of the largest tensor of an inner loop, in numbers: small enough to stay in cache


Ends = Iterator[tuple[slice, Tensor]]  # the model's outputs, for a few directions at a time


class Unmoved(NamedTuple):
    """What is kept of the unmoved model on one micro-batch."""

    micro_batch: MicroBatch
    activations: list[Tensor]
    """The input of each stage, then the model's output."""
    layer_inputs: dict[nn.Module, Tensor]
    """The inputs of layers inside stages."""
    loss_sum: float
    """The sum of the samples' losses."""


class Bundle(NamedTuple):
    """Directions that are computed together: their units lie in one layer, and each moves equally many channels."""

    layer: Layer
    biased: bool
    support: Support  # of the first of them; the others' are as large, and those of outer directions the same
    numbers: list[int]
    ranges: list[list[tuple[int, int]]]
    """For each direction, the channels that it moves: in the layer's output, and after each stage of its tail."""

    @property
    def width(self) -> int:
        start, stop = self.ranges[0][0]
        return stop - start

    @property
    def size(self) -> int:
        """The number of weights that a direction touches."""
        return self.width * (self.layer.fan + self.biased)


class Workspace(dict[str, Tensor]):
    """Tensors that an inner loop reuses, because the system clears newly allocated memory first."""

    def take(self, name: str, like: Tensor, *shape: int) -> Tensor:
        size = math.prod(shape)
        if name not in self or self[name].numel() < size:
            self[name] = like.new_empty(size)
        return self[name][:size].view(shape)


@dataclass
class MovedUnits:
    """A bundle's directions `z`, times `scale`, on one micro-batch. `run` runs stages and may overwrite its input."""

    pipeline: Pipeline
    unmoved: Unmoved
    bundle: Bundle
    z: Tensor
    scale: float
    run: Callable[[range, Tensor], Tensor]
    space: Workspace

    def __post_init__(self) -> None:
        z, bundle = self.z, self.bundle
        self._route = self.pipeline.route(bundle.layer)
        self._separate = all(self.pipeline.stages[number].separate for number in self._route.rest)
        self._largest_after = max((math.prod(self.pipeline.shapes[number]) for number in self._route.rest), default=1)
        filters = z[:, : bundle.width * bundle.layer.fan].reshape(-1, bundle.layer.fan)
        biases = z[:, bundle.width * bundle.layer.fan :].reshape(-1, 1)
        self._z = torch.cat([filters, biases], 1) if bundle.biased else filters
        starts = torch.tensor([[start for start, _ in ranges] for ranges in bundle.ranges], device=z.device)
        widths = [stop - start for start, stop in bundle.ranges[0]]
        self._channels = [
            starts[:, step, None] + torch.arange(width, device=z.device) for step, width in enumerate(widths)
        ]
        """The bundle's ranges as tensors of shape (directions, channels), one for each step of the way."""

    def outputs(self) -> Tensor:
        """The model's outputs in float64, of shape (samples, directions, ...)."""
        base = self.unmoved.activations[-1]
        n_samples, n_directions = len(base), len(self.bundle.numbers)
        result = torch.empty((n_samples, n_directions, *base.shape[1:]), dtype=torch.float64, device=base.device)
        samples_at_once, directions_at_once = self._tile(n_samples, n_directions)
        for samples in pieces(n_samples, samples_at_once):
            patches = self._patches(samples)
            for directions in pieces(n_directions, directions_at_once):
                x = self._tail(self._units(patches, samples, directions), samples, directions)
                for part, y in self._ends(x, samples, directions):
                    result[samples, part] = y
        return result

    def _tile(self, n_samples: int, n_directions: int) -> tuple[int, int]:
        """How many samples, and how many directions, are computed together."""
        layer = self.bundle.layer
        positions = math.prod(self.pipeline.shapes[layer.stage + 1][1:])
        directions = min(n_directions, max(1, TILE // (self.bundle.width * positions)))
        if not self._separate:
            return n_samples, max(1, directions // n_samples)
        samples = min(TILE // (directions * self.bundle.width * positions), TILE // self._largest_after)
        if positions > 1:
            samples = min(samples, 4 * TILE // (layer.fan * positions))
        return max(1, min(n_samples, samples)), directions

    def _patches(self, samples: slice) -> Tensor:
        """The factors of the filters, with ones for the biases: (samples, inputs), or (samples, inputs, positions)."""
        layer, biased = self.bundle.layer, self.bundle.biased
        inputs = self.unmoved.layer_inputs[layer.module] if layer.inside else self.unmoved.activations[layer.stage]
        x = inputs[samples]
        if isinstance(layer.module, nn.Linear):
            return F.pad(x, (0, 1), value=1.0) if biased else x
        view = patches_of(layer.module, x, self.pipeline.shapes[layer.stage + 1])
        patches = self.space.take("patches", x, len(x), layer.fan + biased, math.prod(view.shape[4:]))
        patches[:, : layer.fan].view(view.shape).copy_(view)
        patches[:, layer.fan :] = 1.0
        return patches

    def _units(self, patches: Tensor, samples: slice, directions: slice) -> Tensor:
        """The moved units, before any activation."""
        width = self.bundle.width
        base = self.unmoved.activations[self.bundle.layer.stage + 1][samples]
        z = self._z[directions.start * width : directions.stop * width]
        x = self.space.take("units", base, len(base), len(z), *base.shape[2:])
        torch.index_select(base, 1, self._channels[0][directions].reshape(-1), out=x)
        if patches.ndim == 2:
            x.addmm_(patches, z.T, alpha=self.scale)
        else:
            for sample, patch in zip(x.flatten(2), patches, strict=True):
                sample.addmm_(z, patch, alpha=self.scale)
        return _by_width(x, width)

    def _tail(self, x: Tensor, samples: slice, directions: slice) -> Tensor:
        """The moved channels after the stages that keep channels apart."""
        count = x.shape[1]
        for step, number in enumerate(self._route.tail):
            module = self.pipeline.stages[number].module
            if isinstance(module, nn.GroupNorm):
                x = self._normalised(module, self._filled(x, number, step, samples, directions), step, directions)
            else:
                x = _by_width(self.run(range(number, number + 1), x.flatten(0, 1)), count, dim=0)
        return x

    def _filled(self, x: Tensor, number: int, step: int, samples: slice, directions: slice) -> Tensor:
        """The moved channels together with the unmoved channels of their groups."""
        before = self._channels[step][directions]
        after = self._channels[step + 1][directions]
        if before.shape == after.shape:
            return x
        whole = self.unmoved.activations[number][samples].index_select(1, after.reshape(-1))
        positions = _positions(before - after[:, :1], after.shape[1])
        return _by_width(whole.index_copy_(1, positions, x.flatten(1, 2)), after.shape[1])

    def _normalised(self, module: nn.GroupNorm, x: Tensor, step: int, directions: slice) -> Tensor:
        groups = x.shape[2] * module.num_groups // module.num_channels
        y = F.group_norm(x.flatten(0, 1), groups, eps=module.eps).view_as(x)
        if module.affine:
            channels = self._channels[step + 1][directions]
            shape = (1, *channels.shape, *[1] * (x.ndim - 3))
            y.mul_(module.weight[channels].view(shape)).add_(module.bias[channels].view(shape))
        return y

    def _ends(self, x: Tensor, samples: slice, directions: slice) -> Ends:
        stop = self._route.tail.stop
        base = self.unmoved.activations[stop][samples]
        if not self._route.responds:
            yield from self._replaced(base, x, directions)
            return
        module = self.pipeline.stages[stop].module
        next_base = self.unmoved.activations[stop + 1][samples]
        change = x.flatten(1, 2).sub_(base.index_select(1, self._channels[-1][directions].reshape(-1))).view_as(x)
        if isinstance(module, nn.Conv2d):
            yield from self._through_convolution(module, next_base, change, directions)
        elif isinstance(module, nn.Linear):
            yield from self._through_linear(module, next_base, change, directions)

    def _replaced(self, base: Tensor, x: Tensor, directions: slice) -> Ends:
        """The rest of the pipeline on all channels, after replacing the moved ones."""
        if not self._route.rest:
            base, x = base.double(), x.double()
        for part in self._by_size(directions, len(x) * max(base[0].numel(), self._largest_after)):
            own = slice(part.start - directions.start, part.stop - directions.start)
            positions = _positions(self._channels[-1][part], base.shape[1])
            whole = base.repeat_interleave(part.stop - part.start, 0).view(len(x), -1, *base.shape[2:])
            whole.index_copy_(1, positions, x[:, own].flatten(1, 2))
            yield part, self._after(_by_width(whole, base.shape[1]))

    def _through_linear(self, module: nn.Linear, base: Tensor, change: Tensor, directions: slice) -> Ends:
        """A linear layer's response to a change of a few inputs: a product with these columns of its matrix."""
        if not self._route.rest:
            base = base.double()
        if change.shape[2] == 1:
            yield directions, self._after(base[:, None] + change * module.weight.T[self._channels[-1][directions, 0]])
            return
        for part in self._alike(directions):
            start, stop = self.bundle.ranges[part.start][-1]
            own = change[:, part.start - directions.start : part.stop - directions.start]
            yield part, self._after(base[:, None] + own @ module.weight[:, start:stop].T)

    def _through_convolution(self, module: nn.Conv2d, base: Tensor, change: Tensor, directions: slice) -> Ends:
        """A convolution's response to a change of a few input channels: one product, added to the kept output."""
        size = len(change) * max(base[0].numel(), self._largest_after)
        for alike in self._alike(directions):
            start, stop = self.bundle.ranges[alike.start][-1]
            filters = module.weight[:, start:stop].flatten(1)
            for part in self._by_size(alike, size):
                own = change[:, part.start - directions.start : part.stop - directions.start]
                view = patches_of(module, own.flatten(0, 1), base.shape[1:])
                patches = self.space.take("changes", view, len(view), filters.shape[1], math.prod(view.shape[4:]))
                patches.view(view.shape).copy_(view)
                x = self.space.take("responses", base, *own.shape[:2], *base.shape[1:])
                x.copy_(base[:, None].expand_as(x))
                x.view(len(view), len(filters), -1).baddbmm_(filters.expand(len(view), -1, -1), patches)
                yield part, self._after(x)

    def _alike(self, directions: slice) -> Iterator[slice]:
        """Runs of adjacent directions that move the same channels."""
        start = directions.start
        for _, same in itertools.groupby(self.bundle.ranges[directions]):
            stop = start + sum(1 for _ in same)
            yield slice(start, stop)
            start = stop

    def _by_size(self, directions: slice, size: int) -> Iterator[slice]:
        """Adjacent directions in tiles, if each direction takes `size` numbers."""
        for at in pieces(directions.stop - directions.start, max(1, TILE // size)):
            yield slice(directions.start + at.start, directions.start + at.stop)

    def _after(self, x: Tensor) -> Tensor:
        """The rest of the pipeline. If a sample's output depends on other samples, directions run one by one."""
        if self._separate:
            return _by_width(self.run(self._route.rest, x.flatten(0, 1)), x.shape[1], dim=0)
        return torch.stack([self.run(self._route.rest, moved.contiguous()) for moved in x.unbind(1)], 1)


def patches_of(module: nn.Conv2d, x: Tensor, shape: torch.Size) -> Tensor:
    """The inputs that a convolution's filters are multiplied with, as a view of shape (samples, channels, height and
    width of a filter, height and width of the output). `shape` is that of the output for one sample."""
    assert not isinstance(module.padding, str)
    above, left = module.padding
    down, right = module.stride
    row_gap, column_gap = module.dilation
    x = F.pad(x, (left, left, above, above)).contiguous()
    sample, channel, row, column = x.stride()
    return x.as_strided(
        (*x.shape[:2], *module.kernel_size, *shape[1:]),
        (sample, channel, row_gap * row, column_gap * column, down * row, right * column),
    )


def _by_width(x: Tensor, width: int, dim: int = 1) -> Tensor:
    """Split one dimension into two, the second of size `width`."""
    return x.view(*x.shape[:dim], -1, width, *x.shape[dim + 1 :])


def _positions(channels: Tensor, width: int) -> Tensor:
    """The positions of each direction's channels when all directions' channels, `width` each, stand in one row."""
    return (torch.arange(len(channels), device=channels.device)[:, None] * width + channels).reshape(-1)
