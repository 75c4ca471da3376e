"""A run that is killed at any moment and started again ends with the weights of an undisturbed run."""

import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from baffle.journal.audit import verify
from baffle.plan import Plan
from baffle.simulation import simulate

Kill = Callable[[Path, list[str], list[dict[str, Any]]], int]

MANY_WRITES = ["run.commit_seconds=0", "run.snapshot_every=1"]
GROUPS = ["run.commit_seconds=0.05", "run.snapshot_every=7"]


@pytest.fixture(scope="module")
def kill(tiny_toml: Path) -> Iterator[Kill]:
    """Execute a run in processes that are killed as ordered, then let a last one finish; gives the number of kills."""
    command = [sys.executable, str(Path(__file__).with_name("killer.py"))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as killer:
        assert killer.stdin
        assert killer.stdout
        orders, answers = killer.stdin, killer.stdout

        def call(folder: Path, settings: list[str], ends: list[dict[str, Any]]) -> int:
            order = {"folder": str(folder), "plan": str(tiny_toml), "settings": settings, "ends": ends}
            orders.write(json.dumps(order) + "\n")
            orders.flush()
            answer = json.loads(answers.readline())
            assert answer["finished"]
            return int(answer["killed"])

        yield call
        orders.close()


def _check(run: Path, expected: str, rounds: int) -> None:
    summary = json.loads((run / "summary.json").read_text())
    assert summary["weights_sha256"] == expected
    replayed = verify(run)
    assert (replayed.weights_sha256, replayed.rounds) == (expected, rounds)
    recorded = [json.loads(line)["round"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert recorded == list(range(rounds))
    assert summary["rounds"] == rounds


@pytest.mark.slow
@pytest.mark.parametrize("settings", [MANY_WRITES, GROUPS], ids=["many writes", "groups"])
def test_a_run_killed_again_and_again_ends_with_the_same_weights(
    tiny: Callable[..., Plan], tmp_path: Path, kill: Kill, settings: list[str]
) -> None:
    plan = [*settings, "rounds=200"]
    expected = simulate(tiny(*plan), tmp_path / "undisturbed")["weights_sha256"]
    dice = random.Random(settings[0])
    ends = [{"rounds": dice.randrange(12), "seconds": dice.uniform(0, 0.01)} for _ in range(13)]
    assert kill(tmp_path / "run", plan, ends) >= 5
    _check(tmp_path / "run", expected, 200)


@pytest.mark.slow
def test_a_run_killed_while_it_starts_ends_with_the_same_weights(
    tiny: Callable[..., Plan], tmp_path: Path, kill: Kill
) -> None:
    plan = [*MANY_WRITES, "rounds=12"]
    expected = simulate(tiny(*plan), tmp_path / "undisturbed")["weights_sha256"]
    dice = random.Random(1)
    killed = 0
    for number in range(4):
        run = tmp_path / str(number)
        killed += kill(run, plan, [{"seconds": dice.uniform(0, 0.12)} for _ in range(3)])
        _check(run, expected, 12)
    assert killed >= 6


@pytest.mark.parametrize(
    "number", [pytest.param(number, marks=[pytest.mark.slow] * (number % 4 != 1)) for number in range(1, 13)]
)
def test_a_run_killed_just_before_a_write_ends_with_the_same_weights(
    tiny: Callable[..., Plan], tmp_path: Path, kill: Kill, number: int
) -> None:
    plan = [*MANY_WRITES, "rounds=4"]
    expected = simulate(tiny(*plan), tmp_path / "undisturbed")["weights_sha256"]
    assert kill(tmp_path / "run", plan, [{"write": number}, {"write": number + 1}]) >= 1
    _check(tmp_path / "run", expected, 4)
