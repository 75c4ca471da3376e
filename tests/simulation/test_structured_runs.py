"""Runs whose directions touch only a part of the weights keep the guarantees of dense ones."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from baffle.errors import PlanError
from baffle.journal.audit import verify
from baffle.plan import Plan, change, load
from baffle.simulation import resume, simulate
from baffle.task.costs import costs
from baffle.task.load import load_task
from baffle.trajectory import trajectory_of

MakePlan = Callable[..., Plan]
LENET = 'task.model={name="lenet", channels=[2, 3]}'
TIERS = "federation.tiers=[{k=12, share=0.5}]"
WAYS = {
    "stages": [LENET, "probe.supports=stages", "probe.k=12"],
    "units": [LENET, "probe.supports=units", "probe.k=24"],
    "units of a residual net": ['task.model={name="wrn", widen=1}', "probe.supports=stages", "probe.k=8"],
    "stages at epoch level": [LENET, "probe.supports=stages", "probe.k=12", "federation.level=epoch"],
    "units in tiers": [LENET, "probe.supports=units", "probe.k=24", "federation.clients=6", TIERS],
    "units, central": [LENET, "probe.supports=units", "probe.k=24", "probe.scheme=central"],
    "units in groups": [LENET, "probe.supports=units", "probe.k=24", "federation.clients=6", "secure.groups=2"],
}
SLOW = "stages at epoch level"
EACH = pytest.mark.parametrize(
    "way",
    [pytest.param(way, id=name, marks=[pytest.mark.slow] if name == SLOW else []) for name, way in WAYS.items()],
)


def _resolved(plan: Plan) -> Plan:
    """The plan with its layout. Layouts are measured, so runs that are compared must share one."""
    return load_task(plan).plan


@EACH
def test_a_run_can_be_replayed_and_continued(tiny: MakePlan, tmp_path: Path, way: list[str]) -> None:
    plan = _resolved(tiny(*way, "rounds=4", "run.snapshot_every=2"))
    whole = simulate(plan, tmp_path / "whole")
    simulate(change(plan, ["rounds=2"]), tmp_path / "parts")
    resumed = resume(tmp_path / "parts", ["rounds=4"])
    assert resumed["weights_sha256"] == whole["weights_sha256"] == verify(tmp_path / "whole").weights_sha256
    assert verify(tmp_path / "parts").chain == verify(tmp_path / "whole").chain


@EACH
def test_masks_change_no_bit(tiny: MakePlan, tmp_path: Path, way: list[str]) -> None:
    plan = _resolved(tiny(*way, "rounds=3", "secure.floor=2"))
    secure, plain = (simulate(change(plan, [f"secure.mode={mode}"]), tmp_path / mode) for mode in ("on", "off"))
    assert secure["weights_sha256"] == plain["weights_sha256"]


@EACH
def test_the_layout_is_written_to_the_plan_of_the_run(tiny: MakePlan, tmp_path: Path, way: list[str]) -> None:
    simulate(tiny(*way, "rounds=1"), tmp_path / "run")
    plan = load(str(tmp_path / "run" / "plan.toml"))
    assert sum(row[-1] for row in plan.probe.layout) == plan.probe.k
    trajectory = trajectory_of(plan, verify(tmp_path / "run").n_weights)
    touched = np.zeros(trajectory.n, dtype=bool)
    for support in set(trajectory.supports):
        for weights, _ in support.parts():
            touched[weights] = True
    assert touched.all()


def test_every_prefix_of_the_directions_covers_the_model(tiny: MakePlan) -> None:
    """Slower clients evaluate only a prefix, which must not leave out a part of the model."""
    plan = _resolved(tiny(LENET, "probe.supports=units", "probe.k=60"))
    trajectory = trajectory_of(plan, len(load_task(plan).initial_weights()))
    assert set(trajectory.supports[:30]) == set(trajectory.supports)


def test_a_plan_without_a_layout_cannot_be_replayed(tiny: MakePlan) -> None:
    with pytest.raises(PlanError, match="layout is empty"):
        trajectory_of(tiny(LENET, "probe.supports=units"), 100)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (["probe.layout=[[0, 5, 0, 0, 4]]"], "dense directions have none"),
        (["probe.supports=units", "probe.k=5", "probe.layout=[[0, 5, 0, 0, 4]]"], "add up to probe.k = 5"),
        (["probe.supports=units", "probe.k=4", "probe.layout=[[5, 5, 0, 0, 4]]"], "every row"),
        (["probe.supports=unit"], "'dense', 'stages', 'units'"),
    ],
)
def test_a_layout_that_does_not_fit_the_plan_is_refused(tiny: MakePlan, settings: list[str], named: str) -> None:
    with pytest.raises(PlanError, match=named):
        tiny(*settings)


def test_a_layout_beyond_the_model_is_refused(tiny: MakePlan) -> None:
    plan = tiny("probe.supports=units", "probe.k=4", "probe.layout=[[0, 5000000, 0, 0, 4]]")
    with pytest.raises(PlanError, match="beyond the model"):
        trajectory_of(plan, 100)


def test_fewer_directions_than_supports_are_refused(tiny: MakePlan) -> None:
    with pytest.raises(PlanError, match="a direction for each"):
        load_task(tiny(LENET, "probe.supports=units", "probe.k=2"))


def test_the_expected_alignment_counts_directions_per_weight(tiny: MakePlan) -> None:
    """Dense: √(K/(K+n+1)). Two halves with half of the directions each align as well as the whole."""
    dense = costs(load_task(tiny(LENET, "probe.k=24")))
    assert dense.alignment == pytest.approx(np.sqrt(24 / (24 + dense.n_weights + 1)))
    half = dense.n_weights // 2
    layout = f"probe.layout=[[0, {half}, 0, 0, 12], [{half}, {dense.n_weights}, 0, 0, 12]]"
    halves = costs(load_task(tiny(LENET, "probe.k=24", "probe.supports=stages", layout)))
    assert halves.alignment == pytest.approx(dense.alignment, rel=1e-2)
