"""How many outer directions share a forward pass: chosen before a run, told, and bounded whoever wrote the plan."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from baffle.errors import PlanError
from baffle.plan import Plan, change, load
from baffle.runtime.outer import LEAST
from baffle.runtime.torch import rows
from baffle.simulation import simulate
from baffle.task import sharing
from baffle.task.costs import costs
from baffle.task.load import load_task

MakePlan = Callable[..., Plan]
OUTER = ('task.model={name="lenet", channels=[2, 3]}', "run.runtime=torch", "probe.distribution=outer", "probe.k=20")

MODELS = """
import torch
from torch import nn

class Recurrent(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.cells = nn.LSTM(8, 4, batch_first=True)
        self.head = nn.Linear(4, classes)
    def forward(self, x):
        return self.head(self.cells(x[:, 0])[0][:, -1])

class Scaled(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.head = nn.Linear(64, classes)
        self.scale = nn.Parameter(torch.ones(()))
    def forward(self, x):
        return self.head(x.flatten(1)) * self.scale

def recurrent(classes):
    return Recurrent(classes)

def scaled(classes):
    return Scaled(classes)
"""


@pytest.fixture
def own_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "uncommon.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)


def own(name: str) -> str:
    return f'task.model={{name="custom", factory="uncommon:{name}"}}'


def test_all_directions_of_a_small_model_share_a_pass(tiny: MakePlan, tmp_path: Path) -> None:
    simulate(tiny(*OUTER, "rounds=1"), tmp_path / "run")
    settled = load(str(tmp_path / "run" / "plan.toml"))
    assert settled.probe.together == 20
    assert load_task(settled).plan == settled


def test_other_directions_share_none(tiny: MakePlan) -> None:
    assert load_task(tiny("run.runtime=torch")).plan.probe.together == 0
    with pytest.raises(PlanError, match=r"probe\.together: only outer directions share a forward pass"):
        tiny("probe.together=8")


@pytest.mark.usefixtures("own_models")
def test_a_model_that_does_not_allow_it_takes_a_pass_each_and_says_why(tiny: MakePlan, tmp_path: Path) -> None:
    plan, told = tiny(*OUTER, own("recurrent"), "rounds=1", "probe.sigma=0.01"), list[str]()
    simulate(plan, tmp_path / "run", warn=told.append)
    assert load(str(tmp_path / "run" / "plan.toml")).probe.together == 1
    (remark,) = [line for line in told if "outer direction" in line]
    assert "lstm of cells.weight_ih_l0" in remark
    assert remark in costs(load_task(plan)).advice
    with pytest.raises(PlanError, match=r"probe\.together: 8 outer directions cannot share .* lstm .* set it to 1"):
        load_task(change(plan, ["probe.together=8"]))


@pytest.mark.usefixtures("own_models")
def test_a_parameter_without_dimensions_is_moved_too(tiny: MakePlan) -> None:
    assert load_task(tiny(*OUTER, own("scaled"))).plan.probe.together == 20


def test_fewer_directions_share_a_pass_where_memory_is_short(tiny: MakePlan, monkeypatch: pytest.MonkeyPatch) -> None:
    many = [*OUTER, "probe.k=2000", "federation.batch=16"]
    free = load_task(tiny(*many)).plan.probe.together
    short = load_task(tiny(*many, "probe.memory_mb=10")).plan.probe.together
    assert LEAST <= short < free <= 2000
    with pytest.raises(PlanError, match=rf"take too much memory; set it to {short}"):
        load_task(tiny(*many, "probe.memory_mb=10", f"probe.together={short + 1}"))
    assert load_task(tiny(*many, "probe.memory_mb=10", f"probe.together={short}")).plan.probe.together == short
    monkeypatch.setattr(sharing, "SHARED_PASS", 1 << 10)
    alone = load_task(tiny(*many))
    assert alone.plan.probe.together == 1
    assert "so large that it would not pay" in alone.server.remarks[0]


def test_a_plan_that_would_fill_the_memory_is_refused(tiny: MakePlan) -> None:
    """The number may come from a server that means no good."""
    with pytest.raises(PlanError, match=r"probe\.together: 1000000 outer directions cannot share"):
        load_task(tiny(*OUTER, "probe.k=1000000", "probe.together=1000000", "federation.batch=64"))


ONNX = [*OUTER, "task.init=numpy", "run.runtime=onnx"]


def test_onnx_runtime_shares_passes_too(tiny: MakePlan, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_task(tiny(*ONNX)).plan.probe.together == 20
    assert load_task(tiny(*ONNX, "probe.together=9")).plan.probe.together == 9
    monkeypatch.setattr(sharing, "SHARED_PASS", 1 << 10)
    alone = load_task(tiny(*ONNX))
    assert alone.plan.probe.together == 1
    assert "so large that it would not pay" in alone.server.remarks[0]


def test_on_onnx_runtime_samples_that_depend_on_one_another_take_a_pass_each(tiny: MakePlan) -> None:
    batches = [*ONNX, 'task.model={name="lenet", channels=[2, 3], norm="batch"}']
    task = load_task(tiny(*batches))
    assert task.plan.probe.together == 1
    assert "gives other outputs than one for each" in task.server.remarks[0]
    with pytest.raises(PlanError, match=r"probe\.together: 8 outer directions cannot share .* set it to 1"):
        load_task(tiny(*batches, "probe.together=8"))


def test_a_pytorch_with_other_functions_behind_vmap_takes_a_pass_each(
    tiny: MakePlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are not public, so another version may lack them."""
    monkeypatch.setattr(rows, "_functorch", SimpleNamespace())
    task = load_task(tiny(*OUTER))
    assert task.plan.probe.together == 1
    assert "no attribute 'maybe_current_level'" in task.server.remarks[0]


def test_half_precision_takes_a_pass_each(tiny: MakePlan) -> None:
    task = load_task(tiny(*OUTER, "probe.precision=bfloat16", "probe.sigma=0.05"))
    assert task.plan.probe.together == 1
    assert "bfloat16 would round" in task.server.remarks[0]
