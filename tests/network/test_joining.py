"""How connected clients become clients of a run, and what the server does about those that do not."""

from collections.abc import Callable, Mapping
from concurrent.futures import Future

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baffle.aggregation.messages import Agree, Hello, MaskedRequest, Opening, Turn, Unmask
from baffle.core.messages import Abstention, CatchUp, Message, RoundRequest, encode, first_number, tag_of
from baffle.network import joining
from baffle.network.joining import (
    NO_RUN,
    UNREADY,
    Begin,
    ConnectedClients,
    Introduce,
    Introduction,
    Over,
    Ready,
    Reply,
    decode_asked,
)
from baffle.network.link.envelope import PHASES
from tests.support.lines_in_memory import LinesInMemory

RUN = bytes([7] * 32)
DIGEST = bytes(range(32))
BEGIN = Begin(RUN, "", ())


def client(samples: int = 5) -> Callable[[bytes], bytes]:
    """A client that introduces itself, is ready for any run, and echoes everything else."""

    def answer(data: bytes) -> bytes:
        match decode_asked(data):
            case Introduce():
                return encode(Introduction(samples, 0, 0))
            case Begin():
                return encode(Ready(DIGEST))
            case _:
                return data

    return answer


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def lines() -> LinesInMemory:
    return LinesInMemory()


@pytest.fixture
def clients(lines: LinesInMemory, told: list[str], monkeypatch: pytest.MonkeyPatch) -> ConnectedClients:
    monkeypatch.setattr(joining, "AGAIN", 0.0)
    return ConnectedClients(lines, dict.fromkeys(range(3), b""), RUN, "", told.append)


@given(st.binary(max_size=64))
def test_messages_that_are_not_about_joining_are_not_decoded(data: bytes) -> None:
    assert decode_asked(data) is None
    assert decode_asked(encode(Abstention(0))) is None


@given(st.integers(0, 2**32 - 1))
def test_the_link_finds_the_round_of_every_request(number: int) -> None:
    about = RoundRequest(number, 1, DIGEST, DIGEST, CatchUp("weights", 0, ()))
    opening = Opening(number, (1, 2), 2, 2, DIGEST, ())
    unmask = Unmask(number, (1, 2), ())
    requests: list[Message] = [about, Over(about), MaskedRequest(about, (1, 2), DIGEST, b""), Hello(number)]
    requests += [Agree(number, (1,), ()), Turn(None, opening), Turn(unmask, None), Turn(unmask, opening)]
    assert {first_number(encode(request)) for request in requests} == {number}
    assert {first_number(encode(request)) for request in (BEGIN, Introduce(RUN, ""))} == {0}
    assert {tag_of(encode(request)) for request in (*requests, BEGIN, Introduce(RUN, ""))} == set(PHASES)


def test_clients_are_met_told_about_the_run_and_asked(clients: ConnectedClients, lines: LinesInMemory) -> None:
    lines.clients.update({2: client(), 0: client()})
    assert set(clients.meet()) == {0, 2}
    assert clients.exchange({0: b"a", 2: b"b"}) == {}  # nobody has been told about the run yet
    assert clients.start_run(dict.fromkeys([0, 2], BEGIN), DIGEST) == {0, 2}
    assert clients.exchange({0: b"a", 1: b"c", 2: b"b"}) == {0: b"a", 2: b"b"}
    assert clients.meet() == {}
    assert lines.runs == [NO_RUN, NO_RUN, RUN]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (client(samples=0), "it has no samples"),
        (lambda _data: encode(Abstention(0)), "it abstained; its own log says why"),
        (lambda _data: encode(Ready(DIGEST)), "expected Introduction, got Ready"),
        (lambda _data: UNREADY, "expected Introduction, got Unready"),
        (lambda _data: b"\xc1", "expected a message of type"),
    ],
)
def test_a_client_that_does_not_introduce_itself_is_reported_once_and_harms_nobody(
    clients: ConnectedClients, lines: LinesInMemory, told: list[str], answer: Callable[[bytes], bytes], reason: str
) -> None:
    lines.clients.update({1: answer, 2: client()})
    assert set(clients.meet()) == {2}
    assert clients.meet() == {}
    assert len(told) == 1
    assert told[0].startswith("client 1 does not take part: ")
    assert reason in told[0]


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (Ready(bytes(32)), "it follows another plan"),
        (Abstention(0), "it abstained; its own log says why"),
        (None, "it did not answer"),
    ],
)
def test_a_client_that_does_not_take_part_is_reported_and_asked_again(
    clients: ConnectedClients, lines: LinesInMemory, told: list[str], reply: Message | None, reason: str
) -> None:
    honest = client()
    lines.clients[0] = lambda data: (
        (encode(reply) if reply else None) if isinstance(decode_asked(data), Begin) else honest(data)
    )
    assert set(clients.meet()) == {0}
    assert clients.start_run(dict.fromkeys([0], BEGIN), DIGEST) == set()
    assert told == [f"client 0 does not take part: {reason}"]
    lines.clients[0] = honest
    assert set(clients.meet()) == {0}
    assert clients.start_run(dict.fromkeys([0], BEGIN), DIGEST) == {0}


def test_what_a_client_says_is_quoted_safely(clients: ConnectedClients, lines: LinesInMemory, told: list[str]) -> None:
    """Otherwise it could write lines of its own into the server's log."""
    honest, no = client(), msgspec.msgpack.encode(["no\x1b[2J\nclient 1 takes part" + "x" * 100_000])
    lines.clients.update({0: lambda data: honest(data) if isinstance(decode_asked(data), Introduce) else no})
    lines.clients.update({2: lambda _data: no})
    assert set(clients.meet()) == {0}
    clients.start_run(dict.fromkeys([0], BEGIN), DIGEST)
    assert set(clients.meet()) == {0}
    clients.ready.add(0)
    clients.end_run({0: RoundRequest(1, 0, DIGEST, DIGEST, CatchUp("weights", 0, ()))})
    assert len(told) == 3
    assert all(line.isprintable() and "no[2J client 1 takes part" in line and len(line) < 500 for line in told)


