"""Rosters that change while real members take part over real links."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from baffle.errors import KeyRefusedError, KeysError
from baffle.journal.audit import verify
from baffle.journal.store import Journal
from baffle.network import connected, serve
from baffle.network.authority import ServerKeys
from baffle.network.keys import ClientKeys
from baffle.network.link.server import Link
from baffle.network.rosters import keep_roster
from baffle.plan import Plan
from baffle.statement import read_statement
from tests.support.lines_in_memory import Federation, new_keys
from tests.support.links import PATIENCE, until
from tests.support.served import Served
from tests.support.successions import Authority


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "LOOK", 0.01)
    monkeypatch.setattr(serve, "EPOCH_SECONDS", 0.1)
    monkeypatch.setattr(connected, "AGAIN", 0.1)


@pytest.fixture
def federation(tiny: Callable[..., Plan], tmp_path: Path) -> Federation:
    plan = tiny('secure.mode="malicious-server"', "run.deadline_seconds=5", "run.evaluate_every=1000", "rounds=60")
    return Federation(new_keys(tmp_path, 5), tmp_path, plan)


@pytest.fixture
def authority(federation: Federation) -> Authority:
    return Authority.over(federation.folder / "keys")


@contextmanager
def served(federation: Federation, authority: Authority) -> Iterator[Served]:
    with Link(ServerKeys.load(authority.server), "localhost", 0, None, PATIENCE, tell=federation.told.append) as link:
        yield Served(federation, ServerKeys.load(authority.server), link)


def rosters(federation: Federation) -> list[int]:
    with Journal.open(federation.run / "journal.sqlite") as journal:
        return [read_statement(record.statement).roster for record in journal.statements.epochs()]


def test_a_client_is_revoked_and_another_gets_its_place(federation: Federation, authority: Authority) -> None:
    with served(federation, authority) as server:
        clients = [server.join(number) for number in range(5)]
        until(lambda: server.rounds >= 3)
        authority.revoke(3)
        until(lambda: clients[3].ended)
        assert isinstance(clients[3].fault, KeyRefusedError)
        (successor,) = authority.add()
        (federation.folder / "client-3").rename(federation.folder / "predecessor")
        federation.keys[3] = successor
        until(lambda: federation.said("roster 3 takes the place of roster 2"))
        clients[3] = server.join(3)
        summary = server.end()
        until(lambda: all(client.ended for client in clients))
    assert [client.fault for client in clients] == [None] * 5
    assert summary["rounds"] == 60
    assert rosters(federation)[:3] == [1, 2, 3]
    with Journal.open(federation.run / "journal.sqlite") as journal:
        assert journal.participation.last_contributions(5) == dict.fromkeys(range(5), 59)
    assert verify(federation.run).weights_sha256 == federation.require_agreement(range(5))
    assert all("goes on with roster 3" in client.log for client in clients[:3])


def test_a_client_that_is_handed_a_roster_without_it_ends_and_says_so(
    federation: Federation, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its server has not closed the door to it."""
    monkeypatch.setattr(Link, "admit", lambda _link, _roster: None)
    with served(federation, authority) as server:
        clients = [server.join(number) for number in range(5)]
        until(lambda: server.rounds >= 3)
        authority.revoke(3)
        until(lambda: clients[3].ended)
        assert isinstance(clients[3].fault, KeysError)
        assert str(clients[3].fault) == "this client's key is not in roster 2: it was revoked"
        server.end()
    with pytest.raises(KeysError, match=r"is not a client's in .*roster\.json"):
        ClientKeys.load(federation.keys[3].folder)  # it has it on its disk


def test_a_server_that_has_an_earlier_roster_than_its_clients_says_that_they_refuse(
    federation: Federation, authority: Authority
) -> None:
    old = authority.roster
    authority.renew()
    keep_roster(authority.server, old)
    for number in range(5):
        keep_roster(federation.keys[number].folder, authority.roster)
        federation.keys[number] = ClientKeys.load(federation.keys[number].folder)
    with served(federation, authority) as server:
        clients = [server.join(number) for number in range(5)]
        until(lambda: federation.said("5 clients are connected, and 5 of them refuse to take part"))
        assert all(
            "the server has roster 1, but this client has roster 2 and never goes back" in c.log[1] for c in clients
        )
        authority.publish()
        assert server.end()["rounds"] == 60
