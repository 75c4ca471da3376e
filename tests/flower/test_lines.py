"""Which node of Flower is which client: nodes prove it once, and nobody believes a stranger."""

from collections.abc import Callable

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from baffle.core.messages import Abstention, encode

pytest.importorskip("flwr")
from baffle.flower.grid_transport import GridTransport
from baffle.flower.lines import AGAIN, FlowerLines, with_identity
from tests.support.clocks import FakeClock
from tests.support.grids import Nodes, node

IDENTITIES = [Ed25519PrivateKey.generate() for _ in range(3)]
DIRECTORY = {number: key.public_key().public_bytes_raw() for number, key in enumerate(IDENTITIES)}
RUN = bytes(32)

Answer = Callable[[bytes], bytes]


def client(number: int, key: Ed25519PrivateKey | None = None) -> Answer:
    """A node that says it is this client, and echoes everything else."""
    return with_identity(key or IDENTITIES[number], number, lambda data: data)


@pytest.fixture
def nodes() -> Nodes:
    return Nodes()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def flower(nodes: Nodes, told: list[str], clock: FakeClock) -> FlowerLines:
    return FlowerLines(GridTransport(nodes, clock), DIRECTORY, 5.0, told.append)


def test_requests_reach_the_nodes_that_have_proved_to_be_the_clients(nodes: Nodes, flower: FlowerLines) -> None:
    nodes.answers.update({77: node(client(2)), 5: node(client(0))})
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
    nodes: Nodes, flower: FlowerLines, told: list[str], clock: FakeClock, answer: Answer, reason: str
) -> None:
    asked: list[bytes] = []

    def refusing(data: bytes) -> bytes:
        asked.append(data)
        return answer(data)

    nodes.answers.update({1: node(refusing), 2: node(client(0))})
    for seconds, times in ((0.0, 1), (AGAIN - 0.1, 1), (0.1, 2)):  # it is left alone for a while
        clock.sleep(seconds)
        assert flower.present() == {0: 2}
        assert len(asked) == times
    assert len(told) == 1
    assert told[0].startswith("turned away: ")
    assert reason in told[0]


def test_an_overheard_answer_is_of_no_use(nodes: Nodes, flower: FlowerLines, told: list[str]) -> None:
    overheard: list[bytes] = []
    honest = client(0)

    def tapped(data: bytes) -> bytes:
        overheard.append(honest(data))
        return overheard[-1]

    nodes.answers[1] = node(tapped)
    assert flower.present() == {0: 1}
    nodes.answers[2] = node(lambda _data: overheard[0])
    assert flower.present() == {0: 1}
    assert "is not signed" in told[-1]
