"""Runs along outer directions keep the guarantees of all others, and what outer directions cannot do is refused."""

from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from torch import nn

from baffle.core.outer import Shapes
from baffle.errors import PlanError
from baffle.journal.audit import verify
from baffle.plan import Plan, change, load
from baffle.simulation import resume, simulate
from baffle.task.load import load_task
from baffle.trajectory import trajectory_of

MakePlan = Callable[..., Plan]
LENET = ['task.model={name="lenet", channels=[2, 3]}', "probe.distribution=outer", "probe.k=12"]
SHAPES = ((2, 1, 5, 5), (2,), (3, 2, 5, 5), (3,), (10, 3), (10,))
WAYS = {
    "dense": LENET,
    "central": [*LENET, "probe.scheme=central"],
    "on ONNX Runtime": [*LENET, "task.init=numpy", "run.runtime=onnx"],
    "a linear model": ["probe.distribution=outer", "probe.k=12"],
    "a linear model's layer": ["probe.distribution=outer", "probe.k=12", "probe.supports=layers"],
    "layers": [*LENET, "probe.supports=layers"],
    "layers on ONNX Runtime": [*LENET, "task.init=numpy", "run.runtime=onnx", "probe.supports=layers"],
    "fewer directions than layers": [*LENET, "probe.supports=layers", "probe.k=2"],
    "stages": [*LENET, "probe.supports=stages"],
    "tiers": [*LENET, "federation.clients=6", "federation.tiers=[{k=5, share=0.5}]"],
    "groups": [*LENET, "federation.clients=6", "secure.groups=2", "secure.combine=median"],
    "groups with own seeds": [*LENET, "federation.clients=6", "secure.groups=2", "secure.group_seeds=own"],
    "own seeds": [*LENET, "federation.seeds=own"],
    "epoch level": [*LENET, "federation.level=epoch", "federation.steps=2"],
    "half precision": [*LENET, "probe.precision=bfloat16", "probe.sigma=0.05"],
    "moments of layers": [*LENET, "update.moments=layers"],
}
EACH = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


def _resolved(plan: Plan) -> Plan:
    """The plan with its layout. Layouts are measured, so runs that are compared must share one."""
    return load_task(plan).plan


@EACH
def test_a_run_can_be_replayed_and_continued_and_masks_change_no_bit(
    tiny: MakePlan, tmp_path: Path, way: list[str]
) -> None:
    plan = _resolved(tiny(*way, "rounds=4", "run.snapshot_every=2", "secure.floor=2"))
    whole = simulate(plan, tmp_path / "whole")
    assert simulate(change(plan, ["rounds=2", "secure.mode=on"]), tmp_path / "parts")["rounds"] == 2
    resumed = resume(tmp_path / "parts", ["rounds=4"])
    assert resumed["weights_sha256"] == whole["weights_sha256"] == verify(tmp_path / "whole").weights_sha256
    assert verify(tmp_path / "parts").chain == verify(tmp_path / "whole").chain


def test_outer_directions_learn(tiny: MakePlan, tmp_path: Path) -> None:
    settings = ["rounds=12", "probe.k=40", "federation.batch=0", "update.rate=0.05", "probe.distribution=outer"]
    assert float(str(simulate(tiny(*settings), tmp_path / "run")["test_accuracy"])) > 0.3


@pytest.mark.parametrize("runtime", ["torch", "onnx"])
def test_the_shapes_of_the_models_tensors_stand_in_the_plan_of_the_run(
    tiny: MakePlan, tmp_path: Path, runtime: str
) -> None:
    simulate(tiny(*LENET, "rounds=1", "task.init=numpy", f"run.runtime={runtime}"), tmp_path / "run")
    assert load(str(tmp_path / "run" / "plan.toml")).probe.shapes == SHAPES


@pytest.mark.parametrize("runtime", ["torch", "onnx"])
def test_shapes_that_are_not_the_models_own_are_refused_on_every_runtime(
    cli: Callable[..., CompletedProcess[str]], tiny_toml: Path, tmp_path: Path, runtime: str
) -> None:
    def run(shapes: Shapes, out: str) -> CompletedProcess[str]:
        given = f"probe.shapes={[list(shape) for shape in shapes]}"
        settings = [*LENET, given, "rounds=1", "task.init=numpy", f"run.runtime={runtime}"]
        return cli("run", tiny_toml, *(part for each in settings for part in ("--set", each)), "--out", tmp_path / out)

    assert run(SHAPES, "own").returncode == 0
    apart = run(((1, 5, 5), (1, 25), *SHAPES[1:]), "apart")  # as many weights
    assert apart.returncode == 2
    assert "probe.shapes are not those of task.model's tensors: expected [[2, 1, 5, 5], " in apart.stderr
    assert not (tmp_path / "apart").exists()


def test_other_directions_have_no_shapes(tiny: MakePlan, tmp_path: Path) -> None:
    simulate(tiny("rounds=1"), tmp_path / "run")
    assert load(str(tmp_path / "run" / "plan.toml")).probe.shapes == ()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["probe.distribution=outer", "probe.supports=units"], 'outer directions touch whole tensors; .* got "units"'),
        (["probe.shapes=[[3, 4]]"], "only outer directions have them"),
        (["probe.distribution=outer", "probe.shapes=[[3, 0]]"], "shapes"),
        (["probe.distribution=outer", "probe.shapes=[3]"], "shapes"),
        (["probe.distribution=inner"], "'gaussian', 'rademacher', 'sphere', 'outer', got 'inner'"),
    ],
)
def test_what_makes_no_sense_is_refused(tiny: MakePlan, settings: list[str], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        tiny(*settings)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["probe.shapes=[]"], "are not those of the model's 15 weights"),
        (["probe.shapes=[[3, 4], [4]]"], "are not those of the model's 15 weights"),
        (
            ["probe.shapes=[[3, 4], [3]]", "probe.supports=layers", "probe.layout=[[0, 11, 0, 0, 4]]"],
            "weights 0 to 11 cut one; leave it out",
        ),
        (
            ["probe.shapes=[[3, 4], [3]]", "probe.supports=stages", "probe.layout=[[0, 12, 13, 15, 4]]"],
            "weights 13 to 15 cut one; leave it out",
        ),
    ],
)
def test_shapes_and_supports_that_do_not_fit_the_model_are_refused(
    tiny: MakePlan, settings: list[str], says: str
) -> None:
    with pytest.raises(PlanError, match=says):
        trajectory_of(tiny("probe.distribution=outer", "ring.n_max=5", *settings), 15)


def test_a_frozen_backbone_has_outer_directions_for_its_head(tiny: MakePlan) -> None:
    plan = _resolved(tiny('task.model={name="custom", factory="tests.simulation.test_outer_runs:headed"}', *LENET[1:]))
    assert plan.probe.shapes == ((10, 16), (10,))


def headed() -> nn.Module:
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    for weight in module[1].parameters():
        weight.requires_grad = False
    return module
