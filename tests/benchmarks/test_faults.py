"""Injected faults: repeatable, at their rates, in their phases, and none where none is scheduled."""

from collections import Counter
from collections.abc import Mapping

import pytest
from faults import KINDS, ClientFaults, Faults, Kind, Schedule, corrupted, seeded

from baffle.aggregation.messages import PHASES, Agree, Hello, MaskedRequest, Opening, Request, Turn, Unmask
from baffle.core.messages import CatchUp, RoundRequest, encode

ABOUT = RoundRequest(3, bytes(32), bytes(32), bytes(32), CatchUp("outcomes", 0, ()))
ASKED: dict[str, Request] = {
    "keys": Hello(0),
    "share": Turn(None, Opening(0, (0, 1), 2, 2, ())),
    "vector": MaskedRequest(ABOUT, (0, 1), bytes(32), b""),
    "agree": Agree(0, (0, 1), ()),
    "unmask": Turn(Unmask(0, (0, 1), ()), None),
}
A, B, C = (encode(Hello(number)) for number in range(3))


class Echo:
    """Answers every request with itself and how often this client has been asked; records the requests."""

    def __init__(self) -> None:
        self.heard: list[tuple[int, bytes]] = []

    def exchange(self, requests: Mapping[int, bytes]) -> Mapping[int, bytes]:
        self.heard += requests.items()
        times = Counter(client for client, _ in self.heard)
        return {client: data + bytes([times[client]]) for client, data in requests.items()}


def at(*faults: tuple[int, Kind]) -> Schedule:
    """Faults of these kinds in these exchanges, for client 0."""

    def schedule(exchange: int, client: int, _request: Request) -> ClientFaults:
        return {kind: b"how" for number, kind in faults if (number, 0) == (exchange, client)}

    return schedule


def play(*faults: tuple[int, Kind], requests: tuple[bytes, ...] = (A, B, C)) -> tuple[list[bytes | None], list[bytes]]:
    """The replies of client 0, exchange by exchange, and the requests that reached it."""
    echo = Echo()
    network = Faults(echo, at(*faults))
    return [network.exchange({0: data}).get(0) for data in requests], [data for _, data in echo.heard]


def test_a_schedule_is_a_pure_function() -> None:
    rates: dict[str, dict[Kind, float]] = {phase: dict.fromkeys(KINDS, 0.5) for phase in PHASES}
    backwards = {phase: dict(reversed(list(kinds.items()))) for phase, kinds in rates.items()}
    moments = [(exchange, client, phase) for exchange in range(5) for client in range(5) for phase in PHASES]

    def drawn(schedule: Schedule) -> list[ClientFaults]:
        return [schedule(exchange, client, ASKED[phase]) for exchange, client, phase in moments]

    first = drawn(seeded(b"seed", rates))
    assert first == drawn(seeded(b"seed", backwards)) != drawn(seeded(b"another", rates))
    assert len({repr(sorted(faults.items())) for faults in first}) == len(moments)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_happens_at_its_rate_and_in_its_phase_only(kind: Kind, phase: str) -> None:
    schedule = seeded(b"seed", {phase: {kind: 0.25}})
    for other, asked in ASKED.items():
        drawn = [schedule(exchange, client, asked) for exchange in range(20) for client in range(50)]
        assert all(faults.keys() <= {kind} for faults in drawn)
        assert (200 < sum(map(bool, drawn)) < 300) if other == phase else not any(drawn)


@pytest.mark.parametrize(
    ("faults", "replies", "requests"),
    [
        ([(1, "drop request")], [A + b"\1", None, C + b"\2"], [A, C]),
        ([(1, "drop reply")], [A + b"\1", None, C + b"\3"], [A, B, C]),
        ([(0, "delay request")], [None, B + b"\1", C + b"\3"], [B, A, C]),
        ([(0, "replay request")], [A + b"\1", B + b"\2", C + b"\4"], [A, B, A, C]),
        # The second reply waits until the client is silent
        ([(0, "repeat request")], [A + b"\1", B + b"\3", C + b"\4"], [A, A, B, C]),
        ([(0, "repeat request"), (2, "drop reply")], [A + b"\1", B + b"\3", A + b"\2"], [A, A, B, C]),
        ([(0, "delay reply")], [None, B + b"\2", C + b"\3"], [A, B, C]),
        ([(0, "delay reply"), (2, "drop request")], [None, B + b"\2", A + b"\1"], [A, B]),
        ([(0, "repeat reply"), (1, "drop reply")], [A + b"\1", A + b"\1", C + b"\3"], [A, B, C]),
        # A waiting reply swaps places with a newer one
        ([(0, "delay reply"), (1, "swap reply"), (2, "drop request")], [None, A + b"\1", B + b"\2"], [A, B]),
    ],
)
def test_every_fault_does_what_its_name_says(
    faults: list[tuple[int, Kind]], replies: list[bytes | None], requests: list[bytes]
) -> None:
    assert play(*faults) == (replies, requests)


def test_a_reordered_client_is_asked_last_and_corruption_is_of_one_message() -> None:
    echo = Echo()
    replies = Faults(echo, at((0, "reorder"))).exchange({0: A, 1: B, 2: C})
    assert list(replies) == [1, 2, 0] == [client for client, _ in echo.heard]
    (request, *_), heard = play((0, "corrupt request"))
    assert A != heard[0] == (request or b"").removesuffix(b"\1")
    (reply, *_), heard = play((0, "corrupt reply"))
    assert heard[0] == A
    assert reply != A + b"\1"


def test_corruption_has_every_form_and_is_repeatable() -> None:
    seeds = [bytes([number]) for number in range(200)]
    damaged = [corrupted(A, [A, B], seed) for seed in seeds]
    assert damaged == [corrupted(A, [A, B], seed) for seed in seeds]
    assert any(len(data) == len(A) and data not in (A, B) for data in damaged)
    assert any(len(data) < len(A) and A.startswith(data) for data in damaged)
    assert any(len(data) > len(A) and data.startswith(A) for data in damaged)
    assert B in damaged
    assert isinstance(corrupted(b"", [], b"seed"), bytes)
