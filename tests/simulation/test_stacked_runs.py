"""Runs of stacked clients keep the guarantees of others, and say what they are."""

import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from baffle.errors import PlanError
from baffle.journal.audit import verify
from baffle.plan import Plan, change
from baffle.simulation import baseline_of, resume, simulate
from baffle.task.load import load_task

MakePlan = Callable[..., Plan]
Cli = Callable[..., CompletedProcess[str]]
STACKED = "probe.stacked=true"


@pytest.mark.parametrize(
    "way",
    [
        [],
        ["probe.distribution=outer", "probe.k=9"],
        ["run.runtime=onnx", "task.init=numpy"],
        ["federation.clients=6", "federation.dropout=0.4", "federation.tiers=[{k=3, share=0.5}]"],
    ],
)
def test_a_stacked_run_can_be_replayed_continued_and_hidden(tiny: MakePlan, tmp_path: Path, way: list[str]) -> None:
    plan = load_task(tiny(STACKED, "rounds=4", "run.snapshot_every=2", *way)).plan
    whole = simulate(plan, tmp_path / "whole")
    simulate(change(plan, ["rounds=2"]), tmp_path / "parts")
    assert resume(tmp_path / "parts", ["rounds=4"])["weights_sha256"] == whole["weights_sha256"]
    assert verify(tmp_path / "whole").weights_sha256 == whole["weights_sha256"]
    shown = simulate(change(plan, ["secure.mode=off"]), tmp_path / "shown")
    assert shown["weights_sha256"] == whole["weights_sha256"]


def test_stacking_is_part_of_what_determines_the_weights(tiny: MakePlan) -> None:
    assert tiny(STACKED).trajectory_digest() != tiny().trajectory_digest()
    assert tiny("probe.stacked=false").trajectory_digest() == tiny().trajectory_digest()


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        (["federation.level=epoch"], "probe.stacked needs clients at the same weights"),
        (["federation.seeds=own"], "probe.stacked needs clients at the same weights"),
        (["estimator=backprop"], "probe.stacked needs clients at the same weights"),
        (["probe.supports=units"], "probe.stacked needs whole forward passes"),
    ],
)
def test_what_cannot_be_stacked_is_refused(tiny: MakePlan, settings: list[str], complaint: str) -> None:
    with pytest.raises(PlanError, match=complaint):
        tiny(STACKED, *settings)


def test_samples_that_cannot_be_told_apart_are_refused(
    tiny: MakePlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(PlanError, match="depends on the others in its batch"):
        load_task(tiny(STACKED, 'task.model={name="lenet", channels=[2, 3], norm="batch"}'))
    (tmp_path / "average.py").write_text("def loss(outputs, labels):\n    return (outputs ** 2).mean()\n")
    monkeypatch.chdir(tmp_path)
    shared = ["run.runtime=torch", "probe.distribution=outer", "probe.k=9", "probe.together=9"]
    for runtime in (["run.runtime=torch"], ["run.runtime=onnx", "task.init=numpy"], shared):
        with pytest.raises(PlanError, match=r"task\.loss gives the mean of a batch, expected one loss for each sample"):
            load_task(tiny(STACKED, "task.loss=average:loss", *runtime))


def test_a_baseline_is_not_stacked(tiny: MakePlan) -> None:
    assert not baseline_of(tiny(STACKED)).probe.stacked


def test_the_plan_of_a_crowd_runs_without_any_file(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BAFFLE_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    done = cli("run", "digits-crowd", "--set", "rounds=3", "--set", "probe.k=8", "--out", tmp_path / "run", "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["rounds"] == 3
    assert cli("verify", tmp_path / "run").returncode == 0


@pytest.mark.slow
def test_the_plan_of_a_crowd_learns(cli: Cli, tmp_path: Path) -> None:
    done = cli("run", "digits-crowd", "--set", "rounds=60", "--out", tmp_path / "run", "--json")
    assert json.loads(done.stdout)["test_accuracy"] > 0.85
