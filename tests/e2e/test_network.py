"""Federations of real processes on this machine, over the link and over Flower's SuperLink: clients with and without
PyTorch, some of which are killed."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

import msgspec
import pytest

from baffle.client.replica import Replica
from baffle.core.state import FLOAT
from baffle.export import export_plan
from baffle.journal.replay import verify
from baffle.journal.store import Journal
from baffle.network.authority import make_keys, sign_roster
from baffle.network.keys import ClientKeys, load_identity, load_roster
from baffle.plan import load
from baffle.simulation import simulate
from baffle.trajectory import trajectory_of

pytest.importorskip("flwr")
pytest.importorskip("onnxruntime")
import httpx
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor, SuperExecAuthHttpInterceptor
from flwr.supercore.runtime import RuntimeHttpClient

PATIENCE = 150.0
"""Seconds to wait for anything on a busy machine."""


@dataclass
class Network:
    """A server and clients on this machine, each started from the command line."""

    folder: Path
    keys: Path
    plan: list[str]
    engine: str = "link"
    insecure: bool = False
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    port: int = 0

    def __post_init__(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]

    @property
    def run(self) -> Path:
        return self.folder / "run"

    def serve(self, *options: str) -> None:
        folders = ("--keys", self.keys / "server", "--out", self.run)
        address = ("--host", "127.0.0.1", "--port", self.port)
        self._start("server", "serve", *self.plan, *folders, *address, *options)

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
        (file,) = (self.folder / f"client-{number}").glob("*/replica")
        return sha256(Replica(trajectory, file)._held.weights.astype(FLOAT).tobytes()).hexdigest()

    def stop(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()

    def _start(self, name: str, *arguments: object) -> None:
        options = ["--engine", self.engine, *(["--insecure"] if self.insecure else [])]
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", "baffle.cli.main", *map(str, arguments), *options],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys") / "keys"
    make_keys(folder, 4, ["127.0.0.1"])
    return folder


@pytest.fixture
def network(keys: Path, tmp_path: Path) -> Iterator[Network]:
    network = Network(tmp_path, keys, [])
    yield network
    network.stop()


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["link", "flower"])
def test_a_mixed_federation_learns_and_turns_strangers_away(network: Network, engine: str) -> None:
    """Two clients on PyTorch, one on ONNX Runtime, and several that must be refused: a client that insists on another
    plan, one whose key is not on the roster, one that trusts another server, and over Flower two that claim to be the
    server."""
    network.engine = engine
    settings = ["rounds=20", "probe.k=12", "run.deadline_seconds=20", "run.evaluate_every=10"]
    network.plan = ["digits", *(word for setting in settings for word in ("--set", setting))]
    export_plan("digits", network.folder / "model")  # before the server has settled what the plan leaves open
    network.serve("--least", "3")
    network.join(0)
    network.join(1, "--plan", *network.plan)
    network.join(2, "--model", network.folder / "model")
    pinned = network.join(3, "--plan", "digits", "--set", "probe.sigma=0.1")
    foreign = network.folder / "foreign"
    make_keys(foreign, 4, ["127.0.0.1"])
    unknown = network.join(0, name="unknown", keys=with_trust_in(network.keys, foreign / "client-0", engine))
    distrusting = network.join(1, name="distrusting", keys=foreign / "client-1")
    network.until(lambda: network.rounds() >= 1)

    for secret in (None, bytes(32)) if engine == "flower" else ():
        assert refused_at_the_runtime_port(network, secret)
    network.until(lambda: "refuses this" in network.log(unknown))
    network.until(lambda: "will not take part" in network.log(pinned))
    network.until(lambda: "client 3 does not take part" in network.log("server"))
    assert network.ended(distrusting) == 2
    assert "was not issued by" in network.log(distrusting)

    assert network.ended("server") == 0, network.log("server")
    assert [network.ended(f"client-{number}") for number in range(3)] == [0, 0, 0]
    summary = json.loads((network.run / "summary.json").read_text())
    assert (summary["rounds"], summary["skipped_rounds"]) == (20, 0)
    assert summary["test_accuracy_last"] > 0.25
    losses = [json.loads(line)["loss"] for line in (network.run / "metrics.jsonl").read_text().splitlines()]
    assert sum(losses[-5:]) < sum(losses[:5]) - 0.5
    replayed = verify(network.run).weights_sha256
    assert {summary["weights_sha256"], *map(network.held, range(3))} == {replayed}


def with_trust_in(keys: Path, foreign: Path, engine: str) -> Path:
    """A foreign client's folder that trusts the server of `keys`, and still has the foreign client's own keys. Over the
    link the server must also be the one that the roster names, so the foreign authority signs one that names it."""
    shutil.copy(keys / "client-0" / "ca.pem", foreign / "ca.pem")
    if engine == "link":
        own = load_roster(foreign)
        named = msgspec.structs.replace(own, server=load_roster(keys / "client-0").server, signature="")
        authority = load_identity(foreign.parent / "authority.key")
        (foreign / "roster.json").write_bytes(sign_roster(named, authority).encode())
    return foreign


def refused_at_the_runtime_port(network: Network, secret: bytes | None) -> bool:
    """Whether a process with the CA's certificate, but not the right secret, is kept from acting as the server."""
    method = "/flwr.proto.Runtime/AcquireTask"
    auth = [SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods=[method])] if secret else []
    roots = ClientKeys.load(network.keys / "client-0").ca
    component = RuntimeVersionHttpInterceptor(component_name="SuperExec")
    with RuntimeHttpClient.from_server_address(
        f"127.0.0.1:{network.port}", False, roots, [component, *auth]
    ) as runtime:
        try:
            runtime.AcquireTask(AcquireTaskRequest(supported_task_types=["flwr-serverapp"]))
        except httpx.HTTPStatusError as fault:
            return fault.response.status_code in (401, 403)
    return False


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "insecure"), [("link", False), ("link", True), ("flower", True)])
def test_a_network_and_a_simulation_end_with_the_same_weights(
    network: Network, tiny_toml: Path, engine: str, insecure: bool
) -> None:
    settings = ["federation.clients=4", "rounds=4", 'secure.mode="on"', 'task.model={name="lenet", channels=[4,4]}']
    network.plan = [str(tiny_toml), *(word for setting in settings for word in ("--set", setting))]
    network.engine, network.insecure = engine, insecure
    network.serve()
    for number in range(4):
        network.join(number)
    simulated = simulate(load(str(tiny_toml), settings), network.folder / "simulated")
    assert network.ended("server") == 0, network.log("server")
    assert verify(network.run).weights_sha256 == simulated["weights_sha256"]
    assert {network.ended(f"client-{number}") for number in range(4)} == {0}
    assert all(network.log(f"client-{number}").endswith(": the run is over\n") for number in range(4))
    assert set(map(network.held, range(4))) == {simulated["weights_sha256"]}


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["link", "flower"])
def test_a_federation_survives_kills(network: Network, tiny_toml: Path, engine: str) -> None:
    """A client is killed and restarted, another comes late, and the server is killed and restarted. The run still ends,
    and everybody holds its last weights."""
    network.engine = engine
    rounds = 10 if engine == "flower" else 60  # over the link they are over too soon to kill anybody
    settings = ["federation.clients=4", f"rounds={rounds}", 'secure.mode="on"', "run.deadline_seconds=6"]
    network.plan = [str(tiny_toml), *(word for setting in settings for word in ("--set", setting))]
    export_plan(str(tiny_toml), network.folder / "model")
    model = ("--model", network.folder / "model")
    network.serve("--least", "3")
    for number in range(2):
        network.join(number, *model)
    network.join(2)
    network.until(lambda: network.rounds() >= 2)

    network.kill("client-1")
    network.join(1, *model)
    network.join(3, *model)
    network.until(lambda: network.log("server").count("client 1 takes part") == 2)
    network.until(lambda: "client 3 takes part" in network.log("server"))
    before = network.rounds()
    network.until(lambda: network.rounds() >= min(before + 1, rounds - 2))

    network.kill("server")
    network.until(lambda: not listening(network.port))
    network.serve()
    assert network.ended("server") == 0, network.log("server")
    assert [network.ended(f"client-{number}") for number in range(4)] == [0] * 4
    summary = json.loads((network.run / "summary.json").read_text())
    assert summary["rounds"] == rounds
    assert summary["skipped_rounds"] <= 5
    replayed = verify(network.run).weights_sha256
    assert {summary["weights_sha256"], *map(network.held, range(4))} == {replayed}


def listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
