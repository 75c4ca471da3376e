"""How clients introduce themselves, and which introductions the server believes."""

from collections.abc import Callable

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from baffle.core.messages import Abstention, Message, decode, encode
from baffle.errors import RefusalError
from baffle.network import joining
from baffle.network.joining import (
    UNREADY,
    Begin,
    ConnectedClients,
    Introduce,
    Introduction,
    Ready,
    decode_asked,
    introduce_oneself,
    require_known,
)
from tests.support.nodes_in_memory import Nodes

RUN = bytes(32)
DIGEST = bytes(range(32))
IDENTITIES = [Ed25519PrivateKey.generate() for _ in range(3)]
DIRECTORY = {number: key.public_key().public_bytes_raw() for number, key in enumerate(IDENTITIES)}
ASKED = Introduce(RUN, bytes(32), "")

numbers = st.integers(0, 2**63 - 1)


def introduced(number: int, key: Ed25519PrivateKey | None = None, samples: int = 5) -> Callable[[bytes], bytes]:
    """A node that introduces itself as this client, is ready for any run, and echoes everything else."""

    def answer(data: bytes) -> bytes:
        match decode_asked(data):
            case Introduce() as asked:
                return encode(introduce_oneself(key or IDENTITIES[number], asked, number, samples, 0, 0))
            case Begin():
                return encode(Ready(DIGEST))
            case _:
                return data

    return answer


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def clients(told: list[str], monkeypatch: pytest.MonkeyPatch) -> ConnectedClients:
    monkeypatch.setattr(joining, "AGAIN", 0.0)
    return ConnectedClients(Nodes(), DIRECTORY, RUN, "", told.append)


def computers(clients: ConnectedClients) -> dict[int, Callable[[bytes], bytes | None]]:
    assert isinstance(clients.nodes, Nodes)
    return clients.nodes.computers


@given(st.sampled_from(range(3)), numbers.filter(bool), numbers, numbers)
def test_a_signed_introduction_is_believed(client: int, samples: int, affords: int, held: int) -> None:
    introduction = introduce_oneself(IDENTITIES[client], ASKED, client, samples, affords, held)
    require_known(DIRECTORY, ASKED, decode(encode(introduction), Introduction))


@given(st.sampled_from(["client", "samples", "affords", "held", "run", "challenge", "signature"]), st.integers(1, 255))
def test_a_changed_or_replayed_introduction_is_refused(part: str, change: int) -> None:
    introduction = introduce_oneself(IDENTITIES[1], ASKED, 1, 5, 0, 7)
    asked = ASKED
    if part in ("run", "challenge"):  # the same introduction in answer to another question
        asked = msgspec.structs.replace(asked, **{part: bytes([change]) * 32})
    elif part == "signature":
        spoilt = bytes([introduction.signature[0] ^ change]) + introduction.signature[1:]
        introduction = msgspec.structs.replace(introduction, signature=spoilt)
    else:
        other = {"client": 2, "samples": 5 + change, "affords": change, "held": 7 + change}
        introduction = msgspec.structs.replace(introduction, **{part: other[part]})
    with pytest.raises(RefusalError, match="is not signed with its key"):
        require_known(DIRECTORY, asked, introduction)


@given(st.binary(max_size=64))
def test_messages_that_are_not_about_joining_are_not_decoded(data: bytes) -> None:
    assert decode_asked(data) is None
    assert decode_asked(encode(Abstention(0, "no"))) is None


def test_clients_are_met_told_about_the_run_and_asked_by_their_numbers(clients: ConnectedClients) -> None:
    computers(clients).update({77: introduced(2), 5: introduced(0)})
    assert set(clients.meet_new_nodes()) == {0, 2}
    assert clients.met == {2: 77, 0: 5}
    assert clients.exchange({0: b"a", 2: b"b"}) == {}  # nobody has been told about the run yet
    assert clients.start_run([0, 2], Begin(RUN, "", ()), DIGEST) == {0, 2}
    assert clients.exchange({0: b"a", 1: b"c", 2: b"b"}) == {0: b"a", 2: b"b"}
    assert clients.meet_new_nodes() == {}


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (introduced(1, IDENTITIES[2]), "in the name of client 1 is not signed with its key"),
        (introduced(9, IDENTITIES[2]), "client 9 is not on the roster"),
        (introduced(1, samples=0), "client 1 has no samples"),
        (lambda _data: encode(Abstention(0, "another plan")), "another plan"),
        (lambda _data: encode(Ready(DIGEST)), "expected Introduction, got Ready"),
        (lambda _data: UNREADY, "expected Introduction, got Unready"),
        (lambda _data: b"\xc1", "expected a message of type"),
    ],
)
def test_a_node_that_is_no_client_is_reported_once_and_harms_nobody(
    clients: ConnectedClients, told: list[str], answer: Callable[[bytes], bytes], reason: str
) -> None:
    computers(clients).update({1: answer, 2: introduced(0)})
    assert set(clients.meet_new_nodes()) == {0}
    assert clients.meet_new_nodes() == {}
    assert len(told) == 1
    assert told[0].startswith("turned away")
    assert reason in told[0]


