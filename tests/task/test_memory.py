"""How many samples run at once: a rule, a short measurement, and limits on memory that a client's process respects."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from baffle.core.arrays import F32
from baffle.core.ports import Batch
from baffle.core.probe import Loss
from baffle.errors import PlanError
from baffle.models.networks import lenet
from baffle.plan import Plan
from baffle.runtime.torch.loss import TorchLoss, weights_of
from baffle.stopwatch import TURNS, Stopwatch
from baffle.task.load import load_task
from baffle.task.memory import MEGABYTE, RULE, SECONDS, quickest_size
from tests.support.clocks import FakeClock

MakePlan = Callable[..., Plan]


SMALL_LENET = 'task.model={name="lenet", channels=[4, 4]}'
NOTHING = np.zeros(0, np.float32)


def _batch(n: int) -> Batch:
    random = np.random.default_rng(0)
    return Batch(random.standard_normal((n, 1, 8, 8)).astype(np.float32), random.integers(0, 10, n))


@dataclass
class Timed:
    """A runtime whose passes take a known time for a sample: `slow` seconds, but a thousandth at one size."""

    slow: float
    fast_size: int = 0
    clock: FakeClock = field(default_factory=FakeClock)
    tried: list[int] = field(default_factory=list)

    def on(self, batch: Batch) -> Loss:
        n = len(batch.y)

        def loss(_: F32) -> float:
            self.tried.append(n)
            self.clock.sleep(n * self.slow * (0.001 if n == self.fast_size else 1.0))
            return 0.0

        return loss

    def outputs(self, _weights: F32, batch: Batch) -> F32:
        return np.asarray(batch.x)

    def chosen(self, n: int) -> int:
        return quickest_size(lambda _size: self, NOTHING, _batch(n), Stopwatch(self.clock))


@pytest.mark.parametrize("fast_size", [8, 16, 32, 64, 128])
def test_the_fastest_size_is_chosen(fast_size: int) -> None:
    assert Timed(2e-4, fast_size).chosen(200) == fast_size
    assert Timed(2e-4).chosen(200) == RULE  # sizes that hardly differ, and sizes above the batch, leave the rule
    assert Timed(2e-4, fast_size=128).chosen(127) == RULE
    small = Timed(1.0)
    assert [small.chosen(n) for n in (1, 7, 64)] == [1, 7, 64]
    assert small.tried == []  # small batches follow the rule without a measurement


def test_a_large_model_is_not_measured_for_long() -> None:
    """Passes of 64 samples fit into the time once, and those of more samples do not."""
    large = Timed(SECONDS / (TURNS * (RULE + 8)))
    assert large.chosen(256) == RULE
    assert large.tried == [8] * TURNS + [RULE] * TURNS
    assert large.clock.time == pytest.approx(SECONDS)


def test_a_model_of_batch_statistics_keeps_the_rule() -> None:
    torch.manual_seed(0)
    module = lenet((1, 8, 8), 10, (4, 4), norm="batch")
    nn.init.zeros_(module[-1].weight)  # type: ignore[arg-type]

    def no_clock() -> float:
        raise AssertionError

    def runtime(size: int) -> TorchLoss:
        return TorchLoss(module, micro_batch=size)

    assert quickest_size(runtime, weights_of(module), _batch(200), Stopwatch(no_clock)) == RULE


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
    tiny: MakePlan, settings: list[str], measured: bool
) -> None:
    looks = list[float]()

    def clock() -> float:
        """Later turns seem to take longer, so the size that is tried first is chosen."""
        looks.append(2.0 * sum(looks) if looks else 1e-9)
        return looks[-1]

    task = load_task(tiny(SMALL_LENET, *settings), stopwatch=Stopwatch(clock))
    assert bool(looks) == measured
    assert (task.plan.probe.micro_batch == 8) == measured
    looks.clear()
    assert load_task(task.plan, stopwatch=Stopwatch(clock)).plan == task.plan
    assert not looks


LENET = 'task.model={name="lenet"}'
PLAN = """
task = {{data = "memory_client:images", model = {{name = "{model}"}}}}
federation = {{clients = 1, batch = {batch}}}
probe = {{k = {k}, memory_mb = {limit}, distribution = "{directions}"}}
secure.mode = "off"
"""
ONE = {"batch": 64, "k": 1, "directions": "gaussian"}
MANY = {"model": "lenet", "batch": 2, "k": 200, "directions": "outer"}  # they share a pass


def _client(settings: dict[str, object], limit: int) -> dict[str, Any]:
    """What a client's process reports that stays below a limit, and makes use of it."""
    command = [sys.executable, str(Path(__file__).with_name("memory_client.py")), PLAN.format(**settings, limit=limit)]
    report: dict[str, Any] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert report["taken"] <= report["bound"] <= limit * MEGABYTE
    assert report["bound"] <= 4 * report["taken"] + 4 * MEGABYTE
    return report


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="high-water marks are read from /proc")
@pytest.mark.parametrize(
    ("settings", "limits", "size"),
    [
        ({"model": "lenet", **ONE}, (8, 14), "micro_batch"),
        ({"model": "wrn", **ONE}, (9, 24), "micro_batch"),
        (MANY, (20, 60), "together"),
    ],
)
def test_a_process_stays_below_its_limit_and_makes_use_of_it(
    settings: dict[str, object], limits: tuple[int, int], size: str
) -> None:
    small, large = (_client(settings, limit)[size] for limit in limits)
    assert (8 if size == "together" else 1) <= small < large


def test_a_limit_too_low_is_refused_with_the_least_possible_one(tiny: MakePlan) -> None:
    with pytest.raises(PlanError, match=r"need at least \d+ MB, got 1$") as refused:
        load_task(tiny(LENET, "probe.memory_mb=1"))
    least = int(str(refused.value).split(" MB")[0].split()[-1])
    assert load_task(tiny(LENET, f"probe.memory_mb={least}")).plan.probe.micro_batch >= 1
    with pytest.raises(PlanError, match="at least"):
        load_task(tiny(LENET, f"probe.memory_mb={least - 1}"))
    free, wide = (load_task(tiny(LENET, f"probe.memory_mb={limit}")).plan for limit in (0, 4000))
    assert free.probe.micro_batch == wide.probe.micro_batch
    assert free.trajectory_digest() != wide.trajectory_digest()


def test_a_size_that_the_plan_gives_is_used_or_refused_but_never_changed(tiny: MakePlan) -> None:
    limit = ["probe.memory_mb=7", "federation.batch=0"]
    chosen = load_task(tiny(LENET, *limit)).plan.probe.micro_batch
    assert load_task(tiny(LENET, *limit, f"probe.micro_batch={chosen}")).plan.probe.micro_batch == chosen
    with pytest.raises(PlanError, match=r"set probe.micro_batch to at most \d+, or to 0"):
        load_task(tiny(LENET, *limit, "probe.micro_batch=400"))


@pytest.mark.parametrize("supports", ["stages", "units"])
def test_probes_of_parts_have_no_bound_and_say_so(tiny: MakePlan, supports: str) -> None:
    with pytest.raises(PlanError, match=r'probe.supports = "dense"'):
        load_task(tiny(LENET, "probe.memory_mb=500", f"probe.supports={supports}"))
