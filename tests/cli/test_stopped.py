"""How a command is stopped: by Ctrl-C, by SIGTERM or by a full disk. Runs say how to resume them, and lose no round."""

import json
import os
import resource
import shlex
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from threading import Lock

import pytest

from baffle.cli.options import stopped_by_sigterm
from baffle.journal.audit import verify
from baffle.plan import Plan
from baffle.simulation import resume, simulate
from tests.support.command_line import setting


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_sigterm_ends_a_command_in_order() -> None:
    before, told = signal.getsignal(signal.SIGTERM), list[str]()
    with pytest.raises(SystemExit) as ended, stopped_by_sigterm(told.append, "start it again"):  # noqa: PT012
        try:
            terminate()
            told.append("went on")
        finally:
            terminate()  # somebody is impatient
            told.append("said goodbye")
    assert ended.value.code == 0
    assert told == ["said goodbye", "stopped by SIGTERM; start it again"]
    assert signal.getsignal(signal.SIGTERM) == before


def test_sigterm_may_come_in_the_middle_of_a_line_of_the_log() -> None:
    lock, told = Lock(), list[str]()

    def tell(words: str) -> None:
        assert lock.acquire(timeout=1), "the line that was interrupted is waited for"
        told.append(words)
        lock.release()

    with stopped_by_sigterm(tell, "start it again"):
        pass
    assert told == []  # a command that ends by itself says nothing of signals
    with pytest.raises(SystemExit), stopped_by_sigterm(tell, "start it again"), lock:
        terminate()
    assert told == ["stopped by SIGTERM; start it again"]


Start = Callable[..., "subprocess.Popen[str]"]


def _wait_until(happened: Callable[[], bool], process: "subprocess.Popen[str]") -> None:
    limit = time.monotonic() + 150
    while not happened():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < limit
        time.sleep(0.01)


def _lines(path: Path) -> int:
    return path.read_text().count("\n") if path.exists() else 0


@pytest.mark.slow
def test_ctrl_c_stops_cleanly_and_says_how_to_resume(
    start: Start, tiny: Callable[..., Plan], tiny_toml: Path, tmp_path: Path
) -> None:
    settings = setting("rounds=1000000", "secure.mode=on")
    process = start("run", tiny_toml, "--out", tmp_path / "my run", *settings)
    _wait_until(lambda: _lines(tmp_path / "my run" / "metrics.jsonl") > 5, process)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=150)
    assert process.returncode == 130
    command = stderr.partition("go on with: ")[2]
    assert shlex.split(command) == ["baffle", "run", "--resume", str(tmp_path / "my run")]
    assert stderr == f"stopped; go on with: {command}"
    done = verify(tmp_path / "my run").rounds
    assert done > 5
    resumed = resume(tmp_path / "my run", [f"rounds={done + 5}"])
    assert resumed["weights_sha256"] == simulate(tiny(f"rounds={done + 5}"), tmp_path / "whole")["weights_sha256"]


def test_ctrl_c_before_the_run_has_a_plan_does_not_mention_resuming(
    start: Start, tiny_toml: Path, tmp_path: Path
) -> None:
    (tmp_path / "slow_data.py").write_text(
        "import pathlib, time\n\ndef data():\n    pathlib.Path('loading').touch()\n    time.sleep(60)\n"
    )
    slow = 'task.data="slow_data:data"'
    process = start("run", tiny_toml, "--out", tmp_path / "run", "--set", slow, cwd=tmp_path)
    _wait_until((tmp_path / "loading").exists, process)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=150)
    assert process.returncode == 130
    assert "Traceback" not in stderr
    assert not (tmp_path / "run").exists()
    assert "--resume" not in stderr


@pytest.mark.slow
@pytest.mark.parametrize("size", [150_000, 40_000, 100])
def test_a_full_disk_is_reported_in_one_line_and_the_run_can_be_resumed_once_there_is_space(
    start: Start, tiny: Callable[..., Plan], tiny_toml: Path, tmp_path: Path, size: int
) -> None:
    settings = ["rounds=60", "run.snapshot_every=1", "run.commit_seconds=0", "secure.mode=on"]
    arguments = setting(*settings)
    limited = {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))}
    process = start("run", tiny_toml, "--out", tmp_path / "run", *arguments, **limited)
    _, stderr = process.communicate(timeout=300)
    assert process.returncode == 2
    assert stderr.startswith("error: ")
    assert stderr.count("\n") == 1
    assert "cannot be written" in stderr
    expected = simulate(tiny(*settings), tmp_path / "whole")["weights_sha256"]
    if (tmp_path / "run" / "plan.toml").exists():
        assert f"baffle run --resume {tmp_path / 'run'}" in stderr
        summary = resume(tmp_path / "run")
    else:
        summary = simulate(tiny(*settings), tmp_path / "run")
    assert summary["weights_sha256"] == expected
    assert summary["rounds"] == 60
    assert verify(tmp_path / "run").weights_sha256 == expected
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in lines] == list(range(60))
