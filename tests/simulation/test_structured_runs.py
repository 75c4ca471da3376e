"""Runs whose directions touch only a part of the weights keep the guarantees of dense ones."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from torch import nn

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
    "layers": [LENET, "probe.supports=layers", "probe.k=12"],
    "layers at epoch level": [LENET, "probe.supports=layers", "federation.level=epoch", "federation.steps=2"],
    "layers on ONNX Runtime": [LENET, "task.init=numpy", "run.runtime=onnx", "probe.supports=layers", "probe.k=7"],
    "layers in tiers": [LENET, "probe.supports=layers", "probe.k=24", "federation.clients=6", TIERS],
    "layers on the sphere": [LENET, "probe.supports=layers", "probe.distribution=sphere", "probe.scheme=central"],
    "layers, own seeds": [LENET, "probe.supports=layers", "federation.seeds=own"],
    "layers, groups with own seeds": [
        *(LENET, "probe.supports=layers", "federation.clients=6", "secure.groups=2", "secure.group_seeds=own"),
    ],
    "moments of layers": [LENET, "probe.supports=layers", "update.moments=layers"],
    "moments of layers at epoch level": [
        *(LENET, "probe.supports=layers", "update.moments=layers", "federation.level=epoch", "federation.steps=2"),
    ],
    "fewer directions than layers": [LENET, "probe.supports=layers", "probe.k=2"],
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
        (["probe.supports=unit"], "'dense', 'layers', 'stages', 'units'"),
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


def test_fewer_directions_than_layers_are_shared_by_neighbours_and_the_user_is_told(tiny: MakePlan) -> None:
    task = load_task(tiny(LENET, "probe.supports=layers", "probe.k=2"))
    first, second, last = task.model.layers() or ()
    assert [row[:2] for row in task.plan.probe.layout] == [(first.start, first.stop), (second.start, last.stop)]
    assert costs(task).advice == [
        "probe.k = 2 directions are fewer than the model's 3 layers: neighbouring small layers share directions, 2 "
        "parts in all; set probe.k to at least 3 to keep them apart"
    ]
    assert costs(load_task(tiny(LENET, "probe.supports=layers", "probe.k=3"))).advice == []


@pytest.mark.parametrize("way", [["task.init=numpy"], ["estimator=backprop"], ["probe.supports=stages"]])
def test_layers_of_the_optimizer_are_the_models_whatever_the_directions(
    tiny: MakePlan, tmp_path: Path, way: list[str]
) -> None:
    plan = tiny(LENET, "update.moments=layers", "probe.k=5", "rounds=3", *way)
    summary = simulate(plan, tmp_path / "run")
    stored = load(str(tmp_path / "run" / "plan.toml"))
    assert stored.update.layers == ((0, 52, 0, 0), (52, 205, 0, 0), (205, 245, 0, 0))
    assert verify(tmp_path / "run").weights_sha256 == summary["weights_sha256"]
    assert (
        simulate(change(plan, ["update.moments=weights"]), tmp_path / "other")["weights_sha256"]
        != (summary["weights_sha256"])
    )
    assert load_task(stored).plan == stored


@pytest.mark.parametrize(
    "rows",
    ["[]", "[[0, 9, 0, 0]]", "[[0, 10, 0, 0], [9, 10, 0, 0]]", "[[1, 10, 0, 0]]", "[[0, 4, 5, 11], [4, 5, 0, 0]]"],
)
def test_layers_that_do_not_hold_every_weight_once_are_refused(tiny: MakePlan, rows: str) -> None:
    plan = tiny("ring.n_max=9", "update.moments=layers", f"update.layers={rows}")
    with pytest.raises(PlanError, match=r"update\.layers do not hold each of the model's 10 weights once"):
        trajectory_of(plan, 10)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (["update.moments=layers", "update.optimizer=sgd"], "only \"adam\" has second moments, got .* 'sgd'"),
        (["update.layers=[[0, 650, 0, 0]]"], "moments of single weights need none"),
        (["update.moments=layers", "update.layers=[[6, 5, 0, 0]]"], "every row"),
    ],
)
def test_layers_that_do_not_fit_the_optimizer_are_refused(tiny: MakePlan, settings: list[str], named: str) -> None:
    with pytest.raises(PlanError, match=named):
        tiny(*settings)


def tied() -> nn.Module:
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 10))
    module.get_submodule("3").weight = module.get_submodule("1").weight
    return module


def test_tied_weights_are_moved_with_the_layer_that_has_them_first(tiny: MakePlan, tmp_path: Path) -> None:
    settings = [f'task.model={{name="custom", factory="{__name__}:tied"}}', "probe.supports=layers", "probe.k=9"]
    summary = simulate(tiny(*settings, "rounds=3"), tmp_path / "run")
    stored = load(str(tmp_path / "run" / "plan.toml"))
    assert [row[:2] for row in stored.probe.layout] == [(0, 4160), (4160, 4224), (4224, 4874)]
    assert verify(tmp_path / "run").weights_sha256 == summary["weights_sha256"]


def test_layers_may_be_probed_in_half_precision_and_in_little_memory(tiny: MakePlan, tmp_path: Path) -> None:
    settings = [LENET, "probe.supports=layers", "probe.precision=bfloat16", "probe.sigma=0.1", "rounds=2"]
    summary = simulate(tiny(*settings, "probe.memory_mb=20"), tmp_path / "run")
    assert verify(tmp_path / "run").weights_sha256 == summary["weights_sha256"]


def test_the_expected_alignment_counts_directions_per_weight(tiny: MakePlan) -> None:
    """Dense: √(K/(K+n+1)). Two halves with half of the directions each align as well as the whole."""
    dense = costs(load_task(tiny(LENET, "probe.k=24")))
    assert dense.alignment == pytest.approx(np.sqrt(24 / (24 + dense.n_weights + 1)))
    half = dense.n_weights // 2
    layout = f"probe.layout=[[0, {half}, 0, 0, 12], [{half}, {dense.n_weights}, 0, 0, 12]]"
    halves = costs(load_task(tiny(LENET, "probe.k=24", "probe.supports=stages", layout)))
    assert halves.alignment == pytest.approx(dense.alignment, rel=1e-2)
