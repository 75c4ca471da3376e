"""The demo and the paper's task, with fewer rounds."""

from pathlib import Path

import pytest

from baffle.journal.audit import verify
from baffle.plan import DEFAULT, load
from baffle.simulation import simulate


@pytest.mark.slow
def test_the_demo_learns_from_forward_passes_alone(tmp_path: Path) -> None:
    summary = simulate(load(DEFAULT, ["rounds=70", "run.evaluate_every=99"]), tmp_path / "run")
    assert summary["test_accuracy"] >= 0.9
    assert summary["n_weights"] == 5_994
    assert summary["secure"] == "on"
    head = 10 * 16 * 4 * 4 + 10
    assert 4 * (80 + head) < summary["uplink_bytes_per_client_round"] < 4 * (80 + head) + 0.06 * 4 * 5_994
    assert summary["skipped_rounds"] == summary["clipped"] == summary["dropouts"] == 0
    assert summary["bookkeeping_seconds"] < 0.3 * summary["seconds"]
    assert verify(tmp_path / "run").weights_sha256 == summary["weights_sha256"]


def test_without_the_secure_sum_the_demo_sends_little_more_than_its_scalars(tmp_path: Path) -> None:
    settings = ["rounds=3", "run.evaluate_every=99"]
    plain = simulate(load("digits", [*settings, "secure.mode=off"]), tmp_path / "plain")
    assert plain["uplink_bytes_per_client_round"] < 4 * 80 + 64
    secure = simulate(load("digits", settings), tmp_path / "secure")
    assert secure["weights_sha256"] == plain["weights_sha256"]


@pytest.mark.slow
def test_backpropagation_in_the_same_loop_learns_faster(tmp_path: Path) -> None:
    summary = simulate(load("digits", ["rounds=60", 'estimator="backprop"']), tmp_path / "run")
    assert summary["test_accuracy"] >= 0.9
    assert summary["uplink_bytes_per_client_round"] > 4 * 5_994


@pytest.mark.slow
def test_the_papers_task_runs_on_real_data(data_folder: Path, tmp_path: Path) -> None:
    few = ["rounds=2", "probe.k=2", "federation.clients=600", "federation.participation=0.005", "update.ema=0"]
    settings = [*few, "run.evaluate_every=9"]
    summary = simulate(load("paper-mnist-lenet", settings), tmp_path / "run", data=data_folder)
    assert summary["n_weights"] == 26_730
    assert summary["forwards"] == 2 * 3 * 4 * 3
    assert summary["skipped_rounds"] == 0
    assert 0 < summary["test_accuracy"] < 1
    assert verify(tmp_path / "run").weights_sha256 == summary["weights_sha256"]
