"""What is found out about a module before a run, by trying it: the memory that it takes, the supports of its
directions, and how many outer directions can share a forward pass."""

import ctypes
import gc
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from baffle.core.arrays import F32, F64
from baffle.core.directions import (
    GAUSSIAN,
    OUTER,
    Directions,
    Layout,
    LayoutEntry,
    Support,
    allocate,
    dense,
    distribution_of,
)
from baffle.core.ports import Batch
from baffle.core.probe import losses_along
from baffle.errors import BaffleError, PlanError, first_line
from baffle.runtime.torch.loss import TorchCriterion, TorchLoss, cross_entropy, weights_of
from baffle.runtime.torch.stages import Pipeline, tied_weights, unit_support
from baffle.runtime.torch.structured import Structured
from baffle.runtime.torch.tensors import trained_parameters
from baffle.stopwatch import Stopwatch


class Tally(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of live tensors that were created while it is active; `peak` is the maximum. A convolution
    counts its input and output twice, because it may work on copies in another memory layout."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        self.peak = 0
        self._users = dict[int, int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        arguments = {tensor.untyped_storage().data_ptr() for tensor in _tensors((args, kwargs))}
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            address = storage.data_ptr()
            if address in self._users or address not in arguments:
                self.live += 0 if address in self._users else storage.nbytes()
                self._users[address] = self._users.get(address, 0) + 1
                weakref.finalize(tensor, self._leave, address, storage.nbytes())
        copies = sum(tensor.nbytes for tensor in _tensors((args, result))) if "conv" in func.name() else 0
        self.peak = max(self.peak, self.live + copies)
        return result

    def _leave(self, address: int, size: int) -> None:
        self._users[address] -= 1
        if not self._users[address]:
            del self._users[address]
            self.live -= size


def tensor_bytes(work: Callable[[], object]) -> int:
    """The peak bytes of tensors that a computation on a CPU adds to those that existed before."""
    tally = Tally()
    with tally:
        work()
    return tally.peak


def grown(work: Callable[[], object]) -> int:
    """By how many bytes `work` raises this process's high-water mark above its present memory. Free memory is returned
    to the system first. Only meaningful in a fresh process on Linux."""
    status = Path("/proc/self/status")
    if not status.exists():
        raise BaffleError("the high-water mark of a process can only be measured on Linux: no /proc/self/status")
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark

    def kilobytes(name: str) -> int:
        return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith(name))

    before = kilobytes("VmRSS")
    work()
    return 1024 * (kilobytes("VmHWM") - before)


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


Mode = Literal["stages", "units"]

Family = list[Support]  # similar supports, such as the units of a layer

Priced = tuple[Family, float]  # a family, and the CPU seconds of a scalar of it

SAMPLES = 32  # samples that costs are measured on. Only the ratios of the costs matter.

DIRECTIONS = 64  # a family of supports is measured with at most this many directions

SECONDS = 0.1  # CPU seconds for measuring a family, roughly

LEAST_SECONDS = 1e-9  # no scalar is counted as cheaper than this, since costs are divided by each other

GAIN = 2.0
"""The units of a stage get their own directions if these are this many times cheaper than directions of the stage."""


def propose(
    module: nn.Module,
    batch: Batch,
    mode: Mode,
    k: int,
    loss: TorchCriterion = cross_entropy,
    stopwatch: Stopwatch | None = None,
    left: Callable[[Family], Sequence[Support]] = tuple,
) -> Layout:
    """Share out k directions among the stages of a module, or among the output units of its layers, as far as they are
    `left` to directions."""
    structured, weights = _structured(module, batch, mode, loss)
    structured(weights)
    measure = partial(_cost, structured, weights, stopwatch or Stopwatch())
    priced = [(family, measure(family)) for family in families_of(structured.pipeline, mode)]
    if mode == "units":
        priced = _worth_it(structured.pipeline, measure, priced)
    priced = [(list(rest), cost) for family, cost in priced if (rest := left(family))]
    families = [family for family, _ in priced]
    supports = [support for family in families for support in family]
    if k < len(supports):
        raise PlanError(f"probe.k: expected a direction for each of the {len(supports)} {mode}, got {k}")
    support_costs = [cost for family, cost in priced for _ in family]
    counts = _evened(families, allocate([support.size for support in supports], support_costs, k))
    return tuple(map(LayoutEntry, supports, counts))


def own_supports(module: nn.Module, batch: Batch, mode: Mode, loss: TorchCriterion) -> set[Support]:
    """All supports that a layout of this module may have: its stages and, for units, what these are made of."""
    pipeline = _structured(module, batch, mode, loss)[0].pipeline
    stages = {Support(stage.start, stage.stop) for stage in pipeline.stages}
    return stages.union(*families_of(pipeline, mode))


def _structured(module: nn.Module, batch: Batch, mode: Mode, loss: TorchCriterion) -> tuple[Structured, F32]:
    """A copy of a module as a pipeline on a few samples, and its weights. Refuses modules that are no pipeline."""
    module = deepcopy(module)
    weights = weights_of(module)
    structured = TorchLoss(module, loss, structured=True).on(batch.take(slice(SAMPLES)))
    if not isinstance(structured, Structured):
        if tied := tied_weights(module):
            raise PlanError(
                f'probe.supports: {tied[0]} and {tied[1]} are one tied weight in two stages, so "{mode}" cannot move '
                'either alone; set probe.supports = "layers", which moves the weight in both places at once'
            )
        raise PlanError(
            f'probe.supports: task.model is not a pipeline of stages, so it has no "{mode}"; set probe.supports = '
            '"layers", or make it an nn.Sequential, or give it a method stages()'
        )
    return structured, weights


def _worth_it(pipeline: Pipeline, measure: Callable[[Family], float], priced: list[Priced]) -> list[Priced]:
    """Replace the units of a stage by the stage as one support where that is not dearer: both tell equally much."""
    kept = list[Priced]()
    for stage in pipeline.stages:
        own = [(family, cost) for family, cost in priced if stage.start <= family[0].start < stage.stop]
        if any(len(family) > 1 for family, _ in own):
            whole = [Support(stage.start, stage.stop)]
            cost_of_whole = measure(whole)
            if all(cost > cost_of_whole / GAIN for family, cost in own if len(family) > 1):
                own = [(whole, cost_of_whole)]
        kept += own
    return kept


def families_of(pipeline: Pipeline, mode: Mode) -> list[Family]:
    """The supports, in families of similar ones: the units of each layer, and what is left of a stage without its
    units. A final linear layer is one support, because all its outputs are needed anyway."""
    layers = list(pipeline.layers) if mode == "units" else []
    if layers and isinstance(layers[-1].module, nn.Linear):
        layers.pop()
    families = list[Family]()
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


def _cost(loss: Structured, weights: F32, stopwatch: Stopwatch, family: Family) -> float:
    """CPU seconds of one scalar. Directions are cheaper together than alone, so many are tried at once."""
    directions = Directions(bytes(32), GAUSSIAN)

    def probe(count: int) -> object:
        return loss.along(weights, directions, [family[i % len(family)] for i in range(count)], 1e-3)

    return max(stopwatch.seconds_each(probe, DIRECTIONS, SECONDS), LEAST_SECONDS)


def _evened(families: Sequence[Family], counts: Sequence[int]) -> list[int]:
    """Give all supports of a family the same count. A support alone in its family takes the rest, if there is one."""
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


TRIED = 4  # directions in a trial of a shared pass

STEP, TOLERANCE = 1e-2, 1e-9
"""A pass for many directions must give the losses of one pass each, in float64, after a step of this length."""

LEAST = 8  # fewer directions may take less time in a pass each (benchmarks/outer.py)


def how_many(k: int, each: int, room: int) -> int:
    """How many of k directions share a pass whose tensors take `each` bytes for a direction and `room` in all."""
    most = min(k, room // each)
    return most if most >= LEAST else 1


def why_not_together(module: nn.Module, criterion: TorchCriterion, batch: Batch) -> str:
    """Why this module's directions cannot share a pass; empty if they can. A user's module may contain anything, so a
    pass is tried. A warning that PyTorch would run directions one by one is a reason, too."""
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("error")
            expected, got = (_tried(module, criterion, batch, torch.float64, together)() for together in (1, TRIED))
    except Exception as fault:  # a user's module may raise anything
        return first_line(fault)
    if not np.allclose(got, expected, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True):
        return "a pass for many directions gives other losses than one for each; does it use PyTorch's functions alone?"
    return ""


def bytes_each(module: nn.Module, criterion: TorchCriterion, batch: Batch) -> int:
    """The peak bytes of tensors for each direction of a pass on this batch."""
    return max(1, tensor_bytes(_tried(module, criterion, batch, torch.float32, TRIED)) // TRIED)


def _tried(
    module: nn.Module, criterion: TorchCriterion, batch: Batch, dtype: torch.dtype, together: int
) -> Callable[[], F64]:
    """Computes the losses along a few outer directions of a copy of this module."""
    weights = weights_of(module)
    shapes = tuple(tuple(parameter.shape) for parameter in trained_parameters(module) if parameter.numel())
    directions = Directions(bytes(32), distribution_of(OUTER, shapes))
    loss = TorchLoss(deepcopy(module), criterion, dtype=dtype, together=together).on(batch)
    exact: F32 = weights.astype(np.float64) if dtype == torch.float64 else weights
    return partial(losses_along, loss, exact, directions, dense(len(weights), TRIED), STEP)
