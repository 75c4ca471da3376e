"""Which directions are the quickest to a scalar: measured, chosen, told."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from baffle.core.ports import Batch
from baffle.errors import PlanError
from baffle.network.same_plan import differences
from baffle.plan import Plan, load
from baffle.simulation import resume, simulate
from baffle.task import choice, settling
from baffle.task.choice import Price, advice_on_prices, quickest_way, told, way_of, ways
from baffle.task.load import load_task
from baffle.task.settling import prices_of
from baffle.trajectory import trajectory_of

MakePlan = Callable[..., Plan]
Cli = Callable[..., subprocess.CompletedProcess[str]]
AUTO = ('task.model={name="lenet", channels=[2, 3]}', "run.runtime=torch", "probe.k=24", "probe.supports=auto")


def priced(**seconds: float) -> dict[str, Price]:
    return {way: Price(price, {"supports": way}) for way, price in seconds.items()}


def test_the_cheapest_is_chosen_unless_it_hardly_matters() -> None:
    assert quickest_way(priced(dense=1.0, outer=0.5, units=0.7)) == "outer"
    assert quickest_way(priced(dense=1.0, outer=0.95)) == "dense"
    assert quickest_way(priced(dense=1.0)) == "dense"


def test_every_way_is_measured_that_the_model_allows(tiny: MakePlan) -> None:
    task = load_task(tiny(*AUTO, "probe.supports=dense"))
    largest = max(map(len, task.shares))
    prices = prices_of(task.server, largest)
    assert prices.keys() == {"dense", "layers", "outer", "stages", "units"}
    assert all(price.seconds > 0 for price in prices.values())
    assert prices["layers"].seconds == prices["dense"].seconds != prices["outer"].seconds
    few = load_task(tiny(*AUTO, "probe.supports=dense", "probe.k=2"))  # fewer than stages, and than share a pass
    assert prices_of(few.server, largest).keys() == {"dense", "layers", "outer"}
    onnx = load_task(tiny(*AUTO, "probe.supports=dense", "run.runtime=onnx", "task.init=numpy"))
    assert prices_of(onnx.server, largest).keys() == {"dense", "layers", "outer"}


def test_outer_directions_with_a_pass_each_cost_what_dense_ones_do(tiny: MakePlan) -> None:
    task = load_task(tiny(*AUTO, "probe.supports=dense", "probe.k=2"))
    prices = prices_of(task.server, 10)
    assert prices["outer"].seconds == prices["dense"].seconds
    assert quickest_way(prices) == "dense"


def test_one_layer_at_a_time_stays_so_along_outer_directions(tiny: MakePlan) -> None:
    task = load_task(tiny(*AUTO, "probe.supports=layers"))
    prices = prices_of(task.server, 10)
    assert prices["outer"].settings == {"supports": "layers", "distribution": "outer"}
    assert way_of(task.plan.probe) == "layers"


def test_stacked_clients_are_priced_as_a_part_of_the_stack(tiny: MakePlan, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = list[int]()

    def measured(_settled: object, _weights: object, batch: Batch) -> float:
        rows.append(len(batch.y))
        return 1.0

    monkeypatch.setattr(choice, "_seconds", measured)
    crowd = ("federation.clients=100", "federation.batch=4", "probe.supports=dense")
    stacked = prices_of(load_task(tiny(*AUTO, *crowd, "probe.stacked=true")).server, 10)
    assert set(rows) == {256}
    assert stacked["dense"].seconds == 4 / 256
    rows.clear()
    assert prices_of(load_task(tiny(*AUTO, *crowd)).server, 10)["dense"].seconds == 1
    assert set(rows) == {4}


@pytest.mark.parametrize("way", ["dense", "outer", "stages", "units"])
def test_a_run_keeps_the_choice_in_its_own_plan(
    tiny: MakePlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    asked = tiny(*AUTO, "rounds=2")
    monkeypatch.setattr(settling, "quickest_way", lambda prices: way if way in prices else "nothing")
    heard = list[str]()
    simulate(asked, tmp_path / "run", warn=heard.append)
    settled = load(str(tmp_path / "run" / "plan.toml"))
    assert way_of(settled.probe) == way
    assert any(f'"auto" chose {way} directions' in line and "dense" in line for line in heard)
    monkeypatch.undo()
    assert resume(tmp_path / "run", ["rounds=3"])["rounds"] == 3
    assert differences(asked, settled) == ""


def test_what_cannot_be_probed_in_parts_is_not_tried(tiny: MakePlan) -> None:
    for setting in ("probe.stacked=true", "probe.precision=bfloat16"):
        assert ways(tiny(*AUTO, setting).probe).keys() == {"dense", "layers", "outer"}
    assert way_of(load_task(tiny(*AUTO, "probe.stacked=true")).plan.probe) in ("dense", "outer")


def test_a_plan_that_leaves_it_open_gives_no_trajectory(tiny: MakePlan) -> None:
    with pytest.raises(PlanError, match=r'probe\.supports is "auto": expected what a run writes into its own plan'):
        trajectory_of(tiny(*AUTO, "ring.n_max=3"), 10)
    with pytest.raises(PlanError, match=r"probe\.layout: auto directions have none"):
        tiny(*AUTO, "probe.layout=[[0, 5, 0, 0, 24]]")


def test_advice_names_the_settings(tiny: MakePlan) -> None:
    probe = tiny("probe.distribution=rademacher").probe
    prices = {
        "dense": Price(1e-3, {"supports": "dense", "distribution": "rademacher"}),
        "outer": Price(2e-4, {"supports": "dense", "distribution": "outer"}),
    }
    (advice,) = advice_on_prices(probe, prices)
    assert '0.2 ms of CPU instead of 1: set probe.distribution = "outer"; baffle tune tries' in advice
    assert advice_on_prices(probe, prices | {"outer": prices["outer"]._replace(seconds=6e-4)}) == []


def test_prices_are_told_with_the_quickest_first() -> None:
    assert told({"dense": 4e-4, "layers": 4e-4, "outer": 4e-4}) == "dense, layers and outer 0.4 ms"
    assert told({"dense": 4e-4, "layers": 4e-4, "units": 7e-5}) == "units 0.07 ms; dense and layers 0.4 ms"


def test_the_command_shows_prices(cli: Cli, tiny_toml: Path) -> None:
    shown = cli("plan", tiny_toml, *(part for setting in AUTO[:3] for part in ("--set", setting)))
    (line,) = (line for line in shown.stdout.splitlines() if "CPU a scalar" in line)
    for way in ("dense and layers", "outer", "stages", "units"):
        assert way in line
    found: dict[str, Any] = json.loads(cli("plan", tiny_toml, "--json").stdout)
    assert found["prices"]["dense"] == found["prices"]["layers"] > 0


def test_the_command_leaves_prices_out_if_asked(cli: Cli, tiny_toml: Path) -> None:
    assert "CPU a scalar" not in cli("plan", tiny_toml, "--no-prices").stdout
    assert "prices" not in json.loads(cli("plan", tiny_toml, "--no-prices", "--json").stdout)
    backprop = cli("plan", tiny_toml, "--set", "estimator=backprop")
    assert (backprop.returncode, "CPU a scalar" in backprop.stdout) == (0, False)
