"""Every benchmark in a short form: they are read and run by people, so they must go on working."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent.parent / "benchmarks"


def run(name: str, *args: str) -> Any:
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / f"{name}.py"), *args], stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout)


@pytest.mark.parametrize("extra", [[], ["--agreement"]], ids=["semi-honest", "agreement"])
def test_secure_sums_are_exact(extra: list[str]) -> None:
    rows = run("secure_sum", "--clients", "10", "--k", "50", "--json", *extra)
    assert [row["exact"] for row in rows] == [True, True]


def test_the_server_rebuilds_exactly() -> None:
    found = run("server", "--n", "20000", "--k", "20", "--repeat", "1", "--json")
    assert [row["exact"] for row in found["rows"]] == [True, True]


def test_costs_are_fitted_by_lines() -> None:
    found = run("scale", "--quick", "--turns", "1", "--json")
    assert [line["against"] for line in found["lines"]] == ["K", "weights", "batch", "clients"]
    assert found["peak_mb"]["0"] > 0


def test_poison_spoils_one_sum_and_not_a_median() -> None:
    cosine = run("poisoning", "--rounds", "1", "--json")["cosine"]
    assert cosine["one sum"]["sum's range"] < 0 < 0.9 < cosine["20 groups, median"]["sum's range"]


def test_time_to_accuracy_is_measured_for_each_mode(data_folder: Path, tmp_path: Path) -> None:
    assert (data_folder / "mnist").is_dir()
    out = tmp_path / "found.json"
    found = run("time_to_accuracy", "units", "dense", "--limit", "2", "--every", "2", "--out", str(out), "--json")
    assert set(found) == {"units", "dense"}
    assert found["units"]["uplink_bytes_per_round"] < found["units"]["n_weights"]
    assert all(row["cpu_seconds_to_85"] is None for row in found.values())
    assert run("time_to_accuracy", "units", "--out", str(out), "--json").keys() == found.keys()


def test_the_tables_of_the_docs_are_what_the_results_say() -> None:
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "pages.py"), "--check"],
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
