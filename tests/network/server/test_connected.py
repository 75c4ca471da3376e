"""How connected clients come to take part in a run, and what the server does about those that do not."""

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple, cast

import msgspec
import pytest

from baffle.aggregation.server.faults import SHORTEST, Faults
from baffle.core.messages import Abstention, CatchUp, Message, RoundRequest, encode, tag_of
from baffle.network import joining
from baffle.network.joining import (
    UNREADY,
    Begin,
    Done,
    Introduce,
    Introduction,
    Openings,
    Over,
    Ready,
    Salted,
    decode_asked,
)
from baffle.network.server.connected import AGAIN, ConnectedClients
from baffle.network.server.epochs import Epochs
from baffle.statement import NOTHING, PROTOCOL, Commitment, EpochRecord, Statement
from tests.support.lines_in_memory import LinesInMemory

HASH, SIGNATURE, SALT = bytes(range(32)), bytes(64), bytes([5] * 32)
INTRODUCE = Introduce("", 1, HASH, 0)


def epoch(*clients: int) -> joining.EpochTerms:
    """An epoch of these clients."""
    commitments = tuple(Commitment(client, HASH, SIGNATURE) for client in clients)
    statement = Statement(PROTOCOL, "", HASH, 1, HASH, (4, 4, 4), 0, NOTHING, 0, HASH, commitments, ())
    return joining.EpochTerms(EpochRecord(encode(statement), b""), statement, SALT, ())


RUN = epoch(0, 1, 2).run
LAST = RoundRequest(1, HASH, HASH, HASH, CatchUp("outcomes", 0, ()))


def client(salt: bytes = SALT) -> Callable[[bytes], bytes]:
    """A client that introduces itself, is ready for any run, and echoes everything else."""

    def answer(data: bytes) -> bytes:
        match decode_asked(data):
            case Introduce():
                return encode(Introduction(0, HASH, SIGNATURE))
            case Begin(answered=answered):
                return encode(Ready(HASH, SIGNATURE, 0, answered))
            case Openings():
                return encode(Salted(salt))
            case Over():
                return encode(Done(HASH, SIGNATURE))
            case _:
                return data

    return answer


def replying(kind: type[Message], reply: Message | bytes | None) -> Callable[[bytes], bytes | None]:
    """A client that answers one kind of message differently."""
    honest, other = client(), encode(reply) if isinstance(reply, Message) else reply
    return lambda data: other if isinstance(decode_asked(data), kind) else honest(data)


@dataclass
class Offered:
    """What a server tells clients."""

    epoch: joining.EpochTerms | None
    question: Introduce = INTRODUCE
    new_roster: joining.NewRoster = joining.NewRoster(b"a roster")  # noqa: RUF009
    places: int = 3
    most_request_bytes: int = 1000

    def answered(self, client: int) -> int:
        return 10 + client


class Setting(NamedTuple):
    clients: ConnectedClients
    lines: LinesInMemory
    told: list[str]
    offer: Offered


@pytest.fixture
def setting() -> Setting:
    """An epoch of all three clients."""
    lines, told, offer = LinesInMemory(), list[str](), Offered(epoch(0, 1, 2))
    return Setting(
        ConnectedClients(lines, cast(Epochs, offer), told.append, lines.clock, Faults(lines.clock.now)),
        lines,
        told,
        offer,
    )


def meet(clients: ConnectedClients) -> dict[int, Ready]:
    """Meet until nobody has more to answer."""
    return clients.meet() | clients.meet()


def test_clients_of_the_epoch_are_told_the_statement_and_the_nonces(setting: Setting) -> None:
    clients, lines = setting.clients, setting.lines
    lines.clients.update({2: client(), 0: client()})
    assert clients.meet() == {}  # they have been asked for their nonces, and are told those of the others
    assert clients.starting
    assert clients.exchange({0: b"a", 2: b"b"}) == {}
    assert {number: ready.answered for number, ready in clients.meet().items()} == {0: 10, 2: 12}
    assert not clients.starting
    assert clients.exchange({0: b"a", 1: b"c", 2: b"b"}) == {0: b"a", 2: b"b"}
    assert clients.meet() == {}
    assert lines.runs == [joining.NO_RUN, joining.NO_RUN, RUN]


def test_others_introduce_themselves_and_wait_for_the_next_epoch(setting: Setting) -> None:
    clients, lines, _, offer = setting
    offer.epoch = epoch(0)
    lines.clients.update({0: client(), 1: client()})
    assert set(meet(clients)) == clients.ready == {0}
    assert set(clients.introduced) == {1}
    assert clients.here() == {0, 1}
    assert clients.exchange({0: b"a", 1: b"b"}) == {0: b"a"}
    asked = lines.exchanges
    assert meet(clients) == {}
    assert lines.exchanges == asked
    del lines.clients[1]
    assert clients.here() == {0}
    clients.meet()
    assert clients.introduced == {}


