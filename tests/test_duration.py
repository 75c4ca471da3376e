"""How long a run will take: from measured probes, near the truth, and in a second or two."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from baffle.duration import measure_duration
from baffle.journal.folder import RunFolder
from baffle.plan import Plan, load
from baffle.simulation import begin
from baffle.task.load import load_task

WITHIN = 1.6
"""How far a prediction may be off. It is right within a third (benchmarks/duration.py); caches are shared with whatever
else runs."""


@pytest.mark.slow
@pytest.mark.parametrize("init", ["numpy", ""], ids=["ONNX Runtime", "PyTorch"])
def test_a_prediction_is_near_the_truth(tmp_path: Path, init: str) -> None:
    """In CPU seconds of one thread, which other work on the machine does not lengthen."""
    task = load_task(load("digits", [f"task.init={init}", "rounds=30", "run.workers=1"]))
    predicted = measure_duration(task, time.process_time).total
    moments = list[float]()

    def note(_: object) -> bool:
        moments.append(time.process_time())
        return False

    begin(RunFolder.new(tmp_path / "run"), task, stop=note)
    seconds = (time.process_time() - moments[0]) * 30 / 29
    assert len(moments) == 30
    assert seconds / WITHIN < predicted < seconds * WITHIN


def test_it_is_given_by_the_clock_on_the_wall_too(tiny: Callable[..., Plan]) -> None:
    assert 0 < measure_duration(load_task(tiny())).total < 60


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
    ],
    ids=["epoch", "own seeds", "backprop", "participation", "tiers"],
)
def test_every_kind_of_plan_has_a_duration(tiny: Callable[..., Plan], settings: list[str]) -> None:
    measured = measure_duration(load_task(tiny(*settings)))
    assert measured.total > 6 * measured.overhead > 0
    assert measured.forward > 0


def test_more_rounds_take_longer(tiny: Callable[..., Plan]) -> None:
    short, long = (measure_duration(load_task(tiny(f"rounds={rounds}"))).total for rounds in (10, 1000))
    assert long > 10 * short
