"""Real processes that cannot write for a while, because of a limit on the size of their files."""

import json
import resource
from pathlib import Path

import pytest

from baffle.journal.audit import verify
from baffle.journal.store import Journal
from tests.support.networks import Network

LIMIT = 150_000
"""Bytes: enough for logs and plans, and for a few rounds of the journal."""

SETTINGS = ("federation.clients=4", "rounds=30", 'secure.mode="on"', "run.snapshot_every=1", "run.deadline_seconds=20")


def limit(network: Network, name: str, size: int) -> None:
    resource.prlimit(network.processes[name].pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


@pytest.mark.slow
def test_a_federation_goes_on_when_there_is_room(network: Network, tiny_toml: Path) -> None:
    """First the server's journal has no room, then a client can write nothing at all. No round is skipped."""
    network.plan = [str(tiny_toml), *(word for setting in SETTINGS for word in ("--set", setting))]
    network.serve()
    limit(network, "server", LIMIT)
    for number in range(4):
        network.join(number)
    network.until(lambda: "the run waits until there is room" in network.log("server"))
    waits_at = network.rounds()
    assert 0 < waits_at < 30
    assert "journal.sqlite cannot be written: File too large; the run waits" in network.log("server")
    limit(network, "client-2", 0)
    limit(network, "server", resource.RLIM_INFINITY)
    network.until(lambda: network.rounds() >= waits_at + 3)
    assert "there is room on the disk again; the run goes on" in network.log("server")
    limit(network, "client-2", resource.RLIM_INFINITY)

    assert network.ended("server") == 0, network.log("server")
    assert [network.ended(f"client-{number}") for number in range(4)] == [0] * 4
    assert network.log("server").count("the run waits until there is room") == 1
    replayed = verify(network.run)
    assert (replayed.rounds, replayed.skipped) == (30, 0)
    assert set(map(network.held, range(4))) == {replayed.weights_sha256}
    with Journal.open(network.run / "journal.sqlite") as journal:
        contributions = journal.participation.contributions(4)
        assert contributions.pop(2) < 30
        assert set(contributions.values()) == {30}
        assert journal.participation.last_contributions(4)[2] > waits_at + 2
    rounds = [json.loads(line)["round"] for line in (network.run / "metrics.jsonl").read_text().splitlines()]
    assert rounds == list(range(30))
