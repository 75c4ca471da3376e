"""The server's half, GridTransport over a FlowerRun, through a real SuperLink with clients that echo."""

import time
from collections.abc import Iterator
from contextlib import suppress
from threading import Event
from typing import Any
from unittest.mock import patch

import pytest

from baffle.errors import TransportError
from baffle.flower.node import FlowerNode, IncomingMessage

pytest.importorskip("flwr")
from flwr.app import ConfigRecord, RecordDict
from flwr.app import Message as FlowerMessage

from baffle.flower.run import FlowerRun
from tests.support.superlinks import Join, Superlink, transport_to


@pytest.fixture(scope="module")
def clear(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Superlink]:
    """A SuperLink without TLS."""
    link = Superlink(tmp_path_factory.mktemp("clear"), False)
    try:
        link.wait()
        yield link
    finally:
        link.kill()


@pytest.mark.slow
def test_bytes_of_any_size_come_back_from_several_clients(clear: Superlink, join: Join) -> None:
    nodes = [echo.node() for echo in [join(clear) for _ in range(3)]]
    assert len(set(nodes)) == 3
    with FlowerRun(clear.address, clear.secret) as run:
        assert set(nodes) <= run.nodes().keys()
        transport = transport_to(run, nodes)
        for asked in (
            {0: b"", 1: b"", 2: b""},
            {2: b"\0" * 2048, 0: b"\xff" * 2048},
            {client: bytes([client]) * 5_000_000 for client in range(3)},
        ):
            replies = transport.exchange(asked)
            assert replies == asked
            assert list(replies) == list(asked)


def test_a_client_that_leaves_is_gone_at_once(clear: Superlink, join: Join) -> None:
    stays, leaves = join(clear), join(clear)
    told: dict[int, str] = {}
    with FlowerRun(clear.address, clear.secret) as run:
        nodes = [stays.node(), leaves.node()]
        transport = transport_to(run, nodes, told=told)
        leaves.leave()
        assert set(nodes) & run.nodes().keys() == {nodes[0]}
        assert transport.exchange({0: b"a", 1: b"b"}) == {0: b"a"}
        assert "Unavailable" in told[1]


def test_a_refusal_a_stranger_and_a_late_reply_do_no_harm(clear: Superlink, join: Join) -> None:
    wait = Event()

    def answer(client: FlowerNode, message: IncomingMessage) -> None:
        if message.content == b"refuse":
            return client.refuse(message, "I would rather not")
        if message.content == b"late":
            wait.wait(10)
        return client.reply(message, message.content)

    echo = join(clear, answer=answer)
    with FlowerRun(clear.address, clear.secret) as run:
        told: dict[int, str] = {}
        transport = transport_to(run, [echo.node()], told=told)
        assert transport.exchange({0: b"refuse"}) == {}
        assert told == {0: "I would rather not"}

        strange = FlowerMessage(RecordDict({"other": ConfigRecord({"x": 1})}), echo.node(), "train", ttl=20)
        names = list(run.grid.push_messages([strange]))
        replies: list[FlowerMessage] = []
        while not replies:
            replies = list(run.grid.pull_messages(names))
        assert "one record named 'baffle'" in str(replies[0].error.reason)

        assert transport_to(run, [echo.node()], seconds=0.7).exchange({0: b"late"}) == {}
        wait.set()
        assert transport.exchange({0: b"on time"}) == {0: b"on time"}


@pytest.mark.slow
def test_a_reply_that_is_announced_and_never_sent_holds_nobody_up(clear: Superlink, join: Join) -> None:
    """Such a reply comes from a client that is killed between the two, or that lies."""

    def silent(client: FlowerNode, message: IncomingMessage) -> None:
        call = client._connection.call

        def without_objects(name: str, *request: Any) -> Any:
            if name == "push-object":
                raise TransportError("killed")
            return call(name, *request)

        with patch.object(client._connection, "call", without_objects), suppress(TransportError):
            client.reply(message, message.content)

    def slow(client: FlowerNode, message: IncomingMessage) -> None:
        time.sleep(1)
        client.reply(message, message.content)

    echoes = [join(clear, answer=silent), join(clear, answer=slow), join(clear)]
    nodes, told = [echo.node() for echo in echoes], dict[int, str]()
    with FlowerRun(clear.address, clear.secret) as run:
        for _ in range(2):
            begun = time.monotonic()
            assert transport_to(run, nodes, 6, told).exchange(dict.fromkeys(range(3), b"now")) == {1: b"now", 2: b"now"}
            assert time.monotonic() - begun < 10
    assert "objects are unavailable" in told[0]


def test_a_run_that_the_server_has_forgotten_is_an_error(clear: Superlink) -> None:
    with FlowerRun(clear.address, clear.secret) as run:
        run.grid._token = "0" * 64
        run.grid.close()
        with pytest.raises(TransportError, match="no longer knows this run"):
            run.nodes()
        with pytest.raises(TransportError, match="no longer knows this run"):
            transport_to(run, [1]).exchange({0: b"anybody?"})
