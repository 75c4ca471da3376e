"""`flwr run` with Flower's own SuperLink and SuperNodes. It takes minutes, because a stock node starts a process for
every message."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from baffle.flower.superlink import QUIET, STARTUP, answers
from baffle.network.authority import make_keys
from baffle.repetition import repeat

pytestmark = pytest.mark.slow

APP = Path(__file__).parents[2] / "examples" / "flower-app"
NODES = 3
TIMEOUT = 900  # seconds


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [listener.getsockname()[1] for listener in sockets]
    for listener in sockets:
        listener.close()
    return ports


def command(name: str) -> str:
    """The path of one of Flower's programs."""
    return str(Path(sys.executable).with_name(name))


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # Flower's programs start each other by name
    return {**os.environ, **QUIET, "PATH": path, "FLWR_HOME": str(tmp_path / "flower"), "OMP_NUM_THREADS": "1"}


@pytest.fixture
def start(tmp_path: Path, environment: dict[str, str]) -> Iterator[Callable[..., None]]:
    """Starts processes, which end with all their children when the test ends."""
    started: list[subprocess.Popen[bytes]] = []

    def run(name: str, *arguments: str) -> None:
        with (tmp_path / f"{name}-{len(started)}.log").open("wb") as log:
            started.append(
                subprocess.Popen(
                    [command(name), *arguments],
                    env=environment,
                    stdout=log,
                    stderr=log,
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )
            )

    yield run
    for process in started:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_a_run_of_stock_nodes_can_be_repeated_in_one_process(
    tmp_path: Path,
    tiny_toml: Path,
    environment: dict[str, str],
    start: Callable[..., None],
) -> None:
    settings = ["secure.mode=on", "rounds=2", "run.deadline_seconds=300"]
    make_keys(tmp_path / "keys", NODES, ["127.0.0.1"])
    link, *ports = free_ports(1 + NODES)
    (tmp_path / "flower").mkdir()
    (tmp_path / "flower" / "config.toml").write_text(
        f'[superlink.here]\naddress = "127.0.0.1:{link}"\ninsecure = true\n'
    )
    give_up = time.monotonic() + STARTUP
    start("flower-superlink", "--insecure", "--host", "127.0.0.1", "--port", str(link))
    while not answers(f"127.0.0.1:{link}", None):
        assert time.monotonic() < give_up, "flower-superlink did not answer in time"
        time.sleep(0.1)
    for number, port in enumerate(ports):
        own = f'keys="{tmp_path / "keys" / f"client-{number}"}" state="{tmp_path / f"state-{number}"}"'
        address = ["--superlink", f"127.0.0.1:{link}", "--host", "127.0.0.1", "--port", str(port)]
        start("flower-supernode", "--insecure", *address, "--node-config", own)
    config = f'plan="{tiny_toml}" settings="{" ".join(settings)}" keys="{tmp_path / "keys"}" out="{tmp_path / "run"}"'
    result = subprocess.run(
        [command("flwr"), "run", str(APP), "here", "--stream", "--run-config", config],
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    assert "3 of 3 clients hold the last weights" in result.stdout + result.stderr
    repeated = repeat(tmp_path / "run", tmp_path / "repeated")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["weights_sha256"] == repeated["weights_sha256"]
    assert summary["dropouts"] == summary["skipped_rounds"] == 0
