"""The client without flwr, against a real SuperLink: joining, leaving, crashes on both sides, refusals."""

import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import NamedTuple

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from baffle.errors import AwayError, TransportError
from baffle.flower.node import FlowerNode, IncomingMessage

pytest.importorskip("flwr")
from flwr.app import ConfigRecord, RecordDict
from flwr.app import Message as FlowerMessage
from flwr.proto.message_pb2 import PushObjectRequest, PushObjectResponse

from baffle.flower.run import FlowerRun
from tests.support.superlinks import Echo, Join, Superlink, certify, new_key, public, transport_to, until

CLIENT = """
import sys
from pathlib import Path
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from baffle.flower.node import FlowerNode

address, roots, key = sys.argv[1:]
key = load_pem_private_key(Path(key).read_bytes(), None)
with FlowerNode(address, Path(roots).read_bytes(), key, lambda words: print(words, flush=True)) as client:
    for message in client.messages():
        client.reply(message, message.content)
"""


class Crashed(NamedTuple):
    """A client that was killed: its key and its node."""

    key: ec.EllipticCurvePrivateKey
    node: int


@pytest.fixture(scope="module")
def superlinks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Superlink, Superlink]]:
    """One without TLS that forgets everything when it is killed, and one with TLS, node keys and a database. They are
    started together, because each takes seconds."""
    links = Superlink(tmp_path_factory.mktemp("clear"), False), Superlink(tmp_path_factory.mktemp("guarded"), True)
    try:
        for link in links:
            link.wait()
        yield links
    finally:
        for link in links:
            link.kill()


@pytest.fixture
def clear(superlinks: tuple[Superlink, Superlink]) -> Superlink:
    return superlinks[0]


@pytest.fixture
def guarded(superlinks: tuple[Superlink, Superlink]) -> Superlink:
    return superlinks[1]