def test_a_new_epoch_has_its_own_clients(setting: Setting) -> None:
    clients, lines, _, offer = setting
    offer.epoch = epoch(0)
    lines.clients.update({0: client(), 1: client(), 2: client()})
    meet(clients)
    assert clients.ready == {0}
    offer.epoch = epoch(0, 1)
    assert clients.enter([0, 1]) == {0, 1}
    assert (clients.ready, clients.introduced) == ({0, 1}, {})
    assert clients.ever_ready == {0, 1}
    clients.meet()
    assert set(clients.introduced) == {2}  # for the epoch after this one


REFUSALS: list[tuple[type[Message], Message | bytes | None, str]] = [
    (Introduce, Abstention(0), "it abstained; its own log says why"),
    (Introduce, Ready(HASH, SIGNATURE, 0, 0), "expected Introduction, got Ready"),
    (Introduce, b"\xc1", "expected a message of type"),
    (Introduce, None, "it did not answer"),
    (Begin, Abstention(0), "it abstained; its own log says why"),
    (Begin, Salted(SALT), "expected Ready, got Salted"),
    (Openings, Salted(HASH), "it follows another salt"),
    (Openings, None, "it did not answer"),
]


@pytest.mark.parametrize("refusal", REFUSALS)
def test_a_client_that_refuses_is_reported_once_and_asked_again(
    setting: Setting, refusal: tuple[type[Message], Message | bytes | None, str]
) -> None:
    clients, lines, told, offer = setting
    kind, reply, reason = refusal
    if kind is Introduce:
        offer.epoch = None
    lines.clients.update({1: replying(kind, reply), 2: client()})
    assert meet(clients).keys() | clients.introduced.keys() == {2}
    meet(clients)
    assert len(told) == 1
    assert told[0].startswith("client 1 does not take part: ")
    assert reason in told[0]
    lines.clients[1] = client()
    assert meet(clients).keys() | clients.introduced.keys() >= {1}


def test_what_is_collected_is_of_one_kind_and_the_others_are_left_out(setting: Setting) -> None:
    clients, lines, told, _ = setting
    lines.clients = {0: client(), 1: replying(Introduce, Salted(SALT)), 2: lambda _data: None}
    answers = clients.collect(Introduction, dict.fromkeys(range(3), INTRODUCE))
    assert answers == {0: Introduction(0, HASH, SIGNATURE)}
    assert told == [
        "client 1 does not take part: expected Introduction, got Salted",
        "client 2 does not take part: it did not answer",
    ]
    assert clients.collect(Introduction, {}) == {}


def test_what_a_client_says_is_quoted_safely(setting: Setting) -> None:
    """Otherwise it could write lines of its own into the server's log."""
    clients, lines, told, _ = setting
    no = msgspec.msgpack.encode(["no\x1b[2J\nclient 1 takes part" + "x" * 100_000])
    lines.clients = {0: replying(Begin, no), 1: replying(Openings, no), 2: replying(Over, no)}
    assert set(meet(clients)) == {2}
    assert clients.end_run({2: LAST}) == {}
    assert len(told) == 3
    assert all(line.isprintable() and "no[2J client 1 takes part" in line and len(line) < 500 for line in told)


def test_only_clients_with_the_last_weights_hold_them(setting: Setting) -> None:
    clients, lines, told, _ = setting
    lines.clients = {0: client(), 1: replying(Over, Done(SALT, SIGNATURE)), 2: replying(Over, None)}
    assert set(meet(clients)) == {0, 1, 2}
    assert clients.end_run(dict.fromkeys(range(3), LAST)) == {0: Done(HASH, SIGNATURE)}
    assert told == ["client 1 does not hold the last weights: it holds others"]


def test_a_silent_client_and_one_that_was_turned_away_are_left_alone_for_a_while(setting: Setting) -> None:
    """Everybody waits for the answer: a silent client would stretch every round to the deadline."""
    clients, lines = setting.clients, setting.lines
    lines.seconds = 0.0
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
    assert set(meet(clients)) == {0}
    assert sorted(asked) == [1, 2]