def test_a_silent_client_and_one_that_was_turned_away_are_left_alone_for_a_while(
    clients: ConnectedClients, lines: LinesInMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everybody waits for the answer: a silent client would stretch every round to the deadline."""
    monkeypatch.setattr(joining, "AGAIN", 1000.0)
    asked = list[int]()

    def silent(_data: bytes) -> None:
        asked.append(1)

    def refusing(_data: bytes) -> bytes:
        asked.append(2)
        return encode(Abstention(0))

    lines.clients.update({1: silent, 2: refusing})
    assert clients.meet() == {}
    assert sorted(asked) == [1, 2]
    lines.clients[0] = client()
    assert set(clients.meet()) == {0}
    assert sorted(asked) == [1, 2]


def test_nobody_waits_for_a_client_that_takes_its_time(clients: ConnectedClients) -> None:
    """It may have to load its samples or its model. Its answer is taken when it has come."""
    answers: dict[int, bytes] = {}
    late: Reply = Future()

    class Slow(LinesInMemory):
        def post(self, requests: Mapping[int, bytes], run: bytes) -> Mapping[int, Reply]:
            quick = super().post({other: data for other, data in requests.items() if other != 1}, run)
            answers.update({other: data for other, data in requests.items() if other == 1})
            return {**quick, **dict.fromkeys(answers, late)}

    def answer_late() -> None:
        nonlocal late
        done, late = late, Future()
        done.set_result(client()(answers.pop(1)))

    clients.lines = slow = Slow({0: client(), 1: client()})
    assert set(clients.meet()) == {0}
    assert clients.start_run({0: BEGIN}, DIGEST) == {0}
    assert clients.exchange({0: b"a", 1: b"b"}) == {0: b"a"}
    assert clients.meet() == {}
    answer_late()
    assert set(clients.meet()) == {1}
    assert clients.start_run({1: BEGIN}, DIGEST) == set()
    assert clients.starting
    assert clients.exchange({0: b"a", 1: b"b"}) == {0: b"a"}
    answer_late()
    assert clients.start_run({}, DIGEST) == {1}
    assert not clients.starting
    assert clients.exchange({0: b"a", 1: b"b"}) == {0: b"a", 1: b"b"}
    slow.clients[1] = client()  # it was restarted, and leaves before it has introduced itself
    assert clients.meet() == {}
    del slow.clients[1]
    assert clients.meet() == {}
    answer_late()
    assert clients.meet() == {}
    slow.clients[1] = client()
    clients.meet()
    answer_late()
    assert set(clients.meet()) == {1}


def test_a_client_that_forgot_the_run_was_restarted_or_has_left_is_met_again(
    clients: ConnectedClients, lines: LinesInMemory, told: list[str]
) -> None:
    def meet_and_start() -> None:
        clients.start_run(dict.fromkeys(clients.meet(), BEGIN), DIGEST)

    forgetful = client()
    answers: list[Callable[[bytes], bytes]] = [forgetful]
    lines.clients[0] = lambda data: answers[-1](data)
    meet_and_start()
    answers.append(lambda _data: UNREADY)
    assert clients.exchange({0: b"a"}) == {}
    assert clients.ready == set()
    assert told == ["client 0 must be told about the run again"]
    answers.pop()
    meet_and_start()
    assert clients.exchange({0: b"a"}) == {0: b"a"}
    lines.clients[0] = client()  # another process
    meet_and_start()
    assert told[-1] == "client 0 was restarted"
    assert clients.exchange({0: b"a"}) == {0: b"a"}
    gone = lines.clients.pop(0)
    assert clients.meet() == {}
    assert told[-1] == "client 0 has left"
    lines.clients[0] = gone
    meet_and_start()
    assert clients.exchange({0: b"a"}) == {0: b"a"}


def test_a_client_that_comes_back_as_the_same_process_takes_part_at_once(
    clients: ConnectedClients, lines: LinesInMemory, told: list[str]
) -> None:
    lines.clients = {0: client(), 1: client()}
    clients.start_run(dict.fromkeys(clients.meet(), BEGIN), DIGEST)
    away, asked = lines.clients.pop(0), lines.exchanges
    assert clients.meet() == {}
    assert clients.ready == clients.reachable() == {1}
    lines.clients[0] = away
    assert clients.meet() == {}
    assert clients.ready == clients.reachable() == {0, 1}
    assert lines.exchanges == asked
    assert told == ["client 0 has left", "client 0 is back"]


def test_a_client_that_comes_back_as_another_process_introduces_itself(
    clients: ConnectedClients, lines: LinesInMemory
) -> None:
    lines.clients = {0: client()}
    clients.start_run(dict.fromkeys(clients.meet(), BEGIN), DIGEST)
    del lines.clients[0]
    clients.meet()
    lines.clients[0] = client()
    assert clients.meet().keys() == {0}
    assert clients.ready == set()


def test_a_client_that_forgot_the_run_introduces_itself_even_as_the_same_process(
    clients: ConnectedClients, lines: LinesInMemory
) -> None:
    introduce = client()
    lines.clients = {0: lambda data: introduce(data) if decode_asked(data) else UNREADY}
    clients.start_run(dict.fromkeys(clients.meet(), BEGIN), DIGEST)
    assert clients.exchange({0: b"a round"}) == {}
    assert clients.meet().keys() == {0}
    assert clients.ready == set()
