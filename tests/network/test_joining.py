"""Who a node is, and whom the server believes."""

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
    Introduce,
    Introduction,
    Ready,
    Roll,
    decode_asked,
    introduce_oneself,
    require_known,
)
from tests.support.nodes_in_memory import Nodes

RUN, TRAJECTORY = bytes(32), bytes(range(32))
IDENTITIES = [Ed25519PrivateKey.generate() for _ in range(3)]
DIRECTORY = {number: key.public_key().public_bytes_raw() for number, key in enumerate(IDENTITIES)}
ASKED = Introduce(RUN, bytes(32), "")

numbers = st.integers(0, 2**63 - 1)


def introduced(number: int, key: Ed25519PrivateKey | None = None, samples: int = 5) -> Callable[[bytes], bytes]:
    """A node that says it is a client, and is ready for everything."""

    def answer(data: bytes) -> bytes:
        match decode_asked(data):
            case Introduce() as asked:
                return encode(introduce_oneself(key or IDENTITIES[number], asked, number, samples, 0, 0))
            case Begin():
                return encode(Ready(TRAJECTORY))
            case _:
                return data

    return answer


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def roll(told: list[str], monkeypatch: pytest.MonkeyPatch) -> Roll:
    monkeypatch.setattr(joining, "AGAIN", 0.0)
    return Roll(Nodes(), DIRECTORY, RUN, "", told.append)


def computers(roll: Roll) -> dict[int, Callable[[bytes], bytes | None]]:
    assert isinstance(roll.nodes, Nodes)
    return roll.nodes.computers


@given(st.sampled_from(range(3)), numbers.filter(bool), numbers, numbers)
def test_an_introduction_is_believed_as_it_was_signed(client: int, samples: int, affords: int, held: int) -> None:
    said = introduce_oneself(IDENTITIES[client], ASKED, client, samples, affords, held)
    require_known(DIRECTORY, ASKED, decode(encode(said), Introduction))


@given(st.sampled_from(["client", "samples", "affords", "held", "run", "challenge", "signature"]), st.integers(1, 255))
def test_a_changed_or_replayed_introduction_is_refused(part: str, change: int) -> None:
    said = introduce_oneself(IDENTITIES[1], ASKED, 1, 5, 0, 7)
    asked = ASKED
    if part in ("run", "challenge"):  # the same words in answer to another question
        asked = msgspec.structs.replace(asked, **{part: bytes([change]) * 32})
    elif part == "signature":
        said = msgspec.structs.replace(said, signature=bytes([said.signature[0] ^ change]) + said.signature[1:])
    else:
        other = {"client": 2, "samples": 5 + change, "affords": change, "held": 7 + change}
        said = msgspec.structs.replace(said, **{part: other[part]})
    with pytest.raises(RefusalError, match="that its key has not signed"):
        require_known(DIRECTORY, asked, said)


@given(st.binary(max_size=64))
def test_what_is_not_about_joining_is_left_to_others(data: bytes) -> None:
    assert decode_asked(data) is None
    assert decode_asked(encode(Abstention(0, "no"))) is None


def test_clients_are_met_begun_and_asked_by_their_numbers(roll: Roll) -> None:
    computers(roll).update({77: introduced(2), 5: introduced(0)})
    assert set(roll.meet()) == {0, 2}
    assert roll.met == {2: 77, 0: 5}
    assert roll.exchange({0: b"a", 2: b"b"}) == {}  # nobody is ready
    assert roll.begin([0, 2], Begin(RUN, "", ()), TRAJECTORY) == {0, 2}
    assert roll.exchange({0: b"a", 1: b"c", 2: b"b"}) == {0: b"a", 2: b"b"}
    assert roll.meet() == {}


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (introduced(1, IDENTITIES[2]), "in the name of client 1 that its key has not signed"),
        (introduced(9, IDENTITIES[2]), "client 9 is not on the roster"),
        (introduced(1, samples=0), "client 1 has no samples"),
        (lambda _data: encode(Abstention(0, "another plan")), "another plan"),
        (lambda _data: encode(Ready(TRAJECTORY)), "expected Introduction, got Ready"),
        (lambda _data: UNREADY, "expected Introduction, got Unready"),
        (lambda _data: b"\xc1", "expected a message of type"),
    ],
)
def test_a_node_that_is_nobody_is_named_once_and_harms_nobody(
    roll: Roll, told: list[str], answer: Callable[[bytes], bytes], says: str
) -> None:
    computers(roll).update({1: answer, 2: introduced(0)})
    assert set(roll.meet()) == {0}
    assert roll.meet() == {}
    assert len(told) == 1
    assert told[0].startswith("turned away")
    assert says in told[0]