@pytest.fixture(scope="module")
def crashed(superlinks: tuple[Superlink, Superlink], tmp_path_factory: pytest.TempPathFactory) -> list[Crashed]:
    """Two clients of the guarded SuperLink that were killed with SIGKILL."""
    link, folder = superlinks[1], tmp_path_factory.mktemp("crashed")
    (folder / "roots").write_bytes(link.roots or b"")
    keys = [new_key(), new_key()]
    FlowerRun(link.address, link.secret, link.roots, map(public, keys)).close()
    crashed = []
    for key in keys:
        (folder / "key").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        process = subprocess.Popen(
            [sys.executable, "-c", CLIENT, link.address, folder / "roots", folder / "key"],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout
        crashed.append(Crashed(key, int(process.stdout.readline().split()[-1])))
        process.kill()
        process.communicate()
    return crashed


@pytest.fixture(scope="module")
def forgetful(crashed: list[Crashed], superlinks: tuple[Superlink, Superlink]) -> Iterator[Echo]:
    """A crashed client that came back and does not know which node it was. It has to wait until its window ends; other
    tests run meanwhile."""
    echo = Echo(superlinks[1], crashed[1].key)
    yield echo
    echo.leave()


def first(client: FlowerNode) -> IncomingMessage | None:
    return next(client.messages(), None)


@pytest.mark.slow
def test_a_killed_client_that_knows_its_node_is_back_at_once(
    guarded: Superlink, crashed: list[Crashed], forgetful: Echo, join: Join
) -> None:
    until(lambda: bool(forgetful.told))
    assert "counts as present" in forgetful.told[0]
    with FlowerRun(guarded.address, guarded.secret, guarded.roots) as run:
        key, node = crashed[0]
        assert transport_to(run, [node], 0.5).exchange({0: b"gone"}) == {}
        back = join(guarded, key, known=node)
        assert back.node() == node
        assert "joined" in back.told[0]
        assert transport_to(run, [node]).exchange({0: b"back"}) == {0: b"back"}


def test_a_message_is_confirmed_when_all_of_it_is_there(
    clear: Superlink, join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its objects arrive one by one. If it is confirmed early, SuperLink refuses the rest and Flower's grid fails."""
    node = join(clear).node()
    with FlowerRun(clear.address, clear.secret) as run:
        runtime, sent = run.grid._runtime_client, []

        def slowly(request: PushObjectRequest) -> PushObjectResponse:
            sent.append(request.object_id)
            time.sleep(0.4 * len(sent))
            return type(runtime).PushObject(runtime, request)

        monkeypatch.setattr(runtime, "PushObject", slowly)
        message = FlowerMessage(RecordDict({"baffle": ConfigRecord({"message": b"slow"})}), node, "train", ttl=20)
        names = list(run.grid.push_messages([message]))
        assert len(sent) == 3
        replies: list[FlowerMessage] = []
        while not replies:
            replies = list(run.grid.pull_messages(names))
        assert replies[0].content == message.content


def test_a_client_whose_clock_is_wrong_follows_the_server(
    clear: Superlink, join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = SimpleNamespace(time=lambda: time.time() + 3600, monotonic=time.monotonic)
    monkeypatch.setattr("baffle.flower.connection.time", wrong)
    echo = join(clear)
    with FlowerRun(clear.address, clear.secret) as run:
        assert transport_to(run, [echo.node()]).exchange({0: b"what time is it?"}) == {0: b"what time is it?"}


def test_the_server_knows_each_node_by_its_key(guarded: Superlink, join: Join) -> None:
    keys = [new_key() for _ in range(2)]
    with FlowerRun(guarded.address, guarded.secret, guarded.roots, map(public, keys)) as run:
        nodes = [echo.node() for echo in [join(guarded, key) for key in keys]]
        assert {node: run.nodes()[node] for node in nodes} == dict(zip(nodes, map(public, keys), strict=True))
        asked = {0: b"first", 1: b"second"}
        assert transport_to(run, nodes).exchange(asked) == asked


def test_strangers_are_refused_with_a_reason(guarded: Superlink, clear: Superlink, tmp_path: Path) -> None:
    def refused(address: str, roots: bytes | None = None, key: ec.EllipticCurvePrivateKey | None = None) -> str:
        with pytest.raises(TransportError) as fault, FlowerNode(address, roots, key, patience=0.1) as client:
            first(client)
        return f"{type(fault.value).__name__}: {fault.value}"

    assert "KeyRefusedError" in refused(guarded.address, guarded.roots, new_key())
    assert "not registered" in refused(guarded.address, guarded.roots, new_key())
    assert "no key was given" in refused(guarded.address, guarded.roots)
    assert "certificate" in refused(guarded.address, certify(tmp_path), new_key())
    assert "without TLS" in refused(clear.address, guarded.roots)
    assert "as PEM" in refused(clear.address, b"no certificate")
    assert "host:port" in refused("127.0.0.1")
    with pytest.raises(TransportError, match="refuses to start a run"):
        FlowerRun(guarded.address, b"a wrong secret of many bytes....", guarded.roots)


@pytest.mark.parametrize("roots", [None, b"given"])
def test_a_server_that_is_away_is_waited_for(guarded: Superlink, roots: bytes | None) -> None:
    told: list[str] = []

    def tell(words: str) -> None:
        told.append(words)
        client.stop()

    address = guarded.address if roots is None else "127.0.0.1:1"
    with FlowerNode(address, roots and guarded.roots, tell=tell) as client:
        assert first(client) is None
    assert ("TLS" if roots is None else "Connection refused") in told[0]
    assert "trying again" in told[0]


@pytest.mark.slow
def test_clients_outlive_a_server_that_is_killed(guarded: Superlink, clear: Superlink, join: Join) -> None:
    """Tried with a server that remembers its nodes, and with one that does not."""
    key = new_key()
    with FlowerRun(guarded.address, guarded.secret, guarded.roots, [public(key)]) as run:
        remembered, forgotten = join(guarded, key), join(clear)
        before, old = remembered.node(), forgotten.node()
        guarded.kill()
        clear.kill()
        assert transport_to(run, [before], 0.5).exchange({}) == {}
        with pytest.raises(AwayError):
            transport_to(run, [before], 0.5).exchange({0: b"nobody there"})
        guarded.start()
        clear.start()
        guarded.wait()
        until(lambda: transport_to(run, [before], 5).exchange({0: b"the same run"}) == {0: b"the same run"})
    assert remembered.node() == before
    assert any("trying again" in words for words in remembered.told)
    assert any("is there again" in words for words in remembered.told)

    clear.wait()
    until(lambda: forgotten.node() != old)
    assert any("has forgotten this client" in words for words in forgotten.told)
    with FlowerRun(clear.address, clear.secret) as run:
        assert transport_to(run, [forgotten.node()]).exchange({0: b"another run"}) == {0: b"another run"}


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        ({"/openapi.json": b'{"info":{"title":"SuperLink API","version":"1.42.0"}}'}, "runs Flower 1.42.0"),
        ({}, "expected a Flower 1.41 SuperLink"),
        ({"/v1/fleet/activate-node": b"\xff"}, "as Flower 1.41 does"),
    ],
)
def test_another_server_is_refused(answers: Mapping[str, bytes], reason: str) -> None:
    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("content-length", 0)))
            body = answers.get(self.path, b"")
            self.send_response(200 if self.path in answers else 404)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Other) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            with FlowerNode(f"127.0.0.1:{server.server_port}") as client, pytest.raises(TransportError, match=reason):
                first(client)
        finally:
            server.shutdown()
            thread.join()


def test_the_client_needs_neither_flwr_nor_torch() -> None:
    modules = subprocess.run(
        [sys.executable, "-c", "import baffle.flower.node, sys; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert {"baffle.flower.node", "google.protobuf"} <= set(modules)
    assert not {"flwr", "torch", "httpx", "grpc"} & set(modules)


@pytest.mark.slow
def test_a_killed_client_that_forgot_its_node_is_back_when_its_window_has_ended(
    guarded: Superlink, crashed: list[Crashed], forgetful: Echo
) -> None:
    assert forgetful.node() == crashed[1].node
    with FlowerRun(guarded.address, guarded.secret, guarded.roots) as run:
        assert transport_to(run, [forgetful.node()]).exchange({0: b"here"}) == {0: b"here"}
