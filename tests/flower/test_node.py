"""The client without flwr and the server's half, through a real SuperLink."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from baffle.errors import AwayError, TransportError
from baffle.flower.node import FlowerNode, Message

pytest.importorskip("flwr")
from flwr.app import ConfigRecord, RecordDict
from flwr.app import Message as FlowerMessage
from flwr.proto.message_pb2 import PushObjectRequest, PushObjectResponse

from baffle.flower.grid_transport import GridTransport
from baffle.flower.run import FlowerRun
from tests.support.superlinks import Echo, Superlink, certify, new_key, public, until

Join = Callable[..., Echo]

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
    """One in the clear that forgets, and one with TLS, node keys and a database; started together, as each takes
    seconds."""
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
    """Two clients of the guarded one, killed with SIGKILL."""
    link, folder = superlinks[1], tmp_path_factory.mktemp("crashed")
    (folder / "roots").write_bytes(link.roots or b"")
    keys = [new_key(), new_key()]
    FlowerRun(link.address, link.secret, link.roots, map(public, keys)).close()
    killed = []
    for key in keys:
        (folder / "key").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        process = subprocess.Popen(
            [sys.executable, "-c", CLIENT, link.address, folder / "roots", folder / "key"],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout
        killed.append(Crashed(key, int(process.stdout.readline().split()[-1])))
        process.kill()
        process.communicate()
    return killed


@pytest.fixture(scope="module")
def forgetful(crashed: list[Crashed], superlinks: tuple[Superlink, Superlink]) -> Iterator[Echo]:
    """A crashed client that came back and does not know which node it was. It must wait for some time, which other
    tests use."""
    echo = Echo(superlinks[1], crashed[1].key)
    yield echo
    echo.leave()


@pytest.fixture
def join() -> Iterator[Join]:
    """Starts clients, which leave when the test ends."""
    echoes: list[Echo] = []

    def start(*arguments: object, **options: object) -> Echo:
        echoes.append(Echo(*arguments, **options))  # type: ignore[arg-type]
        return echoes[-1]

    yield start
    for echo in echoes:
        echo.client.stop()
    for echo in echoes:
        echo.leave()


def over(run: FlowerRun, nodes: list[int], seconds: float = 30, told: dict[int, str] | None = None) -> GridTransport:
    """Clients 0, 1, … on these nodes."""
    return GridTransport(run.grid, lambda: dict(enumerate(nodes)), seconds, ({} if told is None else told).__setitem__)


def first(client: FlowerNode) -> Message | None:
    return next(client.messages(), None)


def test_a_killed_client_that_knows_its_node_is_back_at_once(
    guarded: Superlink, crashed: list[Crashed], forgetful: Echo, join: Join
) -> None:
    until(lambda: bool(forgetful.told))
    assert "counts as present" in forgetful.told[0]
    with FlowerRun(guarded.address, guarded.secret, guarded.roots) as run:
        key, node = crashed[0]
        assert over(run, [node], 0.5).exchange({0: b"gone"}) == {}
        back = join(guarded, key, known=node)
        assert back.node() == node
        assert "joined" in back.told[0]
        assert over(run, [node]).exchange({0: b"back"}) == {0: b"back"}


def test_bytes_of_any_size_come_back_from_several_clients(clear: Superlink, join: Join) -> None:
    nodes = [echo.node() for echo in [join(clear) for _ in range(3)]]
    assert len(set(nodes)) == 3
    with FlowerRun(clear.address, clear.secret) as run:
        assert set(nodes) <= run.nodes().keys()
        transport = over(run, nodes)
        for asked in (
            {0: b"", 1: b"", 2: b""},
            {2: b"\0" * 2048, 0: b"\xff" * 2048},
            {client: bytes([client]) * 5_000_000 for client in range(3)},
        ):
            replies = transport.exchange(asked)
            assert replies == asked
            assert list(replies) == list(asked)
        assert transport.exchange({7: b"nobody"}) == {}


def test_a_client_that_leaves_is_gone_at_once(clear: Superlink, join: Join) -> None:
    stays, leaves = join(clear), join(clear)
    told: dict[int, str] = {}
    with FlowerRun(clear.address, clear.secret) as run:
        nodes = [stays.node(), leaves.node()]
        transport = over(run, nodes, told=told)
        leaves.leave()
        assert set(nodes) & run.nodes().keys() == {nodes[0]}
        assert transport.exchange({0: b"a", 1: b"b"}) == {0: b"a"}
        assert "Unavailable" in told[1]


def test_a_refusal_a_stranger_and_a_late_reply_do_no_harm(clear: Superlink, join: Join) -> None:
    wait = Event()

    def answer(client: FlowerNode, message: Message) -> None:
        if message.content == b"refuse":
            return client.refuse(message, "I would rather not")
        if message.content == b"late":
            wait.wait(10)
        return client.reply(message, message.content)

    echo = join(clear, answer=answer)
    with FlowerRun(clear.address, clear.secret) as run:
        told: dict[int, str] = {}
        transport = over(run, [echo.node()], told=told)
        assert transport.exchange({0: b"refuse"}) == {}
        assert told == {0: "I would rather not"}

        strange = FlowerMessage(RecordDict({"other": ConfigRecord({"x": 1})}), echo.node(), "train", ttl=20)
        names = list(run.grid.push_messages([strange]))
        replies: list[FlowerMessage] = []
        while not replies:
            replies = list(run.grid.pull_messages(names))
        assert "one record named 'baffle'" in str(replies[0].error.reason)

        assert over(run, [echo.node()], seconds=0.7).exchange({0: b"late"}) == {}
        wait.set()
        assert transport.exchange({0: b"on time"}) == {0: b"on time"}


def test_a_reply_that_is_announced_and_never_sent_holds_nobody_up(clear: Superlink, join: Join) -> None:
    """As of a client that is killed between the two, or that lies."""

    def silent(client: FlowerNode, message: Message) -> None:
        call = client._connection.call

        def without_objects(name: str, *request: Any) -> Any:
            if name == "push-object":
                raise TransportError("killed")
            return call(name, *request)

        with patch.object(client._connection, "call", without_objects), suppress(TransportError):
            client.reply(message, message.content)

    def slow(client: FlowerNode, message: Message) -> None:
        time.sleep(1)
        client.reply(message, message.content)

    echoes = [join(clear, answer=silent), join(clear, answer=slow), join(clear)]
    nodes, told = [echo.node() for echo in echoes], dict[int, str]()
    with FlowerRun(clear.address, clear.secret) as run:
        for _ in range(2):
            begun = time.monotonic()
            assert over(run, nodes, 6, told).exchange(dict.fromkeys(range(3), b"now")) == {1: b"now", 2: b"now"}
            assert time.monotonic() - begun < 10
    assert "objects are unavailable" in told[0]


def test_a_message_is_taken_when_all_of_it_is_there(
    clear: Superlink, join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its objects come one by one. Who confirms it early makes SuperLink refuse the rest, and Flower's grid fail."""
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
        assert over(run, [echo.node()]).exchange({0: b"what time is it?"}) == {0: b"what time is it?"}


