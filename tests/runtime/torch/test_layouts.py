"""Proposed layouts: every weight is covered, every direction is used, and similar units get equally many."""

import numpy as np
import pytest
import torch
from torch import nn

from baffle.core.directions import Support, coverage, supports
from baffle.core.ports import Batch
from baffle.errors import PlanError
from baffle.models.networks import lenet
from baffle.runtime.torch import trials
from baffle.runtime.torch.loss import cross_entropy, weights_of
from baffle.runtime.torch.trials import Mode, own_supports, propose
from tests.support.modules import Made

N = 3 * 25 + 3 + 4 * 75 + 4 + 40 + 10


@pytest.fixture(autouse=True)
def _any_gain_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured times must not decide whether a test passes."""
    monkeypatch.setattr(trials, "GAIN", 1e-12)


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
    if mode == "units":
        assert all(len({entry.directions for entry in units}) == 1 for units in (layout[:3], layout[3:7]))
    own = own_supports(module, _batch(), mode, cross_entropy)
    assert {entry.support for entry in layout} <= own
    assert Support(0, 1) not in own
    np.testing.assert_array_equal(weights_of(module), before)
    assert all(p.requires_grad and p.is_leaf for p in module.parameters())


def test_what_is_left_of_a_block_without_its_units_is_one_support() -> None:
    block = Made(
        lambda net, x: net.second(torch.relu(net.first(x))) + net.shortcut(x),
        **{"first": nn.Conv2d(1, 2, 3, padding=1), "second": nn.Conv2d(2, 3, 3, padding=1)},
        shortcut=nn.Conv2d(1, 3, 1, bias=False),
    )
    module = nn.Sequential(block, nn.ReLU(), nn.Flatten(), nn.Linear(192, 10))
    layout = propose(module, _batch(), "units", 50)
    second = [Support(20 + 18 * unit, 38 + 18 * unit, (74 + unit, 75 + unit)) for unit in range(3)]
    shortcut = [Support(77 + unit, 78 + unit) for unit in range(3)]
    assert [entry.support for entry in layout] == [*second, *shortcut, Support(0, 20), Support(80, 80 + 1930)]


def test_units_that_save_nothing_are_moved_with_their_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "GAIN", 1e12)
    layout = propose(_module(), _batch(), "units", 9)
    assert [entry.support for entry in layout] == [Support(0, 78), Support(78, 382), Support(382, N)]


def test_too_few_directions_are_refused() -> None:
    with pytest.raises(PlanError, match=r"probe\.k: expected a direction for each of the 8 units, got 7"):
        propose(_module(), _batch(), "units", 7)


def test_a_module_that_is_no_pipeline_is_refused() -> None:
    with pytest.raises(PlanError) as told:
        propose(Made(lambda net, x: net.inner(x), inner=_module()), _batch(), "stages", 7)
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
