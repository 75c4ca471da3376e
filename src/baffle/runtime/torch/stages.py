"""A module as a pipeline of stages, and the layers in it whose output units can be moved alone.

A direction that touches one stage leaves everything before it as it was; one that touches some output units of a layer
leaves the other units as they were, as far as the modules that follow keep channels apart. What is true of a module is
found out here, once, on a few samples: random ones, or given ones where samples are integers.
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

SAMPLES = 4
"""How many samples a pipeline is tried on."""

ELEMENTWISE = (
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Softplus, nn.Softsign),
    *(nn.Hardswish, nn.Hardsigmoid, nn.Hardtanh, nn.Sigmoid, nn.Tanh, nn.Identity, nn.Dropout, nn.Dropout2d),
)
POOLS = (nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d)


@dataclass(frozen=True)
class Stage:
    """One module of the pipeline, with its slice of the flat weight vector (empty if it has no trained weights)."""

    module: nn.Module
    start: int
    stop: int
    separate: bool  # no sample's output depends on the other samples
    overwrites: bool  # it works in place, so an input that is still needed must be copied


class Layer(NamedTuple):
    """A convolution or a linear layer whose output units each have filters, and a bias, of their own. It is a stage, or
    it stands inside one that adds the layer's output to its own, as a residual block does."""

    stage: int
    inside: bool
    module: nn.Conv2d | nn.Linear
    units: int
    fan: int  # weights of one filter
    filters: int  # where its filters start in the flat weight vector
    biases: int | None  # where its trained biases do


class Units(NamedTuple):
    """A support that is a range of one layer's output units, with their biases or without."""

    layer: Layer
    start: int
    stop: int
    biased: bool


class Route(NamedTuple):
    """The way of a change from a layer to the output: stages that keep channels apart, then a stage whose response to a
    change can be computed alone (or not), then the rest of the pipeline."""

    tail: range
    answers: bool
    rest: range


@dataclass(frozen=True)
class Pipeline:
    """Stages whose composition is the module."""

    stages: tuple[Stage, ...]
    shapes: tuple[torch.Size, ...]
    """What each stage is given, for one sample; the last is what the module gives."""
    layers: tuple[Layer, ...]

    def route(self, layer: Layer) -> Route:
        """How a change of some of a layer's units goes on."""
        stop = layer.stage + 1
        while stop < len(self.stages) and widened(self.stages[stop].module, self.shapes[stop], 0, 1) is not None:
            stop += 1
        answers = stop < len(self.stages) and responds(self.stages[stop].module, self.shapes[stop])
        return Route(range(layer.stage + 1, stop), answers, range(stop + answers, len(self.stages)))

    def ranges(self, units: Units) -> list[tuple[int, int]]:
        """The channels that a range of units moves: in the layer's own output, and after each stage of its tail."""
        found = [(units.start, units.stop)]
        for number in self.route(units.layer).tail:
            reached = widened(self.stages[number].module, self.shapes[number], *found[-1])
            assert reached is not None
            found.append(reached)
        return found

    def units(self, support: Support) -> Units | None:
        """The units that a support consists of, if it does."""
        for layer in self.layers:
            first, end = layer.filters, layer.filters + layer.units * layer.fan
            if not first <= support.start < end:
                continue
            whole = layer.biases == end and support == Support(first, end + layer.units)
            start, stop = (support.start - first) // layer.fan, (support.stop - first) // layer.fan
            start, stop = (0, layer.units) if whole else (start, min(stop, layer.units))
            for biased in (True, False) if layer.biases is not None else (False,):
                if whole or support == unit_support(layer, start, stop, biased=biased):
                    return Units(layer, start, stop, biased)
        return None

    def first_stage(self, support: Support) -> int:
        """The first stage that a support touches."""
        touched = [where for where, _ in support.parts() if where.start < where.stop]
        return min(
            (
                number
                for number, stage in enumerate(self.stages)
                if any(where.start < stage.stop and stage.start < where.stop for where in touched)
            ),
            default=len(self.stages) - 1,
        )


def unit_support(layer: Layer, start: int, stop: int, *, biased: bool = True) -> Support:
    """The filters and biases of a range of units."""
    biases = layer.biases if biased else None
    tail = (0, 0) if biases is None else (biases + start, biases + stop)
    return Support(layer.filters + start * layer.fan, layer.filters + stop * layer.fan, tail)


