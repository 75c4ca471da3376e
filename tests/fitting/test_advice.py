"""What a fit will cost, and which settings suit it, before it runs."""

from pathlib import Path
from typing import Any

import pytest

import baffle
from baffle.task.prices import Price
from baffle.tune import tuning
from tests.fitting.test_fit import fit, shared, small, vectors
from tests.fitting.test_onnx import bag_of_words, sentences

PLAN = {"rounds": 8, "probe.k": 8}


def test_costs_are_those_of_the_plan(tmp_path: Path) -> None:
    costs = baffle.costs(small(), shared(*vectors(120)), plan=PLAN)
    run = fit(tmp_path, small(), shared(*vectors(120)), None, 8)
    assert costs["n_weights"] == run["n_weights"]
    assert costs["forwards_in_all"] == run["forwards"]
    assert costs["seconds"] > 0
    with pytest.raises(baffle.BaffleError, match="the plan says 7, but clients is a list with the data of 4"):
        baffle.costs(small(), shared(*vectors(60)), plan={"federation.clients": 7})


@pytest.mark.parametrize("kind", ["module", "onnx"])
def test_a_tuned_plan_is_one_that_a_fit_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    dense = Price(1e-3, {"supports": "dense", "distribution": "rademacher"})
    monkeypatch.setattr(tuning, "prices_of", lambda *_task: {"dense": dense})  # measuring takes longer than the trials
    model: Any = small() if kind == "module" else bag_of_words(tmp_path / "theirs.onnx")
    clients = shared(*(vectors(120) if kind == "module" else sentences(120)))
    advice = baffle.tuned(model, clients, plan=PLAN)
    assert "rate" in capsys.readouterr().out
    chosen = {reason.key: reason.after for reason in advice.reasons}
    assert advice.plan.update.rate == chosen["update.rate"]
    assert advice.plan.task == baffle.Plan().task  # no name of an object is left in it
    assert advice.plan.rounds == 8
    run = baffle.fit(model, clients, plan=advice.plan, out=tmp_path / "run", progress=False)
    assert run.plan.probe.sigma == chosen["probe.sigma"]