def test_who_is_who_behind_tls_and_keys(guarded: Superlink, join: Join) -> None:
    keys = [new_key() for _ in range(2)]
    with FlowerRun(guarded.address, guarded.secret, guarded.roots, map(public, keys)) as run:
        nodes = [echo.node() for echo in [join(guarded, key) for key in keys]]
        assert {node: run.nodes()[node] for node in nodes} == dict(zip(nodes, map(public, keys), strict=True))
        asked = {0: b"first", 1: b"second"}
        assert over(run, nodes).exchange(asked) == asked


def test_strangers_are_refused_in_words(guarded: Superlink, clear: Superlink, tmp_path: Path) -> None:
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


def test_clients_outlive_a_server_that_is_killed(guarded: Superlink, clear: Superlink, join: Join) -> None:
    """One that remembers its nodes, and one that does not."""
    key = new_key()
    with FlowerRun(guarded.address, guarded.secret, guarded.roots, [public(key)]) as run:
        remembered, forgotten = join(guarded, key), join(clear)
        before, old = remembered.node(), forgotten.node()
        guarded.kill()
        clear.kill()
        assert over(run, [before], 0.5).exchange({}) == {}
        with pytest.raises(AwayError):
            over(run, [before], 0.5).exchange({0: b"nobody there"})
        guarded.start()
        clear.start()
        guarded.wait()
        until(lambda: over(run, [before], 5).exchange({0: b"the same run"}) == {0: b"the same run"})
    assert remembered.node() == before
    assert any("trying again" in words for words in remembered.told)
    assert any("is there again" in words for words in remembered.told)

    clear.wait()
    until(lambda: forgotten.node() != old)
    assert any("has forgotten this client" in words for words in forgotten.told)
    with FlowerRun(clear.address, clear.secret) as run:
        assert over(run, [forgotten.node()]).exchange({0: b"another run"}) == {0: b"another run"}


def test_a_run_that_the_server_has_forgotten_is_an_error(clear: Superlink) -> None:
    with FlowerRun(clear.address, clear.secret) as run:
        run.grid._token = "0" * 64
        run.grid.close()
        with pytest.raises(TransportError, match="no longer knows this run"):
            run.nodes()
        with pytest.raises(TransportError, match="no longer knows this run"):
            over(run, [1]).exchange({0: b"anybody?"})


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ({"/openapi.json": b'{"info":{"title":"SuperLink API","version":"1.42.0"}}'}, "runs Flower 1.42.0"),
        ({}, "expected a Flower 1.41 SuperLink"),
        ({"/v1/fleet/activate-node": b"\xff"}, "as Flower 1.41 does"),
    ],
)
def test_another_server_is_refused(answers: Mapping[str, bytes], words: str) -> None:
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
            with FlowerNode(f"127.0.0.1:{server.server_port}") as client, pytest.raises(TransportError, match=words):
                first(client)
        finally:
            server.shutdown()
            thread.join()


def test_the_client_needs_neither_flwr_nor_torch() -> None:
    said = subprocess.run(
        [sys.executable, "-c", "import baffle.flower.node, sys; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert {"baffle.flower.node", "google.protobuf"} <= set(said)
    assert not {"flwr", "torch", "httpx", "grpc"} & set(said)


def test_a_killed_client_that_forgot_its_node_is_back_when_its_window_has_ended(
    guarded: Superlink, crashed: list[Crashed], forgetful: Echo
) -> None:
    assert forgetful.node() == crashed[1].node
    with FlowerRun(guarded.address, guarded.secret, guarded.roots) as run:
        assert over(run, [forgetful.node()]).exchange({0: b"here"}) == {0: b"here"}
