"""Runs whose scalars are drawn from their law. How each kind of run ends with the same weights is in test_runs.py."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from baffle.core import law
from baffle.core.messages import Group, Outcome
from baffle.errors import PlanError
from baffle.measuring.costs import costs
from baffle.network.settling import require_sound_terms
from baffle.plan import Plan, change, load
from baffle.report.page import write_report
from baffle.report.record import read_run
from baffle.task.load import load_task
from baffle.trajectory import trajectory_of
from tests.support.one_client import Bowl, Setting, plan_for

MakePlan = Callable[..., Plan]
SMALL = (
    *("rounds=3", 'task.model={name="lenet", channels=[2, 3], head="flatten"}', "federation.clients=6"),
    *("federation.batch=8", "probe.k=12", "secure.floor=2", "probe.distribution=gaussian", "estimator=law"),
)
GROUPS = ("secure.groups=2", "secure.floor=2")


def _plan(*settings: str) -> Plan:
    return load("digits", (*SMALL, *settings))


def _outcome(plan: Plan, numbers: list[int]) -> Outcome:
    return Outcome(0, plan.outcome_kind, (Group(0, np.array(numbers, "<i4").tobytes(), 4),))


def test_one_estimate_is_drawn_for_all_clients_at_batch_level_and_none_again_where_clients_drew(tiny: MakePlan) -> None:
    numbers = [3, -5, 7, 1, 0, 9]
    for settings, by_clients in ((), False), (["federation.level=epoch"], True), (["federation.seeds=own"], True):
        plan = tiny("estimator=law", "probe.distribution=gaussian", "ring.n_max=4", *settings)
        trajectory = trajectory_of(plan, len(numbers))
        sent = np.array(numbers) / (trajectory.ring.scale * 4)
        gradient = trajectory.rule.gradient(_outcome(plan, numbers))
        expected = sent.astype(np.float32)
        if not by_clients:
            expected = law.draw(expected, trajectory.directions(0), trajectory.supports)
            assert not np.allclose(expected, sent)
        assert gradient.tobytes() == expected.tobytes()
        blocks = trajectory_of(plan, len(numbers), block=2).rule.gradient(_outcome(plan, numbers))
        assert blocks.tobytes() == gradient.tobytes()


def test_an_exact_head_passes_unchanged_and_directions_cover_the_rest(tiny: MakePlan) -> None:
    plan = tiny("estimator=law", "probe.distribution=gaussian", "ring.n_max=4", "probe.head=exact")
    plan = change(plan, ["probe.head_at=[2, 4, 0, 0]"])
    gradient = np.arange(1, 7, dtype=np.float32)
    trajectory = trajectory_of(plan, 6)
    drawn = trajectory.drawn(gradient, trajectory.directions(0))
    assert drawn[2:4].tobytes() == gradient[2:4].tobytes()
    assert (drawn != gradient).sum() == 4


def test_a_client_sends_its_gradient_at_batch_level_and_its_own_draw_with_directions_of_its_own(tiny: MakePlan) -> None:
    settings = ("estimator=law", "probe.distribution=gaussian", "probe.k=50")
    found = {}
    for name, more in {"backprop": ("estimator=backprop",), "law": (), "own": ("federation.seeds=own",)}.items():
        runtime = Bowl(5)
        setting = Setting(plan_for(tiny, *settings, *more), runtime)
        found[name] = setting.values()
        assert (runtime.seeds == [None]) == (name != "backprop")  # without one, the model is in evaluation mode
    np.testing.assert_array_equal(found["law"], found["backprop"])
    assert not np.allclose(found["own"], found["law"], atol=1e-3)
    assert found["own"] == pytest.approx(found["law"], abs=0.5)


def test_a_loss_that_is_not_finite_becomes_nothing_where_clients_draw(tiny: MakePlan) -> None:
    settings = ("estimator=law", "probe.distribution=gaussian", "federation.level=epoch")
    for loss in (float("nan"), float("inf")):
        setting = Setting(plan_for(tiny, *settings), Bowl(5, loss=loss))
        with pytest.raises(Exception, match="finite"):
            setting.sent()


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        (["probe.distribution=sphere"], "probe.distribution"),
        (["probe.distribution=rademacher"], "probe.distribution"),
        (["probe.distribution=outer"], "probe.distribution"),
        (["probe.supports=auto"], "probe.supports"),
        (["probe.precision=float16"], "probe.precision"),
        (["probe.memory_mb=100"], "probe.memory_mb"),
        (["probe.stacked=true"], "probe.stacked"),
        (["federation.tiers=[{k=4, share=0.5}]"], "federation.tiers"),
        ([*GROUPS, "secure.groups=3", "secure.combine=median"], "secure.combine"),
        ([*GROUPS, "secure.group_seeds=own"], "secure.group_seeds"),
        (["federation.weighting=uniform", "privacy.noise=0.5"], "privacy"),
        (['task.model={name="onnx"}'], "estimator"),
        (["run.runtime=onnx"], "run.runtime"),
    ],
)
def test_what_the_law_does_not_cover_is_refused_in_one_sentence(settings: list[str], key: str) -> None:
    with pytest.raises(PlanError) as refusal:
        _plan(*settings)
    assert str(refusal.value).startswith(f"{key}: ")
    assert "\n" not in str(refusal.value)


def test_a_network_refuses_it() -> None:
    with pytest.raises(PlanError, match=r'^estimator: "law" is a study'):
        require_sound_terms(_plan())


def test_plan_summary_report_and_terminal_say_that_scalars_were_drawn(
    tmp_path: Path, cli: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    settings = [word for setting in (*SMALL, "rounds=1") for word in ("--set", setting)]
    done = cli("run", *settings, "--out", tmp_path / "run")
    assert "scalars         drawn from their law" in done.stdout
    assert 'estimator = "law": the scalars of this run are drawn, not probed' in done.stderr
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["scalars"] == "drawn"
    page = write_report([tmp_path / "run"]).read_text()
    assert "digits-head (scalars drawn)" in page
    assert "drawn, not probed" in page
    assert read_run(tmp_path / "run").alignment.missing == "the scalars were drawn, not probed"
    planned = cli("plan", *settings)
    assert "drawn from their law" in planned.stdout
    assert "drawn, not probed" in planned.stderr
    assert json.loads(cli("plan", *settings, "--json").stdout)["scalars"] == "drawn"


def test_a_plan_of_the_law_expects_the_alignment_of_its_directions_and_passes_of_backpropagation() -> None:
    ours, probes = (costs(load_task(_plan(f"estimator={name}", "run.runtime=torch"))) for name in ("law", "probe"))
    assert ours.alignment == probes.alignment
    assert (ours.forwards, probes.forwards) == (1, 13)
    assert ours.precision is None