def test_an_old_answer_is_worthless(roll: Roll, told: list[str]) -> None:
    """Who overhears an introduction cannot use it: every question has a challenge of its own."""
    heard: list[bytes] = []
    honest = introduced(0)

    def overheard(data: bytes) -> bytes:
        heard.append(honest(data))
        return heard[-1]

    computers(roll)[1] = overheard
    assert set(roll.meet()) == {0}
    computers(roll)[2] = lambda _data: heard[0]
    assert roll.meet() == {}
    assert roll.met == {0: 1}
    assert "has not signed" in told[-1]


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        (Ready(bytes(32)), "it follows another plan"),
        (Abstention(0, "the disk is full"), "the disk is full"),
        (None, "it did not answer"),
    ],
)
def test_a_client_that_does_not_begin_is_named_and_asked_again(
    roll: Roll, told: list[str], reply: Message | None, says: str
) -> None:
    honest = introduced(0)
    computers(roll)[1] = lambda data: (
        (encode(reply) if reply else None) if isinstance(decode_asked(data), Begin) else honest(data)
    )
    assert set(roll.meet()) == {0}
    assert roll.begin([0], Begin(RUN, "", ()), TRAJECTORY) == set()
    assert told == [f"turned away: client 0 does not take part: {says}"]
    computers(roll)[1] = honest
    assert set(roll.meet()) == {0}
    assert roll.begin([0], Begin(RUN, "", ()), TRAJECTORY) == {0}


def test_who_is_silent_or_turned_away_is_left_alone_for_a_while(roll: Roll, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each question costs everybody's time: a silent node would stretch every round to the deadline."""
    monkeypatch.setattr(joining, "AGAIN", 1000.0)
    asked = list[int]()

    def silent(_data: bytes) -> None:
        asked.append(1)

    def nobody(_data: bytes) -> bytes:
        asked.append(2)
        return encode(Abstention(0, "no"))

    computers(roll).update({1: silent, 2: nobody, 3: introduced(0)})
    assert set(roll.meet()) == {0}
    assert sorted(asked) == [1, 2]
    assert roll.meet() == {}
    assert sorted(asked) == [1, 2]
    computers(roll)[4] = introduced(1)
    assert set(roll.meet()) == {1}
    assert sorted(asked) == [1, 2]


def test_who_was_started_anew_or_has_left_is_lost_and_met_again(roll: Roll, told: list[str]) -> None:
    computers(roll)[1] = introduced(0)
    roll.begin(roll.meet(), Begin(RUN, "", ()), TRAJECTORY)
    computers(roll)[1] = lambda _data: UNREADY
    assert roll.exchange({0: b"a"}) == {}
    assert roll.ready == set()
    assert told == ["client 0 must be told about the run again"]
    computers(roll)[1] = introduced(0)
    roll.begin(roll.meet(), Begin(RUN, "", ()), TRAJECTORY)
    assert roll.exchange({0: b"a"}) == {0: b"a"}
    computers(roll)[8] = computers(roll).pop(1)  # it comes back as another node
    roll.begin(roll.meet(), Begin(RUN, "", ()), TRAJECTORY)
    assert told[-1] == "client 0 has left"
    assert roll.exchange({0: b"a"}) == {0: b"a"}
