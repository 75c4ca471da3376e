"""The benchmark that plays a bad network for the secure sum, with fewer cases."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def run(script: str, *arguments: str) -> dict[str, Any]:
    """The result of a benchmark, which exits with 1 if it found a violation."""
    command = [sys.executable, str(BENCHMARKS / script), "--json", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    result: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == bool(result["violations"])
    return result


def test_sums_on_a_bad_network_are_right_or_none() -> None:
    result = run("schedules.py", "--cases", "60")
    assert result["violations"] == {}
    outcomes = result["outcomes"]
    assert set(outcomes) == {"drops", "disorder", "damage"}
    assert sum(counts["case"] for counts in outcomes.values()) == 60
    assert all(counts["sum"] and counts["no sum"] for counts in outcomes.values())