def test_nobody_waits_for_a_client_that_takes_its_time(setting: Setting) -> None:
    """It may have to load its samples or its model. Its answer is taken when it has come."""
    clients = setting.clients
    answers: dict[int, bytes] = {}
    late: joining.Reply = Future()

    class Slow(LinesInMemory):
        def post(self, requests: Mapping[int, bytes], run: bytes) -> Mapping[int, joining.Reply]:
            quick = super().post({other: data for other, data in requests.items() if other != 1}, run)
            answers.update({other: data for other, data in requests.items() if other == 1})
            return {**quick, **{other: late for other in requests if other == 1}}

    def answer_late() -> None:
        nonlocal late
        done, late = late, Future()
        done.set_result(client()(answers.pop(1)))

    clients.lines = slow = Slow({0: client(), 1: client()})
    assert set(meet(clients)) == {0}
    assert clients.starting
    assert clients.exchange({0: b"a", 1: b"b"}) == {0: b"a"}
    answer_late()
    assert meet(clients) == {}  # now it is told the nonces
    assert clients.starting
    answer_late()
    assert set(clients.meet()) == {1}
    assert not clients.starting
    assert clients.exchange({0: b"a", 1: b"b"}) == {0: b"a", 1: b"b"}
    slow.clients[1] = client()  # it was restarted, and leaves before it is ready
    assert clients.meet() == {}
    del slow.clients[1]
    assert clients.meet() == {}
    answer_late()
    assert meet(clients) == {}
    slow.clients[1] = client()
    for _ in range(2):
        assert clients.meet() == {}
        answer_late()
    assert set(clients.meet()) == {1}


def test_a_client_that_forgot_the_run_was_restarted_or_has_left_is_met_again(setting: Setting) -> None:
    clients, lines, told, _ = setting
    answers: list[Callable[[bytes], bytes]] = [client()]
    lines.clients[0] = lambda data: answers[-1](data)
    assert set(meet(clients)) == {0}
    answers.append(lambda _data: UNREADY)
    assert clients.exchange({0: b"a"}) == {}
    assert clients.ready == set()
    assert told == ["client 0 must be told about the run again"]
    answers.pop()
    assert set(meet(clients)) == {0}
    assert clients.exchange({0: b"a"}) == {0: b"a"}
    lines.clients[0] = client()  # another process
    assert set(meet(clients)) == {0}
    assert told[-1] == "client 0 was restarted"
    assert clients.exchange({0: b"a"}) == {0: b"a"}
    gone = lines.clients.pop(0)
    assert clients.meet() == {}
    assert told[-1] == "client 0 has left"
    lines.clients[0] = gone
    clients.meet()
    assert clients.exchange({0: b"a"}) == {0: b"a"}


def test_a_client_that_comes_back_as_the_same_process_takes_part_at_once(setting: Setting) -> None:
    clients, lines, told, _ = setting
    lines.clients = {0: client(), 1: client()}
    meet(clients)
    away, asked = lines.clients.pop(0), lines.exchanges
    assert clients.meet() == {}
    assert clients.ready == clients.reachable() == {1}
    lines.clients[0] = away
    assert clients.meet() == {}
    assert clients.ready == clients.reachable() == {0, 1}
    assert lines.exchanges == asked
    assert told == ["client 0 has left", "client 0 is back"]


def test_a_client_that_does_not_know_the_roster_is_handed_it_once(setting: Setting) -> None:
    clients, lines, told, _ = setting
    asked, honest, knows = list[str](), client(), list[bool]()

    def behind(data: bytes) -> bytes:
        asked.append(tag_of(data))
        if asked[-1] == "new-roster":
            return encode(joining.RosterTaken())
        return honest(data) if knows else joining.BEHIND

    lines.clients[0] = behind
    for _ in range(3):
        clients.meet()
    assert asked == ["begin", "new-roster", "begin"]
    assert told == ["client 0 does not take part: it was handed the roster, and says that it does not know it"]
    knows.append(True)
    lines.clock.sleep(AGAIN)
    assert set(meet(clients)) == {0}
    assert asked[3:] == ["begin", "openings"]


def test_a_client_that_spoils_statements_is_left_out_twice_as_long_each_time(setting: Setting) -> None:
    clients, lines = setting.clients, setting.lines
    lines.seconds = 0.0
    for times in range(3):
        lines.clients[0] = client()  # also if it comes as another process
        clients.faults.charge(0, "it has spoilt a statement")
        asked = lines.exchanges
        lines.clock.sleep(SHORTEST * 2**times - 1)
        assert meet(clients) == {}
        assert lines.exchanges == asked
        lines.clock.sleep(1)
        assert set(meet(clients)) == {0}


def test_a_client_that_has_fallen_too_far_behind_enters_again_with_the_next_epoch(setting: Setting) -> None:
    clients, lines, told, _ = setting
    lines.clients = {0: client(), 1: client()}
    meet(clients)
    assert clients.exchange({0: bytes(1001), 1: b"a"}) == {1: b"a"}
    assert told == ["client 0 has fallen too far behind, and enters again with the next epoch"]
    assert meet(clients) == {}
    assert set(clients.introduced) == {0}
    clients.enter([0, 1])
    assert clients.exchange({0: b"a", 1: b"a"}) == {0: b"a", 1: b"a"}


def test_a_client_without_a_place_waits_for_the_next_run(setting: Setting) -> None:
    clients, lines, told, offer = setting
    offer.epoch, offer.places = None, 1
    lines.clients = {0: client(), 1: client()}
    clients.meet()
    assert set(clients.introduced) == {0}
    assert told == ["client 1 does not take part: it has a place from the next run on"]
