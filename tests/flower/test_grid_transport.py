"""Messages over Flower's grid: replies, failures, deadlines, and a SuperLink that is away."""

import time
from collections.abc import Iterable

import httpx
import pytest

from baffle.errors import AwayError, TransportError

pytest.importorskip("flwr")
from flwr.app import ConfigRecord, Error, Message, RecordDict
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError, ObjectPushError, ObjectUnavailableError
from flwr.superlink.grid import HttpGrid

from baffle.flower.grid_transport import GridTransport, to_record
from tests.support.clocks import FakeClock
from tests.support.grids import Nodes, node

SECONDS = 20.0
ECHO = node(lambda data: data)


class Told(dict[int, str]):
    """Why nodes failed."""

    def __call__(self, node: int, why: str) -> None:
        self[node] = why


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def nodes() -> Nodes:
    return Nodes({1: ECHO, 2: ECHO, 3: ECHO})


@pytest.fixture
def transport(nodes: Nodes) -> GridTransport:
    return GridTransport(nodes, FakeClock())


def test_bytes_of_any_size_come_back_in_the_order_of_the_requests(transport: GridTransport, told: Told) -> None:
    for asked in ({}, {3: b"", 1: b""}, {2: b"\0" * 2048, 1: b"\xff" * 2048}, {1: bytes(100_000), 2: bytes(100_000)}):
        replies = transport.exchange(asked, SECONDS, told)
        assert list(replies.items()) == list(asked.items())
    assert not told


def test_nodes_that_fail_are_reported_and_the_others_answer(nodes: Nodes, transport: GridTransport, told: Told) -> None:
    nodes.answers |= {
        4: lambda message: Message(Error(2, "I would\nrather not"), reply_to=message),
        5: lambda message: Message(Error(2), reply_to=message),
        6: lambda message: Message(RecordDict({"other": ConfigRecord({"x": 1})}), reply_to=message),
    }
    assert transport.exchange(dict.fromkeys(range(1, 7), b"now"), SECONDS, told) == dict.fromkeys((1, 2, 3), b"now")
    assert told == {
        4: "I would rather not",
        5: "error 2",
        6: "expected a record 'baffle' with 'message' as bytes, got another message",
    }


def test_a_late_reply_is_dropped_and_superlink_may_forget_it(
    nodes: Nodes, transport: GridTransport, told: Told
) -> None:
    """SuperLink keeps a reply until it is pulled."""
    late: list[Message] = []
    nodes.answers[2] = late.append
    assert transport.exchange({1: b"now", 2: b"now"}, SECONDS, told) == {1: b"now"}
    (message,) = late
    nodes.replies[message.metadata.message_id] = Message(to_record(b"late"), reply_to=message)
    nodes.answers[2] = ECHO
    assert transport.exchange({2: b"again"}, SECONDS, told) == {2: b"again"}
    assert not nodes.replies
    assert message.metadata.message_id in nodes.pulled[-1]
    transport.exchange({2: b"again"}, SECONDS, told)
    assert message.metadata.message_id not in nodes.pulled[-1]
    assert not told


AWAY = httpx.ConnectError("Connection refused")
BUSY = httpx.HTTPStatusError("busy", request=httpx.Request("POST", "http://x"), response=httpx.Response(503))
UNKNOWN = httpx.HTTPStatusError(
    "unknown", request=httpx.Request("POST", "http://x"), response=httpx.Response(401, text="no such token")
)


def test_an_exchange_waits_for_a_superlink_that_is_away(nodes: Nodes, transport: GridTransport, told: Told) -> None:
    nodes.faults += [AWAY, BUSY]
    assert transport.exchange({1: b"pushed late"}, SECONDS, told) == {1: b"pushed late"}

    def leaves(message: Message) -> Message | None:
        nodes.faults += [AWAY, AWAY]
        return ECHO(message)

    nodes.answers[1] = leaves
    assert transport.exchange({1: b"pulled late"}, SECONDS, told) == {1: b"pulled late"}
    nodes.faults += [AWAY] * 1000
    with pytest.raises(AwayError, match=r"SuperLink cannot be reached \(Connection refused\)"):
        transport.exchange({1: b"nobody there"}, SECONDS, told)
    assert 0 < len(nodes.faults) < 1000
    with pytest.raises(AwayError):
        transport.nodes()
    nodes.faults[:], nodes.pulled[:] = [ObjectPushError("object", 1, "session")], []
    assert transport.exchange({1: b"now"}, SECONDS, told) == {}
    assert nodes.pulled  # a client that confirms its message early can still reply


def test_a_run_that_superlink_has_forgotten_is_an_error(nodes: Nodes, transport: GridTransport, told: Told) -> None:
    expected = r"SuperLink no longer knows this run: start another \(no such token\)"
    nodes.faults += [UNKNOWN, UNKNOWN]
    with pytest.raises(TransportError, match=expected):
        transport.nodes()
    with pytest.raises(TransportError, match=expected):
        transport.exchange({1: b"anybody?"}, SECONDS, told)
    nodes.answers[1] = lambda _message: nodes.faults.append(UNKNOWN)
    with pytest.raises(TransportError, match=expected):
        transport.exchange({1: b"anybody?"}, SECONDS, told)


def test_a_reply_that_is_announced_and_never_sent_holds_nobody_up_for_long(told: Told) -> None:
    """Such a reply comes from a client that is killed between the two, or that lies. Flower itself would wait for
    minutes."""
    give_up = time.monotonic() + 30
    pull_objects = HttpGrid.pull_messages.__globals__["pull_objects"]  # as Flower's grid finds it

    def never(name: str) -> bytes:
        assert time.monotonic() < give_up
        raise ObjectUnavailableError(name)

    class HalfSent(Nodes):
        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            with pytest.raises(ObjectPullError):
                pull_objects(object_ids=["announced"], pull_object_fn=never)
            return super().pull_messages(message_ids)

    assert GridTransport(HalfSent({1: ECHO})).exchange({1: b"now"}, 1.0, told) == {1: b"now"}
