"""Runs whose rounds have several steps. How each kind of run ends with the same weights is in test_runs.py."""

from pathlib import Path

import pytest

from baffle.client.worker import forwards_of
from baffle.errors import PlanError
from baffle.journal.audit import verify
from baffle.plan import Plan, load
from baffle.simulation import add_baseline, baseline_of, simulate
from baffle.trajectory import trajectory_of

LENET = 'task.model={name="lenet", channels=[2, 3], head="flatten"}'
LOCAL = ("federation.local_steps=3", "federation.warm_up=2")


def _plan(*settings: str) -> Plan:
    small = ("rounds=4", LENET, "federation.clients=6", "federation.batch=8", "probe.k=12", "secure.floor=2")
    return load("digits", (*small, *LOCAL, *settings))


def test_a_private_round_is_one_release_however_many_steps_it_has(tmp_path: Path) -> None:
    private = ("federation.weighting=uniform", "privacy.clip=2.0", "privacy.noise=0.5", "probe.head=exact")
    many = simulate(_plan("rounds=6", "federation.dropout=0.2", *private), tmp_path / "many")
    one = simulate(_plan("rounds=6", *private, "federation.local_steps=1"), tmp_path / "one")
    assert verify(tmp_path / "many").weights_sha256 == many["weights_sha256"]
    assert many["epsilon"] == pytest.approx(one["epsilon"], rel=1e-3)


def test_passes_are_counted_by_the_steps_of_each_round(tmp_path: Path) -> None:
    summary = simulate(_plan("rounds=5", "probe.head=exact"), tmp_path / "run")
    plan = load(str(tmp_path / "run/plan.toml"))
    trajectory = trajectory_of(plan, summary["n_weights"])
    assert forwards_of(trajectory, 12, 8) == 3 * 13
    assert summary["forwards"] == 6 * 13 * (2 + 3 * 3)
    assert summary["uplink_bytes_per_client_round"] > 4 * 3 * 12


def test_the_baseline_takes_one_step_a_round(tmp_path: Path) -> None:
    assert baseline_of(_plan()).federation.local_steps == 1
    simulate(_plan(), tmp_path / "run")
    assert add_baseline(tmp_path / "run")["baseline_rounds"] == 4


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["federation.level=epoch"], "needs scalars: expected estimator"),
        (["federation.seeds=own"], "needs scalars: expected estimator"),
        (["estimator=backprop"], "needs scalars: expected estimator"),
        (["federation.batch=0"], "needs batches: expected federation.batch above 0"),
        (["probe.stacked=true"], "cannot be stacked"),
        (["update.clip=0.1"], "update.clip is not linear"),
        (["run.downlink=weights"], 'update.optimizer = "adam" need run.downlink = "scalars"'),
        (["run.downlink=delta", "update.optimizer=momentum"], 'need run.downlink = "scalars", got "delta"'),
    ],
)
def test_what_is_not_linear_is_refused_in_words(settings: list[str], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        _plan(*settings)
    _plan(*settings, "federation.local_steps=1")
