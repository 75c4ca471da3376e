"""Proposed layouts: every weight is covered, every direction is used, and similar units get equally many."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from baffle.core.arrays import F32, F64
from baffle.core.directions import Directions, Support, coverage
from baffle.core.ports import Batch
from baffle.core.supports import supports
from baffle.errors import PlanError
from baffle.models.lenet import lenet
from baffle.runtime.torch import layouts
from baffle.runtime.torch.layouts import Mode, propose
from baffle.runtime.torch.loss import TorchLoss, weights_of
from baffle.runtime.torch.structured import Structured

N = 3 * 25 + 3 + 4 * 75 + 4 + 40 + 10


@pytest.fixture(autouse=True)
def _any_gain_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured times must not decide whether a test passes."""
    monkeypatch.setattr(layouts, "GAIN", 1e-12)


def _batch() -> Batch:
    random = np.random.default_rng(0)
    return Batch(random.standard_normal((4, 1, 8, 8)).astype(np.float32), random.integers(0, 10, 4))


def _module() -> nn.Module:
    torch.manual_seed(0)
    return lenet((1, 8, 8), 10, (3, 4))


@pytest.mark.parametrize(("mode", "entries"), [("stages", 3), ("units", 8)])
def test_a_layout_covers_every_weight_with_all_directions(mode: Mode, entries: int) -> None:
    module = _module()
    before = weights_of(module)
    layout = propose(module, _batch(), mode, 77)
    assert len(layout) == entries
    assert sum(entry.directions for entry in layout) == 77
    assert coverage(supports(layout), N).min() >= 1
    assert sum(entry.support.size for entry in layout) == N == len(before)
    np.testing.assert_array_equal(weights_of(module), before)
    assert all(p.requires_grad and p.is_leaf for p in module.parameters())


def test_units_of_a_layer_have_equally_many_directions() -> None:
    layout = propose(_module(), _batch(), "units", 101)
    assert len({entry.directions for entry in layout[:3]}) == 1
    assert len({entry.directions for entry in layout[3:7]}) == 1


def test_what_is_left_of_a_block_without_its_units_is_one_support() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(1, 2, 3, padding=1), nn.Conv2d(2, 3, 3, padding=1)
            self.shortcut = nn.Conv2d(1, 3, 1, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = self.second(torch.relu(self.first(x))) + self.shortcut(x)
            return output

    module = nn.Sequential(Block(), nn.ReLU(), nn.Flatten(), nn.Linear(192, 10))
    layout = propose(module, _batch(), "units", 50)
    second = [Support(20 + 18 * unit, 38 + 18 * unit, (74 + unit, 75 + unit)) for unit in range(3)]
    shortcut = [Support(77 + unit, 78 + unit) for unit in range(3)]
    assert [entry.support for entry in layout] == [*second, *shortcut, Support(0, 20), Support(80, 80 + 1930)]


def test_units_that_save_nothing_are_moved_with_their_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layouts, "GAIN", 1e12)
    layout = propose(_module(), _batch(), "units", 9)
    assert [entry.support for entry in layout] == [Support(0, 78), Support(78, 382), Support(382, N)]


def test_the_start_up_cost_of_the_first_direction_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cold start once made units look more expensive than their layer, which made a run fifty times slower."""
    now = 0.0
    tries = list[int]()

    def along(_: Structured, _weights: F32, _all: Directions, supports: Sequence[Support], _step: float) -> F64:
        nonlocal now
        tries.append(len(supports))
        now += (1.0 if len(tries) == 1 else 0.0) + 0.004 + 0.0001 * len(supports)
        return np.zeros(len(supports))

    monkeypatch.setattr(Structured, "along", along)
    monkeypatch.setattr("baffle.runtime.torch.layouts.time.process_time", lambda: now)
    loss = TorchLoss(_module(), structured=True).on(_batch())
    assert isinstance(loss, Structured)
    cost = layouts._cost(loss, np.zeros(N, np.float32), [Support(0, 25)])
    assert tries[-1] == layouts.DIRECTIONS
    assert cost == pytest.approx(0.004 / layouts.DIRECTIONS + 0.0001)


def test_too_few_directions_are_refused() -> None:
    with pytest.raises(PlanError, match=r"probe\.k: expected a direction for each of the 8 units, got 7"):
        propose(_module(), _batch(), "units", 7)


def test_a_module_that_is_no_pipeline_is_refused() -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = _module()

        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = self.inner(x)
            return output

    with pytest.raises(PlanError) as told:
        propose(Whole(), _batch(), "stages", 7)
    assert str(told.value) == (
        'probe.supports: task.model is not a pipeline of stages, so it has no "stages"; set probe.supports = "layers", '
        "or make it an nn.Sequential, or give it a method stages()"
    )


@pytest.mark.parametrize("mode", ["stages", "units"])
def test_tied_weights_are_named(mode: Mode) -> None:
    """A chain of modules is a pipeline but for them, so it would not help to make it an nn.Sequential."""
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 10))
    module.get_submodule("3").weight = module.get_submodule("1").weight
    with pytest.raises(PlanError) as told:
        propose(module, _batch(), mode, 200)
    assert str(told.value) == (
        f'probe.supports: 1.weight and 3.weight are one tied weight in two stages, so "{mode}" cannot move either '
        'alone; set probe.supports = "layers", which moves the weight in both places at once'
    )
