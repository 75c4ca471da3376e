"""A server's SuperLink ends with the server, and is not confused with another process at its port."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from baffle.errors import TransportError
from baffle.flower import superlink
from baffle.flower.superlink import SuperLink

STARTER = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-m", "baffle.flower.die_with_parent", *sys.argv[1:]], stdin=subprocess.PIPE)
time.sleep(60)
"""
CHILD = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(60)"


def gone(pid: int, seconds: float = 20) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        state = Path(f"/proc/{pid}/stat")
        if state.exists() and state.read_text().rsplit(")", 1)[1].split()[0] == "Z":
            return True  # a zombie: it has ended, and its parent has not waited for it yet
        time.sleep(0.05)
    return False


def pid_in(file: Path) -> int:
    end = time.monotonic() + 20
    while not (file.exists() and file.read_text()):
        assert time.monotonic() < end
        time.sleep(0.02)
    return int(file.read_text())


def test_the_command_ends_when_its_starter_is_killed(tmp_path: Path) -> None:
    starter = subprocess.Popen([sys.executable, "-c", STARTER, sys.executable, "-c", CHILD, str(tmp_path / "pid")])
    child = pid_in(tmp_path / "pid")
    assert not gone(child, 0.3)
    starter.send_signal(signal.SIGKILL)
    starter.wait()
    assert gone(child)


def test_the_command_ends_when_the_wrapper_is_terminated(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "baffle.flower.die_with_parent",
        sys.executable,
        "-c",
        CHILD,
        str(tmp_path / "pid"),
    ]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as wrapper:
        child = pid_in(tmp_path / "pid")
        wrapper.terminate()
        assert wrapper.wait(20) != 0
    assert gone(child)


def test_the_exit_code_is_the_commands() -> None:
    command = [sys.executable, "-m", "baffle.flower.die_with_parent", sys.executable, "-c", "raise SystemExit(7)"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as wrapper:
        assert wrapper.wait(20) == 7


def test_a_port_that_another_process_holds_is_reported_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That process would answer in SuperLink's place."""
    monkeypatch.setattr(superlink, "PORT_FREE", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        link = SuperLink("127.0.0.1", port, tmp_path, tmp_path / "secret", None)
        with pytest.raises(TransportError, match=rf"cannot listen at 127\.0\.0\.1:{port}.*--port"), link:
            pass
    with (
        pytest.raises(TransportError, match=r"cannot listen at 203\.0\.113\.1"),
        SuperLink("203.0.113.1", port, tmp_path, tmp_path / "secret", None),
    ):
        pass
