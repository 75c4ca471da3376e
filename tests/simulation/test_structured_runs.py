"""Directions that touch only a part of the weights, outer directions and stacked clients: what the plan of a run holds
of them, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import numpy as np
import pytest
from torch import nn

from baffle.errors import PlanError
from baffle.journal.audit import verify
from baffle.measuring.costs import costs
from baffle.plan import Plan, change, load
from baffle.simulation import baseline_of, simulate
from baffle.task.load import load_task
from baffle.trajectory import trajectory_of

MakePlan = Callable[..., Plan]
Cli = Callable[..., CompletedProcess[str]]
LENET = 'task.model={name="lenet", channels=[2, 3]}'
OUTER = "probe.distribution=outer"
SHAPES = ((2, 1, 5, 5), (2,), (3, 2, 5, 5), (3,), (10, 3), (10,))
STACKED = "probe.stacked=true"
FIFTEEN = (OUTER, "ring.n_max=5", "probe.shapes=[[3, 4], [3]]")
LAYERS = ("ring.n_max=9", "update.moments=layers")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["probe.layout=[[0, 5, 0, 0, 4]]"], "dense directions have none"),
        (["probe.supports=units", "probe.k=5", "probe.layout=[[0, 5, 0, 0, 4]]"], "add up to probe.k = 5"),
        (["probe.supports=units", "probe.k=4", "probe.layout=[[5, 5, 0, 0, 4]]"], "every row"),
        (["probe.supports=unit"], "'dense', 'layers', 'stages', 'units'"),
        (["update.moments=layers", "update.optimizer=sgd"], "only \"adam\" has second moments, got .* 'sgd'"),
        (["update.layers=[[0, 650, 0, 0]]"], "moments of single weights need none"),
        (["update.moments=layers", "update.layers=[[6, 5, 0, 0]]"], "every row"),
        ([OUTER, "probe.supports=units"], 'outer directions touch whole tensors; .* got "units"'),
        (["probe.shapes=[[3, 4]]"], "only outer directions have them"),
        ([OUTER, "probe.shapes=[[3, 0]]"], "shapes"),
        ([OUTER, "probe.shapes=[3]"], "shapes"),
        (
            ["probe.distribution=inner"],
            "'gaussian', 'rademacher', 'sphere', 'outer' or \"package.module:function\", got 'inner'",
        ),
        ([STACKED, "federation.level=epoch"], "probe.stacked needs clients at the same weights"),
        ([STACKED, "federation.seeds=own"], "probe.stacked needs clients at the same weights"),
        ([STACKED, "estimator=backprop"], "probe.stacked needs clients at the same weights"),
        ([STACKED, "probe.supports=units"], "probe.stacked needs whole forward passes"),
    ],
)
def test_what_makes_no_sense_is_refused(tiny: MakePlan, settings: list[str], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        tiny(*settings)


@pytest.mark.parametrize(
    ("settings", "n", "says"),
    [
        (["probe.supports=units"], 100, "layout is empty"),
        (["probe.supports=units", "probe.layout=[[0, 5000000, 0, 0, 4]]"], 100, "beyond the model"),
        ([*FIFTEEN, "probe.shapes=[]"], 15, "are not those of the model's 15 weights"),
        ([*FIFTEEN, "probe.shapes=[[3, 4], [4]]"], 15, "are not those of the model's 15 weights"),
        ([*FIFTEEN, "probe.supports=layers", "probe.layout=[[0, 11, 0, 0, 4]]"], 15, "weights 0 to 11 cut one"),
        ([*FIFTEEN, "probe.supports=stages", "probe.layout=[[0, 12, 13, 15, 4]]"], 15, "weights 13 to 15 cut one"),
        ([*LAYERS, "update.layers=[]"], 10, r"update\.layers do not hold each of the model's 10 weights once"),
        ([*LAYERS, "update.layers=[[0, 10, 0, 0], [9, 10, 0, 0]]"], 10, "10 weights once"),
        ([*LAYERS, "update.layers=[[1, 10, 0, 0]]"], 10, "10 weights once"),
        ([*LAYERS, "update.layers=[[0, 4, 5, 11], [4, 5, 0, 0]]"], 10, "10 weights once"),
    ],
)
def test_what_does_not_fit_the_model_is_refused(tiny: MakePlan, settings: list[str], n: int, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        trajectory_of(tiny(*settings), n)


@pytest.mark.parametrize(
    "way",
    [
        ["probe.supports=stages", "probe.k=12"],
        ["probe.supports=units", "probe.k=24", "federation.clients=6", "federation.tiers=[{k=12, share=0.5}]"],
        ["probe.supports=layers", "probe.k=12"],
        ["probe.supports=layers", "probe.k=2"],
    ],
)
def test_the_layout_is_written_to_the_plan_of_the_run(tiny: MakePlan, tmp_path: Path, way: list[str]) -> None:
    simulate(tiny(LENET, *way, "rounds=1"), tmp_path / "run")
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
    task = load_task(tiny(LENET, "probe.supports=units", "probe.k=60"))
    trajectory = trajectory_of(task.plan, len(task.initial_weights()))
    assert set(trajectory.supports[:30]) == set(trajectory.supports)


def test_fewer_directions_than_layers_are_shared_by_neighbours_and_the_user_is_told(tiny: MakePlan) -> None:
    task = load_task(tiny(LENET, "probe.supports=layers", "probe.k=2"))
    first, second, last = task.model.layers() or ()
    assert [row[:2] for row in task.plan.probe.layout] == [(first.start, first.stop), (second.start, last.stop)]
    assert costs(task).advice == [
        "probe.k = 2 directions are fewer than the model's 3 layers: neighbouring small layers share directions, 2 "
        "parts in all; set probe.k to at least 3 to keep them apart"
    ]
    assert costs(load_task(tiny(LENET, "probe.supports=layers", "probe.k=3"))).advice == []
    with pytest.raises(PlanError, match="a direction for each"):
        load_task(tiny(LENET, "probe.supports=units", "probe.k=2"))


@pytest.mark.parametrize("way", [["task.init=numpy"], ["estimator=backprop"], ["probe.supports=stages"]])
def test_layers_of_the_optimizer_are_the_models_whatever_the_directions(
    tiny: MakePlan, tmp_path: Path, way: list[str]
) -> None:
    plan = tiny(LENET, "update.moments=layers", "probe.k=5", "rounds=2", *way)
    summary = simulate(plan, tmp_path / "run")
    stored = load(str(tmp_path / "run" / "plan.toml"))
    assert stored.update.layers == ((0, 52, 0, 0), (52, 205, 0, 0), (205, 245, 0, 0))
    assert verify(tmp_path / "run").weights_sha256 == summary["weights_sha256"]
    other = simulate(change(stored, ["update.moments=weights", "update.layers=[]"]), tmp_path / "other")
    assert other["weights_sha256"] != summary["weights_sha256"]
    assert load_task(stored).plan == stored


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


def test_the_expected_alignment_counts_directions_per_weight(tiny: MakePlan) -> None:
    """Dense: √(K/(K+n+1)). Two halves with half of the directions each align as well as the whole."""
    dense = costs(load_task(tiny(LENET, "probe.k=24")))
    assert dense.alignment == pytest.approx(np.sqrt(24 / (24 + dense.n_weights + 1)))
    half = dense.n_weights // 2
    layout = f"probe.layout=[[0, {half}, 0, 0, 12], [{half}, {dense.n_weights}, 0, 0, 12]]"
    halves = costs(load_task(tiny(LENET, "probe.k=24", "probe.supports=stages", layout)))
    assert halves.alignment == pytest.approx(dense.alignment, rel=1e-2)


# Outer directions


@pytest.mark.parametrize("runtime", ["torch", "onnx"])
def test_the_shapes_of_a_plan_are_those_of_the_models_tensors(tiny: MakePlan, runtime: str) -> None:
    settings = (LENET, OUTER, "probe.k=12", "task.init=numpy", f"run.runtime={runtime}")
    assert load_task(tiny(*settings)).plan.probe.shapes == SHAPES
    apart = [[1, 5, 5], [1, 25], *map(list, SHAPES[1:])]  # as many weights
    with pytest.raises(PlanError, match=r"not those of task.model's tensors: expected \[\[2, 1, 5, 5\], "):
        load_task(tiny(*settings, f"probe.shapes={apart}"))


def test_a_frozen_backbone_has_outer_directions_for_its_head(tiny: MakePlan) -> None:
    model = f'task.model={{name="custom", factory="{__name__}:headed"}}'
    assert load_task(tiny(model, OUTER, "probe.k=12")).plan.probe.shapes == ((10, 16), (10,))


def headed() -> nn.Module:
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    for weight in module[1].parameters():
        weight.requires_grad = False
    return module


# Stacked clients


def test_stacking_is_part_of_what_determines_the_weights(tiny: MakePlan) -> None:
    assert tiny(STACKED).trajectory_digest() != tiny().trajectory_digest()
    assert tiny("probe.stacked=false").trajectory_digest() == tiny().trajectory_digest()
    assert not baseline_of(tiny(STACKED)).probe.stacked


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
