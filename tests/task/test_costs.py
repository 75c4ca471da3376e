"""Costs predicted before a run are those that the run reports."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from baffle.aggregation.client.session import KEYS_AT_ONCE
from baffle.plan import Plan
from baffle.simulation import simulate
from baffle.task.costs import Costs, costs
from baffle.task.load import load_task
from tests.support.watched_runs import records_of

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
    "lenet": ['task.model={name="lenet", channels=[2, 3]}'],
}


def _costs(plan: Plan) -> Costs:
    return costs(load_task(plan))


@pytest.mark.parametrize("name", VARIANTS)
def test_bytes_and_forwards_are_as_predicted(tiny: Callable[..., Plan], tmp_path: Path, name: str) -> None:
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
    ("clients", "mode", "groups"),
    [
        (3, "on", 1),
        (8, "on", 1),
        (6, "malicious-server", 1),
        (8, "on", 2),
    ],
)
def test_the_bytes_of_a_secure_sum_are_about_as_predicted(
    tiny: Callable[..., Plan], tmp_path: Path, clients: int, mode: str, groups: int
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
def test_scalars_cost_four_bytes_each_and_a_constant(tiny: Callable[..., Plan], direction: str) -> None:
    sizes = {k: getattr(_costs(tiny(f"probe.k={k}")), direction) for k in (4, 5, 50, 70_000)}
    constants = {size - 4 * k for k, size in sizes.items()}
    assert len(constants) == 1
    assert 0 < constants.pop() < 256


def test_the_model_does_not_change_what_scalars_cost(tiny: Callable[..., Plan]) -> None:
    small, large = _costs(tiny()), _costs(tiny('task.model={name="lenet"}'))
    assert (small.uplink_bytes, small.downlink_bytes) == (large.uplink_bytes, large.downlink_bytes)
    assert large.weights_bytes == 4 * large.n_weights > small.weights_bytes


def test_expected_alignment(tiny: Callable[..., Plan]) -> None:
    assert _costs(tiny("probe.k=50")).alignment == pytest.approx(math.sqrt(50 / (50 + 650 + 1)))
    own = _costs(tiny("probe.k=50", "federation.seeds=own", "federation.clients=4"))
    assert own.alignment == pytest.approx(math.sqrt(200 / (200 + 650 + 1)))
    baseline = _costs(tiny('estimator="backprop"'))
    assert baseline.alignment is None
    assert baseline.precision is None
    assert baseline.advice == []


def test_clients_and_samples(tiny: Callable[..., Plan]) -> None:
    predicted = _costs(tiny("federation.clients=10", "federation.participation=0.3"))
    assert (predicted.clients_per_round, predicted.samples_per_client) == (3, 144)
    assert predicted.forwards_in_all == 6 * 3 * 5


def test_memory_grows_with_model_and_batch(tiny: Callable[..., Plan]) -> None:
    def memory(*settings: str) -> int:
        size = _costs(tiny(*settings)).memory_bytes
        assert size is not None
        return size

    lenet = 'task.model={name="lenet"}'
    many = (lenet, "probe.micro_batch=64", "federation.batch=64")
    assert 3 * 4 * 650 < memory() < memory(lenet) < memory(*many)
    assert memory(lenet, "run.downlink=weights") < memory(lenet)
    assert memory(*many, 'estimator="backprop"') > memory(*many)


def test_advice_is_passed_on(tiny: Callable[..., Plan]) -> None:
    rounded = "task.model={name='lenet', channels=[2, 2], head='flatten'}"
    (advice,) = _costs(tiny(rounded, "probe.sigma=3e-7")).advice
    assert "probe.sigma" in advice
