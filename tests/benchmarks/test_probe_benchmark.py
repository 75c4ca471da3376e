"""The benchmark of probing runs and says what it should."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "probe.py"


def test_it_compares_both_ways_and_the_peak() -> None:
    command = [sys.executable, str(SCRIPT), "--json", "--models", "lenet", "--directions", "1", "--repeat", "1"]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, timeout=300).stdout)
    assert list(found) == ["lenet"]
    row = found["lenet"]
    assert row["forward_gflop"] == 0.446
    assert row["ratio_to_reference"] > 0
    assert 0 < row["fraction_of_peak"] < 2