def test_a_replayed_introduction_is_refused(clients: ConnectedClients, told: list[str]) -> None:
    """Each question has a new challenge, so an introduction that was overheard is of no use."""
    overheard: list[bytes] = []
    honest = introduced(0)

    def tapped(data: bytes) -> bytes:
        overheard.append(honest(data))
        return overheard[-1]

    computers(clients)[1] = tapped
    assert set(clients.meet_new_nodes()) == {0}
    computers(clients)[2] = lambda _data: overheard[0]
    assert clients.meet_new_nodes() == {}
    assert clients.met == {0: 1}
    assert "is not signed" in told[-1]


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (Ready(bytes(32)), "it follows another plan"),
        (Abstention(0, "the disk is full"), "the disk is full"),
        (None, "it did not answer"),
    ],
)
def test_a_client_that_does_not_take_part_is_reported_and_asked_again(
    clients: ConnectedClients, told: list[str], reply: Message | None, reason: str
) -> None:
    honest = introduced(0)
    computers(clients)[1] = lambda data: (
        (encode(reply) if reply else None) if isinstance(decode_asked(data), Begin) else honest(data)
    )
    assert set(clients.meet_new_nodes()) == {0}
    assert clients.start_run([0], Begin(RUN, "", ()), DIGEST) == set()
    assert told == [f"turned away: client 0 does not take part: {reason}"]
    computers(clients)[1] = honest
    assert set(clients.meet_new_nodes()) == {0}
    assert clients.start_run([0], Begin(RUN, "", ()), DIGEST) == {0}


def test_a_silent_node_and_one_that_was_turned_away_are_left_alone_for_a_while(
    clients: ConnectedClients, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everybody waits for the answer: a silent node would stretch every round to the deadline."""
    monkeypatch.setattr(joining, "AGAIN", 1000.0)
    asked = list[int]()

    def silent(_data: bytes) -> None:
        asked.append(1)

    def refusing(_data: bytes) -> bytes:
        asked.append(2)
        return encode(Abstention(0, "no"))

    computers(clients).update({1: silent, 2: refusing, 3: introduced(0)})
    assert set(clients.meet_new_nodes()) == {0}
    assert sorted(asked) == [1, 2]
    assert clients.meet_new_nodes() == {}
    assert sorted(asked) == [1, 2]
    computers(clients)[4] = introduced(1)
    assert set(clients.meet_new_nodes()) == {1}
    assert sorted(asked) == [1, 2]


def test_a_client_that_was_restarted_or_has_left_is_met_again(clients: ConnectedClients, told: list[str]) -> None:
    computers(clients)[1] = introduced(0)
    clients.start_run(clients.meet_new_nodes(), Begin(RUN, "", ()), DIGEST)
    computers(clients)[1] = lambda _data: UNREADY
    assert clients.exchange({0: b"a"}) == {}
    assert clients.ready == set()
    assert told == ["client 0 must be told about the run again"]
    computers(clients)[1] = introduced(0)
    clients.start_run(clients.meet_new_nodes(), Begin(RUN, "", ()), DIGEST)
    assert clients.exchange({0: b"a"}) == {0: b"a"}
    computers(clients)[8] = computers(clients).pop(1)  # it comes back as another node
    clients.start_run(clients.meet_new_nodes(), Begin(RUN, "", ()), DIGEST)
    assert told[-1] == "client 0 has left"
    assert clients.exchange({0: b"a"}) == {0: b"a"}
