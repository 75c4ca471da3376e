"""Federations of real processes on this machine, each started from the command line."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from baffle.client.replica import read_saved
from baffle.core.state import unpack
from baffle.journal.store import Journal
from baffle.trajectory import trajectory_of
from tests.support.command_line import setting

PATIENCE = 150.0  # seconds to wait for anything on a busy machine


@dataclass
class Network:
    """A server and clients on this machine, each started from the command line."""

    folder: Path
    keys: Path
    plan: list[str]
    insecure: bool = False
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    port: int = 0  # the system chooses it when the server first starts

    @property
    def run(self) -> Path:
        return self.folder / "run"

    def serve(self, *options: str) -> None:
        folders = ("--keys", self.keys / "server", "--out", self.run)
        address = ("--host", "127.0.0.1", "--port", self.port)
        self._start("server", "serve", *self.plan, *folders, *address, *options)
        if not self.port:
            self.until(lambda: "listening at" in self.log("server"))
            self.port = int(re.findall(r"listening at 127\.0\.0\.1:(\d+)", self.log("server"))[0])

    def begin(self, plan: Path, *settings: str, clients: int = 4, least: int = 4) -> None:
        """Serve a plan of four clients with secure sums, and let so many of them join. It waits for the `least`."""
        self.plan = [str(plan), *setting("federation.clients=4", 'secure.mode="on"', *settings)]
        self.serve("--least", str(least))
        for number in range(clients):
            self.join(number)

    def stop_server(self) -> None:
        """Stop the server as a person does. It must end well."""
        self.processes["server"].send_signal(signal.SIGTERM)
        assert self.ended("server") == 0, self.log("server")

    def start_again_and_end(self) -> int:
        """Start a server that was stopped or killed, play until all four clients have come back, and end the run there.
        Returns its rounds. The plan stays the same until the run is over, so no client is too late for an epoch."""
        told_before = len(self.log("server"))
        self.serve()
        own = [f"client {number} takes part" for number in range(4)]
        self.until(lambda: all(words in self.log("server")[told_before:] for words in own))
        played = self.rounds()
        self.until(lambda: self.rounds() > played + 1)
        self.stop_server()
        with Journal.open(self.run / "journal.sqlite") as journal:
            rounds = journal.length()
        self.serve("--set", f"rounds={rounds}")
        self.require_end()
        return rounds

    def require_end(self, clients: int = 4) -> None:
        """The server and so many clients must end well."""
        assert self.ended("server") == 0, self.log("server")
        assert [self.ended(f"client-{number}") for number in range(clients)] == [0] * clients

    def join(self, number: int, *options: object, name: str = "", keys: Path | None = None) -> str:
        name = name or f"client-{number}"
        own = ("--keys", keys or self.keys / f"client-{number}", "--state", self.folder / name, "--part")
        self._start(name, "join", f"127.0.0.1:{self.port}", *own, *options)
        return name

    def kill(self, name: str) -> None:
        self.processes[name].send_signal(signal.SIGKILL)
        self.processes.pop(name).wait()

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def rounds(self) -> int:
        metrics = self.run / "metrics.jsonl"
        return metrics.read_text().count("\n") if metrics.exists() else 0

    def until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + PATIENCE
        while not condition():
            if time.monotonic() > end:
                pytest.fail("waited in vain:\n" + "\n".join(f"{name}\n{self.log(name)}" for name in self.processes))
            time.sleep(0.05)

    def ended(self, name: str) -> int:
        """Wait until a process has ended; returns its exit code."""
        self.until(lambda: self.processes[name].poll() is not None)
        return self.processes[name].returncode

    def held(self, number: int) -> str:
        """The hash of the weights that a client has on its disk."""
        with Journal.open(self.run / "journal.sqlite") as journal:
            trajectory = trajectory_of(journal.plan(), journal.n_weights())
        saved = read_saved(self.folder / f"client-{number}" / "replica", trajectory)
        return unpack(trajectory.rule, saved.state).weights_hash().hex()

    def stop(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()

    def _start(self, name: str, *arguments: object) -> None:
        options = ["--insecure"] if self.insecure else []
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", "baffle.cli.main", *map(str, arguments), *options],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )


def listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
