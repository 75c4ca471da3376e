"""Memory limits: a client's process stays below the limit, by its high-water mark, or the limit is refused."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from baffle.errors import PlanError
from baffle.plan import Plan
from baffle.task.load import load_task
from baffle.task.memory import MEGABYTE

LENET = 'task.model={name="lenet"}'
PLAN = """
task = {{data = "memory_client:images", model = {{name = "{model}"}}}}
federation = {{clients = 1, batch = {batch}}}
probe = {{k = {k}, memory_mb = {limit}, distribution = "{directions}"}}
secure.mode = "off"
"""


def _client(model: str, limit: int, batch: int = 64, k: int = 1, directions: str = "gaussian") -> dict[str, Any]:
    script = str(Path(__file__).with_name("memory_client.py"))
    plan = PLAN.format(model=model, limit=limit, batch=batch, k=k, directions=directions)
    command = [sys.executable, script, plan]
    report: dict[str, Any] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return report


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="high-water marks are read from /proc")
@pytest.mark.parametrize(("model", "limits"), [("lenet", (8, 14)), ("wrn", (9, 24))])
def test_a_process_stays_below_its_limit_and_makes_use_of_it(model: str, limits: tuple[int, int]) -> None:
    small, large = (_client(model, limit) for limit in limits)
    for report, limit in ((small, limits[0]), (large, limits[1])):
        assert report["taken"] <= report["bound"] <= limit * MEGABYTE
        assert report["bound"] <= 4 * report["taken"] + 4 * MEGABYTE
    assert 1 <= small["micro_batch"] < large["micro_batch"]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="high-water marks are read from /proc")
def test_directions_that_share_a_pass_stay_below_the_limit_and_make_use_of_it() -> None:
    small, large = (_client("lenet", limit, batch=2, k=200, directions="outer") for limit in (20, 60))
    for report, limit in ((small, 20), (large, 60)):
        assert report["taken"] <= report["bound"] <= limit * MEGABYTE
        assert report["bound"] <= 4 * report["taken"] + 4 * MEGABYTE
    assert 8 <= small["together"] < large["together"]


def test_without_a_limit_nothing_changes_and_a_wide_one_changes_no_size(tiny: Callable[..., Plan]) -> None:
    free, wide = (load_task(tiny(LENET, f"probe.memory_mb={limit}")).plan for limit in (0, 4000))
    assert free.probe.micro_batch == wide.probe.micro_batch
    assert free.trajectory_digest() != wide.trajectory_digest()


def test_a_limit_too_low_is_refused_with_the_least_possible_one(tiny: Callable[..., Plan]) -> None:
    with pytest.raises(PlanError, match=r"need at least \d+ MB, got 1$") as refused:
        load_task(tiny(LENET, "probe.memory_mb=1"))
    least = int(str(refused.value).split(" MB")[0].split()[-1])
    assert load_task(tiny(LENET, f"probe.memory_mb={least}")).plan.probe.micro_batch >= 1
    with pytest.raises(PlanError, match="at least"):
        load_task(tiny(LENET, f"probe.memory_mb={least - 1}"))


def test_a_size_that_the_plan_gives_is_used_or_refused_but_never_changed(tiny: Callable[..., Plan]) -> None:
    limit = ["probe.memory_mb=7", "federation.batch=0"]
    chosen = load_task(tiny(LENET, *limit)).plan.probe.micro_batch
    assert load_task(tiny(LENET, *limit, f"probe.micro_batch={chosen}")).plan.probe.micro_batch == chosen
    with pytest.raises(PlanError, match=r"set probe.micro_batch to at most \d+, or to 0"):
        load_task(tiny(LENET, *limit, "probe.micro_batch=400"))


@pytest.mark.parametrize("supports", ["stages", "units"])
def test_probes_of_parts_have_no_bound_and_say_so(tiny: Callable[..., Plan], supports: str) -> None:
    with pytest.raises(PlanError, match=r'probe.supports = "dense"'):
        load_task(tiny(LENET, "probe.memory_mb=500", f"probe.supports={supports}"))
