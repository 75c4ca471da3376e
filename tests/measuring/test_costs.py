"""Costs and times predicted before a run are those that the run reports."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor, nn

from baffle.aggregation.client.session import KEYS_AT_ONCE
from baffle.cli.show import costs_rows
from baffle.client.worker import forwards_of
from baffle.measuring.costs import Costs, costs
from baffle.measuring.duration import SECONDS, measure_duration
from baffle.plan import Plan
from baffle.simulation import simulate
from baffle.task.load import load_task
from baffle.trajectory import trajectory_of
from tests.support.clocks import FakeClock
from tests.support.watched_runs import records_of

MakePlan = Callable[..., Plan]


VARIANTS: dict[str, list[str]] = {
    "scalars": [],
    "more scalars": ["probe.k=9"],
    "central": ["probe.scheme=central"],
    "delta": ["run.downlink=delta"],
    "weights": ["run.downlink=weights"],
    "epoch": ['federation.level="epoch"', "federation.batch=100", "federation.epochs=2"],
    "steps": ['federation.level="epoch"', "federation.steps=7"],
    "own seeds": ["federation.seeds=own"],
    "backprop": ['estimator="backprop"'],
    "tiers": ["federation.tiers=[{k=2, share=0.34}]"],
    "exact head": ["probe.head=exact", 'task.model={name="lenet", channels=[2, 3]}'],
    "exact head alone": ["probe.head=exact"],
    "exact head, central": ["probe.head=exact", "probe.scheme=central", 'task.model={name="lenet", channels=[2, 3]}'],
    "lenet": ['task.model={name="lenet", channels=[2, 3]}'],
}


def _costs(plan: Plan) -> Costs:
    return costs(load_task(plan))


@pytest.mark.parametrize("name", VARIANTS)
def test_bytes_and_forwards_are_as_predicted(tiny: MakePlan, tmp_path: Path, name: str) -> None:
    plan = tiny(*VARIANTS[name])
    predicted = _costs(plan)
    summary = simulate(plan, tmp_path / "run")
    assert summary["uplink_bytes_per_client_round"] == predicted.uplink_bytes
    assert summary["forwards"] == predicted.forwards_in_all
    assert summary["n_weights"] == predicted.n_weights
    first, *steady = (record["downlink_bytes"] / record["requests"] for record in records_of(tmp_path / "run"))
    assert set(steady) == {predicted.downlink_bytes}
    if plan.run.downlink == "scalars":  # everybody makes the initial weights, so at first there is nothing to send
        assert first < min(predicted.downlink_bytes, 256)
    assert summary["join_bytes_per_client"] == 0
    assert predicted.join_bytes > 4 * predicted.n_weights


@pytest.mark.slow
@pytest.mark.parametrize(
    ("clients", "mode", "groups"), [(3, "on", 1), (8, "on", 1), (6, "malicious-server", 1), (8, "on", 2)]
)
def test_the_bytes_of_a_secure_sum_are_about_as_predicted(
    tiny: MakePlan, tmp_path: Path, clients: int, mode: str, groups: int
) -> None:
    settings = [f"federation.clients={clients}", f"rounds={KEYS_AT_ONCE}", "run.evaluate_every=99"]
    settings += [f"secure.groups={groups}"]
    plain, plan = _costs(tiny(*settings)), tiny(*settings, f"secure.mode={mode}")
    predicted = _costs(plan)
    summary = simulate(plan, tmp_path / "run")
    assert summary["uplink_bytes_per_client_round"] == pytest.approx(predicted.uplink_bytes, rel=0.01)
    assert 0.7 * predicted.downlink_bytes < summary["downlink_bytes_per_client_round"] <= predicted.downlink_bytes
    assert summary["forwards"] == predicted.forwards_in_all == plain.forwards_in_all
    added = predicted.uplink_bytes - plain.uplink_bytes + predicted.downlink_bytes - plain.downlink_bytes
    assert predicted.secure_bytes == added > 0
    assert plain.secure_bytes == 0


@pytest.mark.parametrize("direction", ["uplink_bytes", "downlink_bytes"])
def test_scalars_cost_four_bytes_each_and_a_constant(tiny: MakePlan, direction: str) -> None:
    sizes = {k: getattr(_costs(tiny(f"probe.k={k}")), direction) for k in (4, 5, 50, 70_000)}
    constants = {size - 4 * k for k, size in sizes.items()}
    assert len(constants) == 1
    assert 0 < constants.pop() < 256
    assert getattr(_costs(tiny('task.model={name="lenet"}')), direction) == sizes[4]  # whatever the model


def test_clients_alignment_and_advice(tiny: MakePlan) -> None:
    assert _costs(tiny("probe.k=50")).alignment == pytest.approx(math.sqrt(50 / (50 + 650 + 1)))
    own = _costs(tiny("probe.k=50", "federation.seeds=own", "federation.clients=4"))
    assert own.alignment == pytest.approx(math.sqrt(200 / (200 + 650 + 1)))
    some = _costs(tiny("federation.clients=10", "federation.participation=0.3"))
    assert (some.clients_per_round, some.samples_per_client, some.forwards_in_all) == (3, 144, 6 * 3 * 5)
    (advice,) = _costs(tiny("task.model={name='lenet', channels=[2, 2], head='flatten'}", "probe.sigma=3e-7")).advice
    assert "probe.sigma" in advice
    baseline = _costs(tiny('estimator="backprop"'))
    assert baseline.alignment is None
    assert baseline.precision is None
    assert baseline.advice == []


def test_a_head_that_takes_many_more_bytes_than_the_scalars_is_remarked_on(tiny: MakePlan) -> None:
    settings = ("probe.head=exact", 'task.model={name="lenet", channels=[2, 3], head="flatten"}')
    few, many = (_costs(tiny(*settings, f"probe.k={k}")) for k in (6, 60))
    assert few.head_bytes == many.head_bytes == 4 * (10 * 3 * 4 * 4 + 10)
    assert "takes 1,960 bytes up a round, 82 times as many as the scalars" in "\n".join(few.advice)
    assert costs_rows(few)["exact head"] == "1,960 bytes of those up"
    assert not any("probe.head" in words for words in many.advice)
    probed = _costs(tiny(settings[1]))
    assert probed.head_bytes == 0
    assert "exact head" not in costs_rows(probed)


def test_memory_grows_with_model_and_batch(tiny: MakePlan) -> None:
    def memory(*settings: str) -> int:
        size = _costs(tiny(*settings)).memory_bytes
        assert size is not None
        return size

    lenet = 'task.model={name="lenet"}'
    many = (lenet, "probe.micro_batch=64", "federation.batch=64")
    assert 3 * 4 * 650 < memory() < memory(lenet) < memory(*many)
    assert memory(lenet, "run.downlink=weights") < memory(lenet)
    assert memory(*many, 'estimator="backprop"') > memory(*many)


CLOCK = FakeClock()
PASS = 1e-3


class Timed(nn.Linear):
    """A model whose forward pass takes a known time."""

    def forward(self, x: Tensor) -> Tensor:
        CLOCK.sleep(PASS)
        return super().forward(x.flatten(1))


def timed() -> nn.Module:
    return Timed(64, 10)


@pytest.mark.parametrize(
    "settings",
    [
        [],
        ["probe.k=100"],
        ["probe.scheme=central"],
        ["secure.mode=on", "federation.participation=0.7", "secure.floor=2"],
        ['federation.level="epoch"', "federation.steps=3"],
        ['federation.level="epoch"', "federation.epochs=2", "federation.batch=100"],
        ['federation.seeds="own"'],
        ['estimator="backprop"'],
        ["federation.clients=4", "probe.k=8", "federation.tiers=[{k=2, share=0.5}]"],
        ["probe.supports=layers"],
        ["federation.local_steps=3", "federation.warm_up=2", "federation.batch=8"],
        ["privacy.noise=0.1", "privacy.clip=5.0", "federation.weighting=uniform"],
        ["probe.k=100000", "rounds=1000000"],
    ],
)
def test_the_time_of_all_forward_passes_is_predicted(tiny: MakePlan, settings: list[str]) -> None:
    model = f"task.model={{name='custom', factory='{__name__}:timed'}}"
    task = load_task(tiny(model, "run.workers=1", "probe.micro_batch=480", "run.evaluate_every=1000000", *settings))
    trajectory = trajectory_of(task.plan, len(task.initial_weights()))
    each = [forwards_of(trajectory, k, len(share)) for k, share in zip(task.tiers, task.shares, strict=True)]
    began = CLOCK.time
    found = measure_duration(task, CLOCK)
    assert found.work == pytest.approx(PASS * task.plan.per_round * sum(each) / len(each))
    assert found.overhead == pytest.approx(0, abs=1e-9)
    rounds = trajectory.steps_before(task.plan.rounds) / task.plan.federation.local_steps
    assert found.total == pytest.approx(rounds * found.work + found.evaluation)
    assert CLOCK.time - began < 5 * SECONDS


def test_what_is_not_clients_work_is_told_apart(tiny: MakePlan) -> None:
    """Stacked clients on the wall's clock, where everything takes time."""
    found = measure_duration(load_task(tiny("probe.stacked=true", "secure.mode=on", "rounds=10")))
    assert min(found.work, found.overhead, found.evaluation) > 0
    assert found.total == pytest.approx(10 * (found.work + found.overhead) + found.evaluation)
