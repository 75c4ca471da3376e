"""The size of micro-batches: a rule for small batches, a short measurement for larger ones, the same results."""

import time
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from baffle.core.ports import Batch
from baffle.models.lenet import lenet
from baffle.models.wrn import wrn
from baffle.plan import Plan
from baffle.runtime.torch.loss import TorchLoss, weights_of
from baffle.task import micro_batch
from baffle.task.load import load_task
from baffle.task.micro_batch import RULE, SECONDS, SIZES, quickest

LENET = 'task.model={name="lenet", channels=[4, 4]}'


def _batch(n: int, shape: tuple[int, ...] = (1, 8, 8)) -> Batch:
    random = np.random.default_rng(0)
    return Batch(random.standard_normal((n, *shape)).astype(np.float32), random.integers(0, 10, n))


def _chosen(make: Callable[[], nn.Module], batch: Batch) -> int:
    return quickest(lambda size: TorchLoss(make(), micro_batch=size), weights_of(make()), batch)


class Slow(nn.Module):
    """Slow, except for one number of samples."""

    fast_size = 16

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        until = time.process_time() + (0.0 if len(x) == self.fast_size else 2e-4 * len(x))
        output: Tensor = self.linear(x.flatten(1))
        while time.process_time() < until:
            pass
        return output


@pytest.mark.parametrize("fast_size", [8, 16, 32, 64, 128])
def test_the_fastest_size_is_chosen(monkeypatch: pytest.MonkeyPatch, fast_size: int) -> None:
    monkeypatch.setattr(Slow, "fast_size", fast_size)
    assert _chosen(Slow, _batch(200)) == fast_size


def test_sizes_that_hardly_differ_leave_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Slow, "fast_size", 0)
    assert _chosen(Slow, _batch(200)) == RULE


def test_no_size_above_the_batch_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Slow, "fast_size", 128)
    assert _chosen(Slow, _batch(127)) == RULE


@pytest.mark.parametrize("n", [1, 7, 64])
def test_small_batches_follow_the_rule_without_a_measurement(n: int) -> None:
    def fail(_: int) -> TorchLoss:
        raise AssertionError

    assert quickest(fail, np.zeros(0, np.float32), _batch(n)) == n


def _batch_statistics() -> nn.Module:
    torch.manual_seed(0)
    module = lenet((1, 8, 8), 10, (4, 4), norm="batch")
    nn.init.zeros_(module[-1].weight)  # type: ignore[arg-type]
    return module


def test_a_model_of_batch_statistics_keeps_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(micro_batch, "_seconds_a_sample", fail)
    assert _chosen(_batch_statistics, _batch(200)) == RULE


def test_a_large_model_is_not_measured_for_long() -> None:
    began = time.process_time()
    assert _chosen(lambda: wrn((3, 32, 32), 10, widen=4), _batch(256, (3, 32, 32))) in SIZES
    assert time.process_time() - began < 4 * SECONDS  # the rest is for building the model on a busy machine


@pytest.mark.parametrize(
    ("settings", "measured"),
    [
        (["federation.batch=64"], False),
        (["federation.batch=65"], True),
        (["federation.batch=0"], True),
        (["federation.batch=0", "probe.micro_batch=7"], False),
        (["federation.batch=0", "federation.clients=30"], False),
        (["federation.batch=0", 'estimator="backprop"'], False),
    ],
)
def test_a_plan_is_measured_where_it_leaves_a_large_batch_open(
    tiny: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch, settings: list[str], measured: bool
) -> None:
    calls: list[int] = []

    def seconds(*arguments: object) -> dict[int, float]:
        calls.append(len(arguments))
        return {RULE: 2.0, 16: 1.0}

    monkeypatch.setattr(micro_batch, "_seconds_a_sample", seconds)
    task = load_task(tiny(LENET, *settings))
    assert bool(calls) == measured
    assert (task.plan.probe.micro_batch == 16) == measured
    assert load_task(task.plan).plan == task.plan
    assert bool(calls) == measured
    assert len(calls) <= 1
