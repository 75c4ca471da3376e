"""How long a run will take: from measured probes, near the truth, and in a second or two."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from baffle.duration import measure_duration
from baffle.plan import Plan, load
from baffle.simulation import simulate
from baffle.task.load import load_task

WITHIN = 2.5
"""How far a prediction may be off on a machine that does other work at the same time; it is right within a third on a
quiet one."""


@pytest.mark.slow
@pytest.mark.parametrize("init", ["numpy", ""], ids=["ONNX Runtime", "PyTorch"])
def test_a_prediction_is_near_the_truth(tmp_path: Path, init: str) -> None:
    plan = load("digits", [f"task.init={init}", "rounds=30"])
    predicted = measure_duration(load_task(plan)).total
    seconds = simulate(plan, tmp_path / "run")["seconds"]
    assert seconds / WITHIN < predicted < seconds * WITHIN


def test_it_takes_a_second_or_two_however_long_the_run_is(tiny: Callable[..., Plan]) -> None:
    task = load_task(tiny("rounds=1000000", "probe.k=100000", "secure.mode=on"))
    began = time.perf_counter()
    measured = measure_duration(task)
    assert time.perf_counter() - began < 20
    assert measured.total > 3600


@pytest.mark.parametrize(
    "settings",
    [
        ['federation.level="epoch"', "federation.steps=3"],
        ['federation.seeds="own"'],
        ['estimator="backprop"'],
        ["federation.participation=0.7", "secure.mode=on", "secure.floor=2"],
        ["federation.tiers=[{k=2, share=0.3}]"],
        ["probe.distribution=outer", "probe.k=9", "run.runtime=torch"],
        ["probe.stacked=true"],
    ],
    ids=["epoch", "own seeds", "backprop", "participation", "tiers", "outer", "stacked"],
)
def test_every_kind_of_plan_has_a_duration(tiny: Callable[..., Plan], settings: list[str]) -> None:
    measured = measure_duration(load_task(tiny(*settings)))
    assert measured.total > 6 * measured.overhead > 0
    assert measured.forward > 0


def test_more_rounds_take_longer(tiny: Callable[..., Plan]) -> None:
    short, long = (measure_duration(load_task(tiny(f"rounds={rounds}"))).total for rounds in (10, 1000))
    assert long > 10 * short
