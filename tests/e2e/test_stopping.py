"""Servers and clients that are stopped with SIGTERM, in the middle of a round, over the link."""

import signal
import time
from pathlib import Path

import pytest

from baffle.journal.audit import verify
from tests.support.networks import Network

SOON = 10.0
"""Seconds within which a process has ended, and a round goes on. A deadline is six times as long."""

ROUNDS = 40
SETTINGS = ("federation.clients=4", f"rounds={ROUNDS}", 'secure.mode="on"', "run.deadline_seconds=60")


@pytest.fixture
def waiting(network: Network, tiny_toml: Path) -> Network:
    """A federation in the middle of a round: the server waits for client 3, whose process stands still."""
    network.plan = [str(tiny_toml), *(word for setting in SETTINGS for word in ("--set", setting))]
    network.serve()
    for number in range(4):
        network.join(number)
    network.until(lambda: network.rounds() >= 3)
    network.processes["client-3"].send_signal(signal.SIGSTOP)
    before = -1
    while before != network.rounds():
        before = network.rounds()
        time.sleep(2)
    assert before < ROUNDS - 5
    return network


def stop(network: Network, name: str) -> int:
    """Stop a process; returns its exit code."""
    network.processes[name].send_signal(signal.SIGTERM)
    network.processes[name].send_signal(signal.SIGCONT)
    return network.processes[name].wait(SOON)


def require_end(network: Network) -> None:
    """Wait for the end of the run, which everybody must agree on."""
    assert network.ended("server") == 0, network.log("server")
    assert [network.ended(f"client-{number}") for number in range(4)] == [0] * 4
    replayed = verify(network.run)
    assert replayed.rounds == ROUNDS
    assert replayed.skipped <= 2
    assert set(map(network.held, range(4))) == {replayed.weights_sha256}


@pytest.mark.slow
def test_a_server_is_stopped_in_the_middle_of_a_round_and_started_again(waiting: Network) -> None:
    played = waiting.rounds()
    assert stop(waiting, "server") == 0
    assert waiting.log("server").splitlines()[-1].endswith("stopped by SIGTERM; the same command continues the run")
    assert "Traceback" not in waiting.log("server")
    assert waiting.rounds() == played
    for number in range(3):
        waiting.until(lambda number=number: "(the server stops)" in waiting.log(f"client-{number}"))  # type: ignore[misc]
    waiting.processes["client-3"].send_signal(signal.SIGCONT)
    waiting.serve()
    require_end(waiting)
    assert all(waiting.log(f"client-{number}").count("connected to") >= 2 for number in range(4))


@pytest.mark.slow
def test_a_round_does_not_wait_for_a_client_that_was_stopped(waiting: Network) -> None:
    played = waiting.rounds()
    assert stop(waiting, "client-3") == 0
    began = time.monotonic()
    assert waiting.log("client-3").splitlines()[-1].endswith("stopped by SIGTERM; the same command joins again")
    waiting.until(lambda: waiting.rounds() > played + 1)
    assert time.monotonic() - began < SOON
    assert "client 3 has left" in waiting.log("server")
    waiting.join(3)
    require_end(waiting)
