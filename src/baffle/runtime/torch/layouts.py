"""Chooses the supports of a module's directions, and how many directions each gets, by measurements on the module."""

import time
from collections.abc import Sequence
from copy import deepcopy
from typing import Literal

from torch import nn

from baffle.core.arrays import F32
from baffle.core.directions import GAUSSIAN, Directions, Support
from baffle.core.ports import Batch
from baffle.core.supports import Layout, LayoutEntry, allocate
from baffle.errors import PlanError
from baffle.runtime.torch.criteria import TorchCriterion, cross_entropy
from baffle.runtime.torch.loss import TorchLoss, weights_of
from baffle.runtime.torch.stages import Pipeline, tied_weights, unit_support
from baffle.runtime.torch.structured import Structured

Mode = Literal["stages", "units"]

SAMPLES = 32
"""Samples that costs are measured on. Only the ratios of the costs matter."""

DIRECTIONS = 64
"""A family of supports is measured with at most this many directions."""

TURNS = 3
"""How often a family is measured."""

ENOUGH = 0.1
"""Seconds of processor time for measuring a family, roughly."""

GAIN = 2.0
"""The units of a stage get their own directions if these are this many times cheaper than directions of the stage."""


def propose(module: nn.Module, batch: Batch, mode: Mode, k: int, loss: TorchCriterion = cross_entropy) -> Layout:
    """Share out k directions among the stages of a module, or among the output units of its layers."""
    module = deepcopy(module)
    weights = weights_of(module)
    structured = TorchLoss(module, loss, structured=True).on(batch.take(slice(SAMPLES)))
    if not isinstance(structured, Structured):
        raise PlanError(_why_no_pipeline(module, mode))
    structured(weights)
    families = families_of(structured.pipeline, mode)
    costs = [_cost(structured, weights, family) for family in families]
    if mode == "units":
        families, costs = _worth_it(structured, weights, families, costs)
    supports = [support for family in families for support in family]
    if k < len(supports):
        raise PlanError(f"probe.k: expected a direction for each of the {len(supports)} {mode}, got {k}")
    support_costs = [cost for family, cost in zip(families, costs, strict=True) for _ in family]
    counts = _evened(families, allocate([support.size for support in supports], support_costs, k))
    return tuple(map(LayoutEntry, supports, counts))


def _why_no_pipeline(module: nn.Module, mode: Mode) -> str:
    if tied := tied_weights(module):
        return (
            f'probe.supports: {tied[0]} and {tied[1]} are one tied weight in two stages, so "{mode}" cannot move '
            'either alone; set probe.supports = "layers", which moves the weight in both places at once'
        )
    return (
        f'probe.supports: task.model is not a pipeline of stages, so it has no "{mode}"; set probe.supports = '
        '"layers", or make it an nn.Sequential, or give it a method stages()'
    )


def _worth_it(
    loss: Structured, weights: F32, families: list[list[Support]], costs: list[float]
) -> tuple[list[list[Support]], list[float]]:
    """Replace the units of a stage by the whole stage, as one support, where moving units is not cheaper: a scalar
    tells equally much about either."""
    kept_families = list[list[Support]]()
    kept_costs = list[float]()
    for stage in loss.pipeline.stages:
        own = [
            (family, cost)
            for family, cost in zip(families, costs, strict=True)
            if stage.start <= family[0].start < stage.stop
        ]
        if any(len(family) > 1 for family, _ in own):
            whole = [Support(stage.start, stage.stop)]
            cost_of_whole = _cost(loss, weights, whole)
            if all(cost > cost_of_whole / GAIN for family, cost in own if len(family) > 1):
                own = [(whole, cost_of_whole)]
        kept_families += [family for family, _ in own]
        kept_costs += [cost for _, cost in own]
    return kept_families, kept_costs


def families_of(pipeline: Pipeline, mode: Mode) -> list[list[Support]]:
    """The supports, in families of similar ones: the units of each layer, and what is left of a stage without its
    units. A final linear layer is one support, because all its outputs are needed anyway."""
    layers = list(pipeline.layers) if mode == "units" else []
    if layers and isinstance(layers[-1].module, nn.Linear):
        layers.pop()
    families = list[list[Support]]()
    for number, stage in enumerate(pipeline.stages):
        own = [layer for layer in layers if layer.stage == number]
        families += [[unit_support(layer, unit, unit + 1) for unit in range(layer.units)] for layer in own]
        taken = [unit_support(layer, 0, layer.units) for layer in own]
        slices = sorted((part.start, part.stop) for support in taken for part, _ in support.parts())
        edge = stage.start
        for start, stop in [*slices, (stage.stop, stage.stop)]:
            if edge < start:
                families.append([Support(edge, start)])
            edge = stop
    return families


def _cost(loss: Structured, weights: F32, family: Sequence[Support]) -> float:
    """Seconds of processor time for one scalar: the least of a few tries, because other work can only add to it.

    Directions are cheaper together than alone, so as many are tried at once as time allows. The first call does not
    count, because it allocates memory that all later calls use.
    """
    directions = Directions(bytes(32), GAUSSIAN)

    def seconds(count: int) -> float:
        trial = [family[i % len(family)] for i in range(count)]
        start = time.process_time()
        loss.along(weights, directions, trial, 1e-3)
        return max(time.process_time() - start, 1e-7)

    seconds(1)
    count = 1
    while count < DIRECTIONS and seconds(count) < ENOUGH / TURNS / 2:
        count *= 2
    return min(seconds(count) for _ in range(TURNS)) / count


def _evened(families: Sequence[Sequence[Support]], counts: Sequence[int]) -> list[int]:
    """Give all supports of a family the same count. A support alone in its family takes the rest; without one, keep
    `counts`."""
    alone = [number for number, family in enumerate(families) if len(family) == 1]
    if not alone:
        return list(counts)
    evened = list[int]()
    start = 0
    for family in families:
        evened.append(min(counts[start : start + len(family)]))
        start += len(family)
    largest = max(alone, key=lambda number: evened[number])
    evened[largest] += sum(counts) - sum(count * len(family) for count, family in zip(evened, families, strict=True))
    return [count for count, family in zip(evened, families, strict=True) for _ in family]
