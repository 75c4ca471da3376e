"""`flwr run` with Flower's own SuperLink and SuperNodes, with TLS and node keys. It takes minutes, because a stock node
starts a process for every message."""

import json
from pathlib import Path

import pytest
from stock import play

from baffle.simulation import repeat

pytest.importorskip("flwr")


@pytest.mark.slow
def test_a_run_of_stock_nodes_can_be_repeated_in_one_process(tmp_path: Path) -> None:
    measured = play(tmp_path, clients=3, k=4, rounds=2)
    assert measured["all_hold_the_last_weights"]
    assert measured["dropouts"] == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["skipped_rounds"] == 0
    assert summary["weights_sha256"] == repeat(tmp_path / "run", tmp_path / "repeated")["weights_sha256"]
