"""A module as a pipeline of stages, and the layers in it whose output units can be moved alone.

A direction that touches one stage changes nothing before it. A direction that touches a few output units of a layer
leaves the other units unchanged, as long as the following modules keep channels apart. Whether a module behaves like
this is determined here, once, by running it on a few samples: random ones, or real ones if samples are integers.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from baffle.core.directions import Support
from baffle.errors import PlanError
from baffle.runtime.torch.tensors import trained_parameters

SAMPLES = 4  # the number of samples that a pipeline is tried on

ELEMENTWISE = (
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Softplus, nn.Softsign),
    *(nn.Hardswish, nn.Hardsigmoid, nn.Hardtanh, nn.Sigmoid, nn.Tanh, nn.Identity, nn.Dropout, nn.Dropout2d),
)
POOLS = (nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d)


@dataclass(frozen=True)
class Stage:
    """A module of the pipeline, with its slice of the flat weight vector (empty if it has no trained weights)."""

    module: nn.Module
    start: int
    stop: int
    separate: bool  # a sample's output does not depend on the other samples
    overwrites: bool  # works in place, so an input that is still needed must be copied


class Layer(NamedTuple):
    """A convolution or linear layer, in which each output unit has its own filter and bias. It is a stage itself, or is
    inside a stage that adds the layer's output to its own, like a residual block."""

    stage: int
    inside: bool
    module: nn.Conv2d | nn.Linear
    units: int
    fan: int  # weights of one filter
    filters: int  # where its filters start in the flat weight vector
    biases: int | None  # where its biases start; None if it has no trained ones


class Units(NamedTuple):
    """A support that is a range of one layer's output units, with or without their biases."""

    layer: Layer
    start: int
    stop: int
    biased: bool

    @property
    def width(self) -> int:
        return self.stop - self.start


class Route(NamedTuple):
    """The way of a change from a layer to the output: stages that keep channels apart (`tail`), then possibly a stage
    whose response to the change can be computed alone (`responds`), then the rest of the pipeline."""

    tail: range
    responds: bool
    rest: range


