"""Which directions are the quickest to a scalar, and how many outer ones share a pass: measured, chosen, told."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from baffle.core.ports import Batch
from baffle.errors import PlanError
from baffle.measuring.costs import costs
from baffle.network.settling import differences
from baffle.plan import Plan, change, load
from baffle.runtime.torch.trials import LEAST
from baffle.simulation import resume, simulate
from baffle.task import settle
from baffle.task.load import load_task
from baffle.task.prices import Price, advice_on_prices, in_words, kind_of, kinds_of, quickest_kind
from baffle.task.settle import prices_of
from baffle.trajectory import trajectory_of

MakePlan = Callable[..., Plan]
Cli = Callable[..., subprocess.CompletedProcess[str]]
AUTO = ('task.model={name="lenet", channels=[2, 3]}', "run.runtime=torch", "probe.k=24", "probe.supports=auto")


def priced(**seconds: float) -> dict[str, Price]:
    return {kind: Price(price, {"supports": kind}) for kind, price in seconds.items()}


def test_the_cheapest_is_chosen_unless_it_hardly_matters() -> None:
    assert quickest_kind(priced(dense=1.0, outer=0.5, units=0.7)) == "outer"
    assert quickest_kind(priced(dense=1.0, outer=0.95)) == "dense"
    assert quickest_kind(priced(dense=1.0)) == "dense"


@pytest.mark.parametrize(
    ("settings", "kinds"),
    [
        (["probe.k=24"], {"dense", "layers", "outer", "stages", "units"}),
        (["probe.k=2"], {"dense", "layers", "outer"}),  # fewer than stages, and than share a pass
        (["run.runtime=onnx", "task.init=numpy"], {"dense", "layers", "outer"}),
        (["probe.stacked=true"], {"dense", "layers", "outer"}),
        (["probe.precision=bfloat16"], {"dense", "layers", "outer"}),
    ],
)
def test_every_kind_is_measured_that_the_model_allows(tiny: MakePlan, settings: list[str], kinds: set[str]) -> None:
    prices = prices_of(load_task(tiny(*AUTO, "probe.supports=dense", *settings)), 480)
    assert prices.keys() == kinds
    assert all(price.seconds > 0 for price in prices.values())
    assert prices["layers"].seconds == prices["dense"].seconds
    if "probe.k=2" in settings:
        assert prices["outer"].seconds == prices["dense"].seconds
        assert quickest_kind(prices) == "dense"


def test_one_layer_at_a_time_stays_so_along_outer_directions(tiny: MakePlan) -> None:
    probe = tiny(*AUTO, "probe.supports=layers").probe
    assert kinds_of(probe)["outer"] == {"supports": "layers", "distribution": "outer"}
    assert kind_of(probe) == "layers"


def test_stacked_clients_are_priced_as_a_part_of_the_stack(tiny: MakePlan, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = list[int]()

    def one_second(_plan: object, _runtime: object, _weights: object, batch: Batch, _stopwatch: object) -> float:
        rows.append(len(batch.y))
        return 1.0

    monkeypatch.setattr(settle, "seconds_of_scalar", one_second)
    crowd = ("federation.clients=100", "federation.batch=4", "probe.supports=dense")
    stacked = prices_of(load_task(tiny(*AUTO, *crowd, "probe.stacked=true")), 10)
    assert set(rows) == {256}
    assert stacked["dense"].seconds == 4 / 256
    rows.clear()
    assert prices_of(load_task(tiny(*AUTO, *crowd)), 10)["dense"].seconds == 1
    assert set(rows) == {4}


@pytest.mark.parametrize("kind", ["outer", "units"])
def test_a_run_keeps_the_choice_in_its_own_plan(
    tiny: MakePlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    asked = tiny(*AUTO, "rounds=2")
    monkeypatch.setattr(settle, "quickest_kind", lambda prices: kind if kind in prices else "nothing")
    heard = list[str]()
    simulate(asked, tmp_path / "run", warn=heard.append)
    settled = load(str(tmp_path / "run" / "plan.toml"))
    assert kind_of(settled.probe) == kind
    assert any(f'"auto" chose {kind} directions' in line and "dense" in line for line in heard)
    monkeypatch.undo()
    assert resume(tmp_path / "run", ["rounds=3"])["rounds"] == 3
    assert differences(asked, settled) == ""


def test_what_cannot_be_left_open_is_refused(tiny: MakePlan) -> None:
    with pytest.raises(PlanError, match=r"probe\.memory_mb: probes of this model need at least \d+ MB, got 1"):
        load_task(tiny(*AUTO, "probe.memory_mb=1"))
    with pytest.raises(PlanError, match=r'probe\.supports is "auto": expected what a run writes into its own plan'):
        trajectory_of(tiny(*AUTO, "ring.n_max=3"), 10)
    with pytest.raises(PlanError, match=r"probe\.layout: auto directions have none"):
        tiny(*AUTO, "probe.layout=[[0, 5, 0, 0, 24]]")


def test_advice_names_the_settings_and_words_the_quickest_first(tiny: MakePlan) -> None:
    probe = tiny("probe.distribution=rademacher").probe
    prices = {
        "dense": Price(1e-3, {"supports": "dense", "distribution": "rademacher"}),
        "outer": Price(2e-4, {"supports": "dense", "distribution": "outer"}),
    }
    (advice,) = advice_on_prices(probe, prices)
    assert '0.2 ms of CPU instead of 1: set probe.distribution = "outer"; baffle tune tries' in advice
    assert advice_on_prices(probe, prices | {"outer": prices["outer"]._replace(seconds=6e-4)}) == []
    assert in_words({"dense": 4e-4, "layers": 4e-4, "outer": 4e-4}) == "dense, layers and outer 0.4 ms"
    assert in_words({"dense": 4e-4, "layers": 4e-4, "units": 7e-5}) == "units 0.07 ms; dense and layers 0.4 ms"


def test_the_command_shows_prices_unless_it_is_asked_not_to(cli: Cli, tiny_toml: Path) -> None:
    shown = cli("plan", tiny_toml, *(part for setting in AUTO[:3] for part in ("--set", setting)))
    (line,) = (line for line in shown.stdout.splitlines() if "CPU a scalar" in line)
    for kind in ("dense and layers", "outer", "stages", "units"):
        assert kind in line
    found: dict[str, Any] = json.loads(cli("plan", tiny_toml, "--json").stdout)
    assert found["prices"]["dense"] == found["prices"]["layers"] > 0
    assert "prices" not in json.loads(cli("plan", tiny_toml, "--no-prices", "--json").stdout)
    backprop = cli("plan", tiny_toml, "--set", "estimator=backprop")
    assert (backprop.returncode, "CPU a scalar" in backprop.stdout) == (0, False)


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
    assert load_task(tiny(*OUTER, own("scaled"))).plan.probe.together == 20  # it has a parameter without dimensions


def test_fewer_directions_share_a_pass_where_memory_is_short(tiny: MakePlan, monkeypatch: pytest.MonkeyPatch) -> None:
    many = [*OUTER, "probe.k=2000", "federation.batch=16"]
    free = load_task(tiny(*many)).plan.probe.together
    short = load_task(tiny(*many, "probe.memory_mb=10")).plan.probe.together
    assert LEAST <= short < free <= 2000
    with pytest.raises(PlanError, match=rf"take too much memory; set it to {short}"):
        load_task(tiny(*many, "probe.memory_mb=10", f"probe.together={short + 1}"))
    assert load_task(tiny(*many, "probe.memory_mb=10", f"probe.together={short}")).plan.probe.together == short
    monkeypatch.setattr(settle, "SHARED_PASS", 1 << 10)
    alone = load_task(tiny(*many))
    assert alone.plan.probe.together == 1
    assert "so large that it would not pay" in alone.remarks[0]


def test_a_plan_that_would_fill_the_memory_is_refused(tiny: MakePlan) -> None:
    """The number may come from a server that means no good."""
    with pytest.raises(PlanError, match=r"probe\.together: 1000000 outer directions cannot share"):
        load_task(tiny(*OUTER, "probe.k=1000000", "probe.together=1000000", "federation.batch=64"))


def test_onnx_runtime_half_precision_and_other_directions_take_a_pass_each(tiny: MakePlan) -> None:
    onnx = [*OUTER, "task.init=numpy", "run.runtime=onnx"]
    task = load_task(tiny(*onnx))
    assert task.plan.probe.together == 1
    assert not task.remarks
    with pytest.raises(PlanError, match=r'probe\.together: ONNX Runtime .* set run\.runtime = "torch", or start a new'):
        load_task(tiny(*onnx, "probe.together=20"))
    assert load_task(tiny("run.runtime=torch")).plan.probe.together == 0
    with pytest.raises(PlanError, match=r"probe\.together: only outer directions share a forward pass"):
        tiny("probe.together=8")
    half = load_task(tiny(*OUTER, "probe.precision=bfloat16", "probe.sigma=0.05"))
    assert half.plan.probe.together == 1
    assert "bfloat16 would round" in half.remarks[0]
