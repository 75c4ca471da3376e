"""Runs with an exact head. How each kind of run ends with the same weights is in test_runs.py."""

from pathlib import Path

import numpy as np
import pytest

from baffle.errors import PlanError
from baffle.journal.audit import verify
from baffle.journal.replay import catch_up, lineage_of
from baffle.journal.store import Journal
from baffle.plan import Plan, load
from baffle.simulation import baseline_of, simulate
from baffle.task.load import load_task
from baffle.trajectory import trajectory_of

EXACT, LENET = "probe.head=exact", 'task.model={name="lenet", channels=[2, 3], head="flatten"}'
HEAD = 10 * 3 * 4 * 4 + 10  # weights of the small net's last layer
FROZEN = 'task.model={name="custom", factory="tests.task.test_features:frozen"}'


def _plan(*settings: str) -> Plan:
    small = ("rounds=3", LENET, "federation.clients=6", "federation.batch=8", "probe.k=12", "secure.floor=2")
    return load("digits", (*small, EXACT, *settings))


def test_clients_that_drop_and_noise_are_no_obstacle(tmp_path: Path) -> None:
    private = ("federation.weighting=uniform", "privacy.clip=2.0", "privacy.noise=0.1", "federation.dropout=0.2")
    summary = simulate(_plan("rounds=6", *private), tmp_path / "run")
    assert summary["skipped_rounds"] < 6
    assert verify(tmp_path / "run").weights_sha256 == summary["weights_sha256"]
    assert load(str(tmp_path / "run/plan.toml")).privacy.head_factor == pytest.approx(12**0.5)


@pytest.mark.parametrize(
    ("runtime", "model"),
    [("onnx", 'task.model={name="softmax"}'), ("torch", 'task.model={name="softmax"}'), ("torch", FROZEN)],
)
def test_a_head_alone_follows_backpropagation(runtime: str, model: str, tmp_path: Path) -> None:
    """Softmax regression, or a head on a frozen backbone: nothing but the ring lies between the two."""
    settings = (model, "update.optimizer=sgd", "update.rate=0.5", "update.ema=0", "rounds=20")
    plan = _plan(*settings, f"run.runtime={runtime}")
    simulate(plan, tmp_path / "exact")
    simulate(baseline_of(plan), tmp_path / "backprop")
    ends = []
    for name in ("exact", "backprop"):
        with Journal.open(tmp_path / name / "journal.sqlite") as journal:
            ends.append(catch_up(journal, lineage_of(journal, journal.plan())).state.weights)
    assert np.linalg.norm(ends[0] - ends[1]) < 1e-4 * np.linalg.norm(ends[1])


def test_the_plan_of_a_run_holds_the_place_of_the_head_and_bytes_follow_from_it(tmp_path: Path) -> None:
    simulate(_plan(), tmp_path / "run")
    plan = load(str(tmp_path / "run/plan.toml"))
    n = len(load_task(_plan()).initial_weights())
    assert plan.probe.head_at == (n - HEAD, n, 0, 0)
    trajectory = trajectory_of(plan, n)
    assert trajectory.length == 12 + HEAD
    assert {(support.start, support.stop) for support in trajectory.supports} == {(0, n - HEAD)}


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["probe.head_at=[0, 10, 0, 0]"], "expected .* leave it out to have it found"),
        (["probe.head=probed", "probe.head_at=[0, 10, 0, 0]"], "probe.head_at: expected the place"),
        (["probe.head_at=[10, 5, 0, 0]"], "probe.head_at: expected the place"),
        (["probe.supports=layers", "probe.layout=[[0, 300, 0, 0, 12]]"], "weights of the exact head"),
    ],
)
def test_another_place_than_the_models_own_is_refused(settings: list[str], says: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=says):
        simulate(_plan(*settings), tmp_path / "run")
