"""Which supports to give a module's directions, and how many each: measured on the module itself."""

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
from baffle.runtime.torch.loss import TorchCriterion, TorchLoss, cross_entropy, weights_of
from baffle.runtime.torch.stages import Pipeline, unit_support
from baffle.runtime.torch.structured import Structured

Mode = Literal["stages", "units"]

SAMPLES = 32
"""As many samples as costs are measured on: they only have to be right relative to each other."""

DIRECTIONS, TURNS, ENOUGH = 64, 3, 0.1
"""A family of supports is measured so often, with up to so many directions, in about so many seconds."""


GAIN = 2.0
"""Units of a stage get directions of their own if these are so much cheaper than directions of the whole stage."""


def propose(module: nn.Module, batch: Batch, mode: Mode, k: int, loss: TorchCriterion = cross_entropy) -> Layout:
    """k directions for supports that are stages of a module, or output units of its layers."""
    module, few = deepcopy(module), Batch(batch.x[:SAMPLES], batch.y[:SAMPLES])
    weights, found = weights_of(module), TorchLoss(module, loss, structured=True).on(few)
    if not isinstance(found, Structured):
        raise PlanError(
            "task.model is not a pipeline of stages, so directions must touch all of it; make it an nn.Sequential "
            "or give it a method stages()"
        )
    found(weights)
    families = families_of(found.pipeline, mode)
    costs = [_cost(found, weights, family) for family in families]
    if mode == "units":
        families, costs = _worth_it(found, weights, families, costs)
    supports = [support for family in families for support in family]
    if k < len(supports):
        raise PlanError(f"probe.k: expected a direction for each of the {len(supports)} {mode}, got {k}")
    each = [cost for family, cost in zip(families, costs, strict=True) for _ in family]
    counts = _evened(families, allocate([support.size for support in supports], each, k))
    return tuple(map(LayoutEntry, supports, counts))


def _worth_it(
    loss: Structured, weights: F32, families: list[list[Support]], costs: list[float]
) -> tuple[list[list[Support]], list[float]]:
    """Without units that are not cheaper to move than the stage they are in, since a scalar tells as much of either.
    Such a stage is one support."""
    kept_families, kept_costs = list[list[Support]](), list[float]()
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
    """The supports, those that are alike together: units, and what is left of a stage without its units. A last linear
    layer is one support: its outputs are all needed anyway."""
    layers = list(pipeline.layers) if mode == "units" else []
    if layers and isinstance(layers[-1].module, nn.Linear):
        layers.pop()
    families = list[list[Support]]()
    for number, stage in enumerate(pipeline.stages):
        own = [layer for layer in layers if layer.stage == number]
        families += [[unit_support(layer, unit, unit + 1) for unit in range(layer.units)] for layer in own]
        taken = [unit_support(layer, 0, layer.units) for layer in own]
        slices = sorted((where.start, where.stop) for support in taken for where, _ in support.parts())
        edge = stage.start
        for start, stop in [*slices, (stage.stop, stage.stop)]:
            if edge < start:
                families.append([Support(edge, start)])
            edge = stop
    return families


def _cost(loss: Structured, weights: F32, family: Sequence[Support]) -> float:
    """Seconds of processor time for one scalar: the least of a few tries, because other work only adds to it.

    Directions are cheaper together than alone, so as many are tried at once as there is time for. What comes first pays
    for memory that all others use, so it does not count.
    """
    directions = Directions(bytes(32), GAUSSIAN)

    def seconds(count: int) -> float:
        trial = [family[i % len(family)] for i in range(count)]
        start = time.process_time()
        loss.along(weights, directions, trial, 1e-3)
        return max(time.process_time() - start, 1e-7)

    count, _ = 1, seconds(1)
    while count < DIRECTIONS and seconds(count) < ENOUGH / TURNS / 2:
        count *= 2
    return min(seconds(count) for _ in range(TURNS)) / count


def _evened(families: Sequence[Sequence[Support]], counts: Sequence[int]) -> list[int]:
    """The same count for all of a family, if there is a support alone in its family to take what is left over."""
    alone = [number for number, family in enumerate(families) if len(family) == 1]
    if not alone:
        return list(counts)
    given, start = list[int](), 0
    for family in families:
        given.append(min(counts[start : start + len(family)]))
        start += len(family)
    taker = max(alone, key=lambda number: given[number])
    given[taker] += sum(counts) - sum(count * len(family) for count, family in zip(given, families, strict=True))
    return [count for count, family in zip(given, families, strict=True) for _ in family]
