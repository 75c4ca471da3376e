"""Federations of real processes on this machine, over the link and over Flower's SuperLink: clients with and without
PyTorch, some of which are killed."""

import json
import shutil
from pathlib import Path

import msgspec
import pytest

from baffle.export import export_plan
from baffle.journal.audit import verify
from baffle.network.authority import make_keys, sign_roster
from baffle.network.keys import ClientKeys, load_identity
from baffle.network.rosters import load_roster
from baffle.repetition import repeat
from tests.support.networks import Network, listening

pytest.importorskip("flwr")
pytest.importorskip("onnxruntime")
import httpx
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor, SuperExecAuthHttpInterceptor
from flwr.supercore.runtime import RuntimeHttpClient


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
def test_a_run_can_be_repeated_in_one_process(network: Network, tiny_toml: Path, engine: str, insecure: bool) -> None:
    settings = ["federation.clients=4", "rounds=4", 'secure.mode="on"', 'task.model={name="lenet", channels=[4,4]}']
    network.plan = [str(tiny_toml), *(word for setting in settings for word in ("--set", setting))]
    network.engine, network.insecure = engine, insecure
    network.serve()
    for number in range(4):
        network.join(number)
    assert network.ended("server") == 0, network.log("server")
    repeated = repeat(network.run, network.folder / "repeated")
    assert verify(network.run).weights_sha256 == repeated["weights_sha256"]
    assert {network.ended(f"client-{number}") for number in range(4)} == {0}
    assert all(network.log(f"client-{number}").endswith(": the run is over\n") for number in range(4))
    assert set(map(network.held, range(4))) == {repeated["weights_sha256"]}


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["link", "flower"])
def test_a_federation_survives_kills(network: Network, tiny_toml: Path, engine: str) -> None:
    """A client is killed and restarted, another comes late, and the server is killed and restarted. The run still ends,
    and everybody holds its last weights."""
    network.engine = engine
    rounds = 40 if engine == "flower" else 800  # newcomers wait for the next epoch, which must not be the end
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
