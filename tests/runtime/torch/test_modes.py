"""Modes of a module: probes and evaluation run without dropout, backpropagation with it, and people are told."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from baffle.core.ports import Batch
from baffle.plan import Plan
from baffle.runtime.torch.loss import TorchLoss, weights_of
from baffle.runtime.torch.modes import advice_on_modes
from baffle.simulation import simulate


def dropping() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 20), nn.Dropout(0.5), nn.Linear(20, 10))


def normalising() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(72, 10))


def _batch(count: int = 12) -> Batch:
    random = np.random.default_rng(0)
    return Batch(random.standard_normal((count, 1, 8, 8)).astype(np.float32), random.integers(0, 10, count))


def test_probes_and_outputs_drop_nothing() -> None:
    module = dropping()
    runtime, weights = TorchLoss(module), weights_of(module)
    losses = {runtime.on(_batch())(weights) for _ in range(5)}
    assert len(losses) == 1
    plain = nn.Sequential(*(layer for layer in dropping() if not isinstance(layer, nn.Dropout)))
    assert losses == {TorchLoss(plain).on(_batch())(weights)}


def test_backpropagation_drops_as_its_seed_determines() -> None:
    module = dropping()
    runtime, weights = TorchLoss(module), weights_of(module)
    gradients = [runtime.gradient_on(_batch(), seed)(weights)[1].tobytes() for seed in (1, 1, 2)]
    assert gradients[0] == gradients[1] != gradients[2]
    plain = nn.Sequential(*(layer for layer in dropping() if not isinstance(layer, nn.Dropout)))
    assert gradients[0] != TorchLoss(plain).gradient_on(_batch(), 1)(weights)[1].tobytes()
    assert not module.training


def test_backpropagation_leaves_torchs_generator_alone() -> None:
    runtime, weights = TorchLoss(dropping()), weights_of(dropping())
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    runtime.gradient_on(_batch(), 1)(weights)
    assert torch.equal(torch.rand(3), expected)


def test_running_statistics_stay_as_they_were() -> None:
    module = normalising()
    runtime, weights = TorchLoss(module), weights_of(module)
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    loss = runtime.on(_batch())(weights)
    trained, _ = runtime.gradient_on(_batch())(weights)
    assert trained == pytest.approx(loss, rel=1e-6)
    assert all(torch.equal(buffer, before[name]) for name, buffer in module.named_buffers())


def test_people_are_told_of_dropout_and_of_running_statistics() -> None:
    (dropout,) = advice_on_modes(dropping())
    assert "dropout in layer 2 is off" in dropout
    assert advice_on_modes(dropping(), backpropagates=True) == []
    (statistics,) = advice_on_modes(normalising())
    assert "layer 1 uses its initial running statistics" in statistics
    assert advice_on_modes(nn.Sequential(nn.Dropout(0.0), nn.BatchNorm2d(2, track_running_stats=False))) == []


def test_a_run_says_so_before_it_starts(tiny: Callable[..., Plan], tmp_path: Path) -> None:
    advice = list[str]()
    simulate(tiny(f'task.model={{name="custom", factory="{__name__}:dropping"}}'), tmp_path / "run", warn=advice.append)
    assert any("evaluation mode" in line for line in advice), advice


def test_the_baseline_of_a_model_with_dropout_repeats_itself(tiny: Callable[..., Plan], tmp_path: Path) -> None:
    plan = tiny("estimator=backprop", f'task.model={{name="custom", factory="{__name__}:dropping"}}')
    summaries = [simulate(plan, tmp_path / name) for name in ("one", "two")]
    assert summaries[0]["weights_sha256"] == summaries[1]["weights_sha256"]