@torch.no_grad()
def pipeline_of(module: nn.Module, sample: Tensor) -> Pipeline | None:
    """The pipeline that a module says it is, by a method `stages()` or by being an nn.Sequential; none otherwise.

    `sample` is a batch. Of floats only the shape matters; integers must be values that the module accepts.
    """
    named = getattr(module, "stages", None)
    said = named() if callable(named) and not isinstance(named, nn.Module) else None
    if said is None and not _is_sequence(module):
        return None
    modules = list(_flat([module] if said is None else said))
    starts = _starts(module)
    slices = _slices(starts, modules)
    if slices is None:
        if said is None:
            return None
        raise PlanError(
            "task.model: stages() must hold every trained weight in exactly one stage, those of a stage side by side "
            "in parameters(); correct it or remove it"
        )
    x = _tried(sample)
    differ = not torch.equal(x[:1].expand_as(x), x)
    expected, shapes, stages, layers = module(x.clone()), [x.shape[1:]], list[Stage](), list[Layer]()
    for part, (start, stop) in zip(modules, slices, strict=True):
        given = x.clone()
        output = part(given)
        overwrites = not torch.equal(given, x)
        layers += _layers(len(stages), part, x, output, starts)
        stages.append(Stage(part, start, stop, differ and _is_separate(part, x, output), overwrites))
        x = output.clone()
        shapes.append(x.shape[1:])
    if x.shape != expected.shape or not torch.equal(x, expected):
        if said is None:
            return None
        raise PlanError(
            "task.model: stages() one after the other must give exactly what the module gives, and do not; "
            "correct it or remove it"
        )
    return Pipeline(tuple(stages), tuple(shapes), tuple(layers))


def _tried(sample: Tensor) -> Tensor:
    """Samples to try a module on. Integers may be indices into a table, and only those of real samples are sure to be
    in its range, so rows of the batch are taken, spread over its length: the two halves of the result then differ, even
    where the batch has only two rows."""
    if sample.is_floating_point():
        random = torch.Generator().manual_seed(0)
        return torch.randn((SAMPLES, *sample.shape[1:]), generator=random).to(sample)
    return sample[torch.arange(SAMPLES) * len(sample) // SAMPLES]


def _flat(modules: Sequence[nn.Module]) -> Iterator[nn.Module]:
    for module in modules:
        if _is_sequence(module):
            yield from _flat([*module])
        else:
            yield module


def _is_sequence(module: nn.Module) -> TypeGuard[nn.Sequential]:
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def _starts(module: nn.Module) -> dict[int, int]:
    """Where each trained parameter starts in the flat weight vector, by its identity."""
    trained = [p for p in module.parameters() if p.requires_grad]
    return dict(zip(map(id, trained), itertools.accumulate((p.numel() for p in trained), initial=0), strict=False))


def _slices(starts: Mapping[int, int], modules: Sequence[nn.Module]) -> list[tuple[int, int]] | None:
    """Each stage's slice of the flat weight vector; none if weights are shared, left out or scattered."""
    slices, seen = list[tuple[int, int]](), list[int]()
    for part in modules:
        own = [p for p in part.parameters() if p.requires_grad]
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
    """The stage itself, or the layers inside it whose output it adds to its own."""
    for module in part.modules():
        if not isinstance(module, nn.Conv2d | nn.Linear) or id(module.weight) not in starts:
            continue
        if responds(module, x.shape[1:]) if module is part else _is_added(module, part, x, output):
            units, size = len(module.weight), module.weight.numel()
            biases = None if module.bias is None else starts.get(id(module.bias))
            yield Layer(number, module is not part, module, units, size // units, starts[id(module.weight)], biases)


def _is_added(module: nn.Module, part: nn.Module, x: Tensor, output: Tensor) -> bool:
    """Whether a change of a layer's output is a change of the output of the stage around it, by trying one."""
    shift = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output)
    seen = list[torch.Size]()

    def move(_: nn.Module, given: tuple[Tensor, ...], found: Tensor) -> Tensor:
        seen.append(given[0].shape)
        return found + shift if found.shape == shift.shape else found

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
    """Whether a module's response to a change of some input channels is known: a plain linear layer or convolution."""
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
    """The range of a module's output channels that depends on a range of its input channels; none if the module is not
    known to keep channels apart. `shape` is what it is given for one sample."""
    if type(module) in ELEMENTWISE or (type(module) in POOLS and len(shape) == 3):
        return start, stop
    if type(module) is nn.Flatten and (module.start_dim, module.end_dim) == (1, -1):
        each = math.prod(shape[1:])
        return start * each, stop * each
    if type(module) is nn.GroupNorm:
        each = module.num_channels // module.num_groups
        return start // each * each, -(-stop // each) * each
    return None
