"""The benchmark of probing runs, and its figures make sense."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "probe.py"


@pytest.mark.slow
def test_it_compares_our_probe_with_the_reference_and_the_peak() -> None:
    command = [sys.executable, str(SCRIPT), "--json", "--models", "lenet", "--directions", "1", "--repeat", "1"]
    results = json.loads(subprocess.run(command, check=True, capture_output=True, timeout=300).stdout)
    assert list(results) == ["lenet"]
    row = results["lenet"]
    assert row["forward_gflop"] == 0.446
    assert row["ratio_to_reference"] > 0
    assert 0 < row["fraction_of_peak"] < 2