@dataclass(frozen=True)
class Pipeline:
    """Stages whose composition is the module."""

    stages: tuple[Stage, ...]
    shapes: tuple[torch.Size, ...]
    """The shape of each stage's input for one sample; the last is the shape of the module's output."""
    layers: tuple[Layer, ...]

    def route(self, layer: Layer) -> Route:
        """The way of a change of a few of the layer's units."""
        stop = layer.stage + 1
        while stop < len(self.stages) and widened(self.stages[stop].module, self.shapes[stop], 0, 1) is not None:
            stop += 1
        alone = stop < len(self.stages) and responds(self.stages[stop].module, self.shapes[stop])
        return Route(range(layer.stage + 1, stop), alone, range(stop + alone, len(self.stages)))

    def ranges(self, units: Units) -> list[tuple[int, int]]:
        """The channels that a range of units moves: in the layer's own output, and after each stage of its tail."""
        ranges = [(units.start, units.stop)]
        for number in self.route(units.layer).tail:
            reached = widened(self.stages[number].module, self.shapes[number], *ranges[-1])
            assert reached is not None
            ranges.append(reached)
        return ranges

    def units(self, support: Support) -> Units | None:
        """The units that a support consists of; None if it is not a range of units."""
        for layer in self.layers:
            first = layer.filters
            end = first + layer.units * layer.fan
            if not first <= support.start < end:
                continue
            whole = layer.biases == end and support == Support(first, end + layer.units)
            start = 0 if whole else (support.start - first) // layer.fan
            stop = layer.units if whole else min((support.stop - first) // layer.fan, layer.units)
            for biased in (True, False) if layer.biases is not None else (False,):
                if whole or support == unit_support(layer, start, stop, biased=biased):
                    return Units(layer, start, stop, biased)
        return None

    @property
    def first_trained(self) -> int:
        """The first stage with trained weights."""
        return next((number for number, stage in enumerate(self.stages) if stage.start < stage.stop), 0)

    def first_stage(self, support: Support) -> int:
        """The first stage that a support touches."""
        touched = [part for part, _ in support.parts() if part.start < part.stop]
        for number, stage in enumerate(self.stages):
            if any(part.start < stage.stop and stage.start < part.stop for part in touched):
                return number
        return len(self.stages) - 1


def unit_support(layer: Layer, start: int, stop: int, *, biased: bool = True) -> Support:
    """The filters and biases of a range of units."""
    biases = layer.biases if biased else None
    tail = (0, 0) if biases is None else (biases + start, biases + stop)
    return Support(layer.filters + start * layer.fan, layer.filters + stop * layer.fan, tail)


@torch.no_grad()
def pipeline_of(module: nn.Module, sample: Tensor) -> Pipeline | None:
    """The module as a pipeline, if it is an nn.Sequential or names its stages in a method `stages()`; None otherwise.
    `sample` is a batch. If it holds floats, only its shape matters; integers must be values that the module accepts."""
    method = getattr(module, "stages", None)
    declared = method() if callable(method) and not isinstance(method, nn.Module) else None
    if declared is None and not _is_sequence(module):
        return None
    modules = list(_flat([module] if declared is None else declared))
    trained = trained_parameters(module)
    ends = list(itertools.accumulate(parameter.numel() for parameter in trained))
    starts = {id(parameter): end - parameter.numel() for parameter, end in zip(trained, ends, strict=True)}
    slices = _slices(starts, modules)
    if slices is None:
        if declared is None:
            return None
        raise PlanError(
            "task.model: stages() must hold every trained weight in exactly one stage, and the weights of a stage must "
            "be adjacent in parameters(); correct it or remove it"
        )
    if sample.is_floating_point():
        random = torch.Generator().manual_seed(0)
        x = torch.randn((SAMPLES, *sample.shape[1:]), generator=random).to(sample)
    else:
        # Integers may be indices into a table, and only real samples are sure to be in its range. So rows of the batch
        # are taken, spread over its length: then the two halves of them differ even if the batch has only two rows.
        x = sample[torch.arange(SAMPLES) * len(sample) // SAMPLES]
    differ = not torch.equal(x[:1].expand_as(x), x)
    expected = module(x.clone())
    shapes, stages, layers = [x.shape[1:]], list[Stage](), list[Layer]()
    for part, (start, stop) in zip(modules, slices, strict=True):
        copy = x.clone()
        output = part(copy)
        overwrites = not torch.equal(copy, x)
        layers += _layers(len(stages), part, x, output, starts)
        stages.append(Stage(part, start, stop, differ and _is_separate(part, x, output), overwrites))
        x = output.clone()
        shapes.append(x.shape[1:])
    if x.shape != expected.shape or not torch.equal(x, expected):
        if declared is None:
            return None
        raise PlanError(
            "task.model: stages() one after the other must give exactly the module's output, but do not; "
            "correct it or remove it"
        )
    return Pipeline(tuple(stages), tuple(shapes), tuple(layers))


def _flat(modules: Sequence[nn.Module]) -> Iterator[nn.Module]:
    for module in modules:
        if _is_sequence(module):
            yield from _flat([*module])
        else:
            yield module


def _is_sequence(module: nn.Module) -> TypeGuard[nn.Sequential]:
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def tied_weights(module: nn.Module) -> tuple[str, str] | None:
    """Two names of one trained weight that two stages of an nn.Sequential share; None if there are none."""
    if not _is_sequence(module):
        return None
    names = dict[int, str]()
    for name, weight in module.named_parameters(remove_duplicate=False):
        if names.setdefault(id(weight), name) != name and weight.requires_grad:
            return names[id(weight)], name
    return None


def _slices(starts: Mapping[int, int], modules: Sequence[nn.Module]) -> list[tuple[int, int]] | None:
    """Each stage's slice of the flat weight vector, given where each parameter starts, by its id; None if weights are
    shared, left out or scattered."""
    slices, seen = list[tuple[int, int]](), list[int]()
    for part in modules:
        own = trained_parameters(part)
        if not {id(p) for p in own} <= starts.keys():
            return None
        seen += [id(p) for p in own]
        start = min((starts[id(p)] for p in own), default=0)
        stop = max((starts[id(p)] + p.numel() for p in own), default=0)
        if stop - start != sum(p.numel() for p in own):
            return None
        slices.append((start, stop))
    return slices if sorted(seen) == sorted(starts) else None


def _is_separate(part: nn.Module, x: Tensor, output: Tensor) -> bool:
    if output.shape[:1] != x.shape[:1]:
        return False
    halves = torch.cat([part(half.clone()) for half in torch.chunk(x, 2)])
    return halves.shape == output.shape and torch.allclose(halves, output, rtol=1e-3, atol=1e-4)


def _layers(number: int, part: nn.Module, x: Tensor, output: Tensor, starts: Mapping[int, int]) -> Iterator[Layer]:
    """The stage itself if it is a layer, and otherwise the layers inside it whose output it adds to its own."""
    for module in part.modules():
        if not isinstance(module, nn.Conv2d | nn.Linear) or id(module.weight) not in starts:
            continue
        if responds(module, x.shape[1:]) if module is part else _is_added(module, part, x, output):
            units = len(module.weight)
            fan = module.weight.numel() // units
            biases = None if module.bias is None else starts.get(id(module.bias))
            yield Layer(number, module is not part, module, units, fan, starts[id(module.weight)], biases)


def _is_added(module: nn.Module, part: nn.Module, x: Tensor, output: Tensor) -> bool:
    """Whether a change of a layer's output changes the output of the stage around it equally; found by trying one."""
    shift = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output)
    seen = list[torch.Size]()

    def move(_: nn.Module, inputs: tuple[Tensor, ...], y: Tensor) -> Tensor:
        seen.append(inputs[0].shape)
        return y + shift if y.shape == shift.shape else y

    hook = module.register_forward_hook(move)
    try:
        moved = part(x.clone())
    finally:
        hook.remove()
    return (
        len(seen) == 1
        and responds(module, seen[0][1:])
        and torch.allclose(moved, output + shift, rtol=1e-4, atol=1e-4 * float(output.abs().max()))
    )


def responds(module: nn.Module, shape: torch.Size) -> bool:
    """Whether a module's response to a change of a few input channels can be computed alone."""
    if type(module) is nn.Linear:
        return len(shape) == 1
    return (
        type(module) is nn.Conv2d
        and module.groups == 1
        and module.padding_mode == "zeros"
        and not isinstance(module.padding, str)
        and len(shape) == 3
    )


def widened(module: nn.Module, shape: torch.Size, start: int, stop: int) -> tuple[int, int] | None:
    """The range of a module's output channels that depends on a range of its input channels; None if the module is not
    known to keep channels apart. `shape` is the shape of its input for one sample."""
    if type(module) in ELEMENTWISE or (type(module) in POOLS and len(shape) == 3):
        return start, stop
    if type(module) is nn.Flatten and (module.start_dim, module.end_dim) == (1, -1):
        size = math.prod(shape[1:])
        return start * size, stop * size
    if type(module) is nn.GroupNorm:
        size = module.num_channels // module.num_groups
        return start // size * size, -(-stop // size) * size
    return None
