"""Injected faults: repeatable, at their rates, in their phases, and none where none is scheduled."""

from collections import Counter
from collections.abc import Mapping

import pytest

from baffle.aggregation.messages import PHASES, Agree, Hello, MaskedRequest, Opening, Request, Turn, Unmask, phase_of
from baffle.core.messages import CatchUp, RoundRequest, encode
from tests.support.faults import KINDS, ClientFaults, Faults, Kind, Schedule, corrupted, seeded

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


def test_requests_of_every_phase_are_tested() -> None:
    assert {phase: phase_of(asked) for phase, asked in ASKED.items()} == {phase: phase for phase in PHASES}


def test_without_faults_nothing_changes() -> None:
    plain, echo = Echo(), Echo()
    network = Faults(echo, seeded(b"seed", {phase: dict.fromkeys(KINDS, 0.0) for phase in PHASES}))
    for asked in ASKED.values():
        requests = dict.fromkeys((5, 1, 9), encode(asked))
        assert list(network.exchange(requests).items()) == list(plain.exchange(requests).items())
    assert echo.heard == plain.heard


def test_a_schedule_is_a_pure_function() -> None:
    rates: dict[str, dict[Kind, float]] = {phase: dict.fromkeys(KINDS, 0.5) for phase in PHASES}
    backwards = {phase: dict(reversed(list(kinds.items()))) for phase, kinds in rates.items()}
    moments = [(exchange, client, phase) for exchange in range(5) for client in range(5) for phase in PHASES]
    forwards_schedule = seeded(b"seed", rates)
    backwards_schedule = seeded(b"seed", backwards)
    first = {moment: forwards_schedule(moment[0], moment[1], ASKED[moment[2]]) for moment in moments}
    again = {moment: backwards_schedule(moment[0], moment[1], ASKED[moment[2]]) for moment in reversed(moments)}
    assert first == again
    assert len({repr(sorted(faults.items())) for faults in first.values()}) == len(moments)
    another = seeded(b"another", rates)
    assert any(
        another(exchange, client, ASKED[phase]) != first[exchange, client, phase] for exchange, client, phase in moments
    )


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_happens_at_its_rate_and_in_its_phase_only(kind: Kind, phase: str) -> None:
    schedule = seeded(b"seed", {phase: {kind: 0.25}})
    for other, asked in ASKED.items():
        drawn = [schedule(exchange, client, asked) for exchange in range(20) for client in range(50)]
        assert all(faults.keys() <= {kind} for faults in drawn)
        assert (200 < sum(map(bool, drawn)) < 300) if other == phase else not any(drawn)


def test_two_runs_over_a_bad_network_are_the_same_whatever_the_order_of_clients() -> None:
    rates: dict[str, dict[Kind, float]] = {"keys": dict.fromkeys(KINDS, 0.3)}
    del rates["keys"]["corrupt request"], rates["keys"]["corrupt reply"]  # these may take another's message

    def run(clients: list[int]) -> list[Mapping[int, bytes]]:
        network = Faults(Echo(), seeded(b"seed", rates))
        return [network.exchange({client: encode(Hello(number)) for client in clients}) for number in range(30)]

    assert run([0, 1, 2, 3]) == run([2, 0, 3, 1])


def test_a_dropped_request_never_reaches_the_client() -> None:
    assert play((1, "drop request")) == ([A + b"\1", None, C + b"\2"], [A, C])


def test_a_dropped_reply_never_reaches_the_server() -> None:
    assert play((1, "drop reply")) == ([A + b"\1", None, C + b"\3"], [A, B, C])


def test_a_delayed_request_comes_after_a_newer_one() -> None:
    assert play((0, "delay request")) == ([None, B + b"\1", C + b"\3"], [B, A, C])


def test_a_replayed_request_comes_again_after_a_newer_one() -> None:
    assert play((0, "replay request")) == ([A + b"\1", B + b"\2", C + b"\4"], [A, B, A, C])


def test_a_repeated_request_comes_twice_and_its_second_reply_waits_for_a_silence() -> None:
    assert play((0, "repeat request")) == ([A + b"\1", B + b"\3", C + b"\4"], [A, A, B, C])
    assert play((0, "repeat request"), (2, "drop reply")) == ([A + b"\1", B + b"\3", A + b"\2"], [A, A, B, C])


def test_a_delayed_reply_arrives_when_the_client_is_silent() -> None:
    assert play((0, "delay reply")) == ([None, B + b"\2", C + b"\3"], [A, B, C])
    assert play((0, "delay reply"), (2, "drop request")) == ([None, B + b"\2", A + b"\1"], [A, B])


def test_a_repeated_reply_arrives_again_when_the_client_is_silent() -> None:
    assert play((0, "repeat reply"), (1, "drop reply"))[0] == [A + b"\1", A + b"\1", C + b"\3"]


def test_a_waiting_reply_may_swap_places_with_a_newer_one() -> None:
    faults: tuple[tuple[int, Kind], ...] = ((0, "delay reply"), (1, "swap reply"), (2, "drop request"))
    assert play(*faults)[0] == [None, A + b"\1", B + b"\2"]


def test_a_reordered_client_is_asked_last_and_answers_last() -> None:
    echo = Echo()
    replies = Faults(echo, at((0, "reorder"))).exchange({0: A, 1: B, 2: C})
    assert list(replies) == [1, 2, 0] == [client for client, _ in echo.heard]


def test_corrupted_requests_and_replies() -> None:
    (request, *_), heard = play((0, "corrupt request"))
    assert heard[0] != A
    assert request == heard[0] + b"\1"
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
