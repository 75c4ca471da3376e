"""Every benchmark, shortened: people read and run them, so they must keep working."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent.parent / "benchmarks"


def run(name: str, *args: str) -> Any:
    """What the benchmark prints, read as JSON."""
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), *args]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("extra", [[], ["--agreement"]], ids=["semi-honest", "agreement"])
def test_secure_sums_are_exact(extra: list[str]) -> None:
    rows = run("secure_sum", "--clients", "10", "--k", "50", "--json", *extra)
    assert [row["exact"] for row in rows] == [True, True]


def test_the_server_rebuilds_exactly() -> None:
    result = run("server", "--n", "20000", "--k", "20", "--repeat", "1", "--json")
    assert [row["exact"] for row in result["rows"]] == [True, True]


@pytest.mark.slow
def test_replays_of_both_kinds_of_directions_end_with_the_runs_hash() -> None:
    """The benchmark itself compares the hashes."""
    result = run("replay", "--rounds", "2", "--turns", "1", "--json")
    assert result["server"]["exact"]
    assert [row["plan"] for row in result["replays"]] == ["adam, average", "sgd"]
    assert all(spent > 0 for row in result["replays"] for spent in row["cpu_ms_a_round"]["audit"].values())


@pytest.mark.slow
def test_outer_directions_share_passes_and_agree_with_a_pass_each() -> None:
    rows = run("outer", "--k", "12", "--turns", "1", "--samples", "2", "--json")["rows"]
    assert [row["together"] for row in rows] == [12, 12, 12]
    assert all(row["losses_apart"] < 1e-5 and row["times"] > 0 for row in rows)


@pytest.mark.slow
def test_stacked_clients_are_measured_on_both_runtimes() -> None:
    rows = run("stacked", "--clients", "20", "--rounds", "1", "--turns", "1", "--json")["rows"]
    assert {(row["runtime"], row["stacked"]) for row in rows} == {
        *(("torch", False), ("torch", True), ("onnx", False), ("onnx", True)),
    }


@pytest.mark.slow
def test_costs_are_fitted_by_lines() -> None:
    result = run("scale", "--quick", "--turns", "1", "--json")
    assert [line["against"] for line in result["lines"]] == ["K", "weights", "batch", "clients"]
    assert result["peak_mb"]["0"] > 0


@pytest.mark.slow
def test_poison_spoils_one_sum_and_not_a_median() -> None:
    cosine = run("poisoning", "--rounds", "1", "--json")["cosine"]
    assert cosine["one sum"]["sum's range"] < 0 < 0.9 < cosine["20 groups, median"]["sum's range"]


@pytest.mark.slow
def test_time_to_accuracy_is_measured_for_each_mode(data_folder: Path, tmp_path: Path) -> None:
    assert (data_folder / "mnist").is_dir()
    out = tmp_path / "results.json"
    results = run("time_to_accuracy", "units", "dense", "--limit", "2", "--every", "2", "--out", str(out), "--json")
    assert set(results) == {"units", "dense"}
    assert results["units"]["uplink_bytes_per_round"] < results["units"]["n_weights"]
    assert all(row["cpu_seconds_to_85"] is None for row in results.values())
    assert run("time_to_accuracy", "units", "--out", str(out), "--json").keys() == results.keys()


@pytest.mark.slow
def test_tuning_gives_every_start_the_same_advice(tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    shorter = ["--seeds", "1", "--set", "rounds=12", "--set", "probe.k=16", "--set", "federation.clients=4"]
    command = [sys.executable, str(BENCHMARKS / "tuning.py"), "digits", "--out", str(out), *shorter]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    rows = json.loads(out.read_text())
    advice = [row["settings"] for name, row in rows.items() if name.endswith("tuning")]
    assert len(advice) == 4
    assert all(settings == advice[0] for settings in advice)
    assert done.stdout.count("reference") >= 4
    assert rows["digits, rates and rounds"]["rounds"] == [1, 2, 3, 6, 12]


@pytest.mark.slow
def test_nets_are_trained_in_every_way() -> None:
    short = ["--set", "rounds=2", "--set", "run.evaluate_every=1", "--set", "probe.k=8"]
    found = run("any_net", "--net", "SqueezeNet-like", *short, "--json")
    ways = {key.split(" | ")[1] for key in found["test"]}
    assert ways == {"dense", "layers", "layers, a moment each", "stages", "backpropagation"}
    assert all(len(curve) == 2 for curve in found["test"].values())
    assert found["contrast"]["SqueezeNet-like"]["layers"] == 8


def test_the_tables_in_the_docs_match_the_results() -> None:
    command = [sys.executable, str(BENCHMARKS / "pages.py"), "--check"]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_server_under_load_goes_on_in_every_scenario() -> None:
    measured = run("load", "--clients", "12", "--rounds", "3", "--warm-up", "2", "--deadline", "20", "--json")
    rows = {row["scenario"]: row for row in measured["scenarios"]}
    assert list(rows) == ["none", "break", "silent", "stall", "cut", "restart"]
    assert measured["run"]["rounds"] == 2 + 6 * 4 + 1
    assert rows["none"]["contributors"]["median"] == 12
    assert all(row["contributors"]["median"] > 3 for row in rows.values())
    assert rows["silent"]["contributors"]["median"] < 12
    assert rows["none"]["client_exchanges"] == 2
    sizes = rows["none"]["client_bytes"]
    assert all(sizes["messages"][way] < sizes["frames"][way] for way in ("up", "down"))
    assert rows["none"]["server_cpu_seconds"]["all"] > 0
