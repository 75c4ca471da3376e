"""Settling a plan: what it leaves open is filled in, the same in every version, and a settled plan stays as it is."""

from collections.abc import Callable
from typing import cast

import pytest

from baffle.data.sources import Source
from baffle.errors import PlanError
from baffle.plan import Plan, load, parse
from baffle.runtime.model import RunnableModel
from baffle.stopwatch import Stopwatch
from baffle.task.load import load_server_task
from baffle.task.server_task import ServerTask
from baffle.task.settle import Circumstances, set_sizes
from tests.conftest import TINY

STILL = Stopwatch(lambda: 0.0)  # nothing takes any time, so that measurements give the same plan on every machine

LENET = ('task.model={name="lenet", channels=[2, 3]}', "run.runtime=torch", "probe.k=24")

PRESETS = {
    "authors-mnist-lenet": "5bf33cdc2b32fa41",
    "digits": "3da0d58a243fa9e7",
    "digits-crowd": "ff548dede7dbc673",
    "dlzo-mnist": "e4c203feaa1626e3",
    "fedavg-mnist-lenet": "b3e968551fc7561e",
    "fedsgd-mnist-lenet": "f4f3f214273d5b61",
    "fedzo-mnist": "aa8569992990ecae",
    "paper-mnist-lenet": "5b12582b74238d0f",
}
"""The beginnings of settled plans' digests: runs of earlier versions go on only if these stay."""

SETTLED: dict[str, tuple[str, tuple[str, ...]]] = {
    "tiny": ("538ac48ee4041802", ()),
    "all samples": ("bdbe91eb98391a84", ("federation.batch=0",)),
    "uniform": ("5c92b8068a621919", ("federation.weighting=uniform",)),
    "epoch": ("217e5175eba6bc83", ('federation.level="epoch"', "federation.steps=3")),
    "tiers": ("bb94442ab1ee84ac", ("federation.tiers=[{k=2, share=0.34}]",)),
    "backprop": ("c4296f1f87a355ef", (*LENET, "estimator=backprop", "probe.supports=auto")),
    "auto": ("f8135f28b39eb86e", (*LENET, "probe.supports=auto")),
    "layers": ("d6d9d69d3ae17082", (*LENET, "probe.supports=layers")),
    "stages": ("852d308094122a16", (*LENET, "probe.supports=stages")),
    "units": ("8cfede9743cf8c3c", (*LENET, "probe.supports=units")),
    "outer": ("fb1d6ffa45076419", (*LENET, "probe.distribution=outer")),
    "stacked": ("a3e2909e5fab0af8", (*LENET, "probe.stacked=true")),
    "memory": ("bcf97dc52d9a186c", (*LENET, "probe.memory_mb=7", "federation.batch=0")),
    "moments of layers": ("a71049c1ee5b1ee7", (*LENET, "update.moments=layers")),
    "bfloat16": ("8392726680f06d69", (*LENET, "probe.precision=bfloat16")),
    "noise": ("8b57e7283df53c58", ("privacy.noise=0.1", "privacy.clip=5.0", "federation.weighting=uniform")),
    "epsilon": ("ba988f06ec18fb0f", ("privacy.epsilon=8.0", "privacy.clip=5.0", "federation.weighting=uniform")),
}
"""The same of the tiny plan with these settings."""


@pytest.mark.parametrize("name", [*PRESETS, *SETTLED])
def test_settled_plans_are_those_of_earlier_versions(name: str) -> None:
    digest, settings = SETTLED[name] if name in SETTLED else (PRESETS[name], ())
    plan = load(name) if name in PRESETS else parse(TINY, settings)
    settled = load_server_task(plan, None, 300, stopwatch=STILL).plan
    assert settled.trajectory_digest().hex()[:16] == digest
    assert load_server_task(settled, None, 300, stopwatch=STILL).plan == settled


@pytest.mark.parametrize(
    ("settings", "n_max", "micro_batch"),
    [
        ([], 30, 32),
        (["federation.batch=200"], 30, 64),
        (["federation.batch=0"], 30, 30),
        (["federation.weighting=uniform"], 1, 32),
        (["ring.n_max=7", "probe.micro_batch=5"], 7, 5),
    ],
)
def test_sizes_follow_a_rule(tiny: Callable[..., Plan], settings: list[str], n_max: int, micro_batch: int) -> None:
    plan = _with_sizes(tiny(*settings), 30)
    assert (plan.ring.n_max, plan.probe.micro_batch) == (n_max, micro_batch)
    assert _with_sizes(plan, 30) == plan


def _with_sizes(plan: Plan, largest: int) -> Plan:
    task = ServerTask(plan, cast(RunnableModel, None), cast(Source, None))  # neither is looked at
    return set_sizes(task, Circumstances(largest, plan.probe.micro_batch > 0)).plan


def test_clients_whose_samples_overflow_the_ring_are_refused(tiny: Callable[..., Plan]) -> None:
    with pytest.raises(PlanError, match=r"ring\.n_max: 3 clients.*at most 178956970.*uniform"):
        _with_sizes(tiny("ring.n_max=178956971"), 5)
    _with_sizes(tiny("ring.n_max=178956970"), 5)
