"""Which node of Flower is which client: nodes prove it once, and nobody believes a stranger."""

from collections.abc import Callable, Iterable
from typing import Any
from uuid import uuid4

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from baffle.core.messages import Abstention, decode, encode
from baffle.flower.identify import Me, Who, proof_text, with_identity

pytest.importorskip("flwr")
from flwr.app import Message
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from baffle.flower import lines
from baffle.flower.lines import FlowerLines
from baffle.flower.records import content_of, to_record
from baffle.flower.run import AppRun

IDENTITIES = [Ed25519PrivateKey.generate() for _ in range(3)]
DIRECTORY = {number: key.public_key().public_bytes_raw() for number, key in enumerate(IDENTITIES)}
RUN = bytes(32)

Answer = Callable[[bytes], bytes]


class Nodes(Grid):
    """Nodes in this process, by arbitrary numbers."""

    def __init__(self) -> None:
        self.answers: dict[int, Answer] = {}
        self._replies: dict[str, Message] = {}

    def get_node_ids(self) -> Iterable[int]:
        return list(self.answers)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        names = []
        for message in messages:
            message.metadata.__dict__["_message_id"] = name = str(uuid4())
            content = content_of(message)
            assert content is not None
            reply = self.answers[message.metadata.dst_node_id](content)
            self._replies[name] = Message(to_record(reply), reply_to=message)
            names.append(name)
        return names

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self._replies.pop(name) for name in list(message_ids) if name in self._replies]

    def _unused(self, *_arguments: Any, **_options: Any) -> Any:
        raise NotImplementedError

    set_run = create_message = send_and_receive = _unused
    run = property(_unused)


def client(number: int, key: Ed25519PrivateKey | None = None) -> Answer:
    """A node that says it is this client, and echoes everything else."""
    return with_identity(key or IDENTITIES[number], number, lambda data: data)


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Nodes:
    for name in ("_task_id", "_run_id", "_node_id"):  # Flower's processes know which run they belong to
        monkeypatch.setattr(TaskIdentity, name, 1)
    monkeypatch.setattr(lines, "AGAIN", 0.0)
    return Nodes()


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def flower(nodes: Nodes, told: list[str]) -> FlowerLines:
    return FlowerLines(AppRun(nodes), DIRECTORY, 5.0, told.append)


def test_requests_reach_the_nodes_that_have_proved_to_be_the_clients(nodes: Nodes, flower: FlowerLines) -> None:
    nodes.answers.update({77: client(2), 5: client(0)})
    assert flower.present() == {2: 77, 0: 5}
    assert flower.carry({0: b"a", 1: b"b", 2: b"c"}, RUN) == {0: b"a", 2: b"c"}
    nodes.answers[9] = nodes.answers.pop(77)  # it comes back as another node
    assert flower.present() == {2: 9, 0: 5}
    assert flower.carry({2: b"c"}, RUN) == {2: b"c"}
    del nodes.answers[9]
    assert flower.present() == {0: 5}
    assert flower.carry({2: b"c"}, RUN) == {}


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (client(1, IDENTITIES[2]), "in the name of client 1 is not signed with its key"),
        (client(9, IDENTITIES[2]), "client 9 is not on the roster"),
        (lambda _data: encode(Abstention(0)), "expected a message of type Me"),
        (lambda _data: b"\xc1", "expected a message of type Me"),
    ],
)
def test_a_node_that_is_no_client_is_reported_once_and_harms_nobody(
    nodes: Nodes, flower: FlowerLines, told: list[str], answer: Answer, reason: str
) -> None:
    nodes.answers.update({1: answer, 2: client(0)})
    assert flower.present() == {0: 2}
    assert flower.present() == {0: 2}
    assert len(told) == 1
    assert told[0].startswith("turned away: ")
    assert reason in told[0]


def test_an_overheard_answer_is_of_no_use(nodes: Nodes, flower: FlowerLines, told: list[str]) -> None:
    overheard: list[bytes] = []
    honest = client(0)

    def tapped(data: bytes) -> bytes:
        overheard.append(honest(data))
        return overheard[-1]

    nodes.answers[1] = tapped
    assert flower.present() == {0: 1}
    nodes.answers[2] = lambda _data: overheard[0]
    assert flower.present() == {0: 1}
    assert "is not signed" in told[-1]


def test_a_node_that_was_turned_away_is_left_alone_for_a_while(
    nodes: Nodes, flower: FlowerLines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "AGAIN", 1000.0)
    asked: list[bytes] = []

    def refusing(data: bytes) -> bytes:
        asked.append(data)
        return data

    nodes.answers[1] = refusing
    assert flower.present() == {}
    assert flower.present() == {}
    assert len(asked) == 1


def test_a_client_signs_its_number_and_the_challenge() -> None:
    who = Who(bytes(range(32)))
    me = decode(client(1)(encode(who)), Me)
    IDENTITIES[1].public_key().verify(me.signature, proof_text(who, 1))
    assert client(1)(b"anything else") == b"anything else"
