"""The limits must let every honest message through, and follow the plan otherwise."""

import pytest

from baffle.aggregation.messages import MOST_KEYS, Advertisement
from baffle.core.messages import Abstention, Contribution, encode
from baffle.network.joining import MOST_EPOCHS, Begin, Introduce
from baffle.network.link.envelope import PHASES
from baffle.network.link.limits import PLAN_BYTES, SMALL, most_bytes, most_joining_bytes, most_request_bytes
from baffle.statement import MOST_PLAN, Commitment, PastEpoch, Statement


def test_a_contribution_of_the_run_fits_and_one_twice_as_large_does_not() -> None:
    size = 4 * 100_000
    for phase in ("request", "masked-request"):
        assert len(encode(Contribution(7, bytes(size)))) <= most_bytes(phase, 10, size)
        assert len(encode(Contribution(7, bytes(2 * size)))) > most_bytes(phase, 10, size)


def test_the_largest_advertisement_fits() -> None:
    keys = tuple(bytes([n % 256]) * 32 for n in range(MOST_KEYS))
    advertisement = Advertisement(2**40, bytes(16), bytes(32), 2**40, keys, bytes(64))
    assert len(encode(advertisement)) <= most_bytes("hello", 2, 0)


@pytest.mark.parametrize("phase", PHASES)
def test_an_abstention_fits_in_every_phase(phase: str) -> None:
    assert len(encode(Abstention(2**63 - 1))) <= most_bytes(phase, 2, 0)


@pytest.mark.parametrize("phase", ["introduce", "begin", "openings", "halt", "over", "agree"])
def test_answers_without_vectors_are_small_however_large_the_run_is(phase: str) -> None:
    assert most_bytes(phase, 100_000, 10**9) == SMALL


def test_the_longest_plan_fits_before_a_client_has_one() -> None:
    assert len(encode(Introduce("𝄞" * MOST_PLAN, 2**53, bytes(32), 2**40))) <= PLAN_BYTES


@pytest.mark.parametrize("clients", [1, 1000])
def test_the_largest_statement_fits_before_a_client_is_in_a_run(clients: int) -> None:
    commitments = tuple(Commitment(client, bytes(32), bytes(64)) for client in range(clients))
    hashes = bytes(32)
    plan = "x" * MOST_PLAN
    tiers = (2**40,) * clients
    statement = Statement(2, plan, hashes, 2**53, hashes, tiers, MOST_EPOCHS, hashes, 2**40, hashes, commitments)
    past = (PastEpoch(2**40, bytes(32), bytes(32)),) * MOST_EPOCHS
    assert len(encode(Begin(encode(statement), past, answered=2**40))) <= most_joining_bytes(clients)


@pytest.mark.parametrize("weights", [1, 1000, 10**6])
def test_a_whole_state_fits_in_a_request(weights: int) -> None:
    assert most_request_bytes(10, weights, 0) >= PLAN_BYTES + 4 * 4 * weights + 200
