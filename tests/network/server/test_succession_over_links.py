"""Rosters that change while real members take part over real links."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from baffle.errors import KeyRefusedError, KeysError
from baffle.journal.audit import verify
from baffle.journal.store import Journal
from baffle.network.keys.authority import ServerKeys
from baffle.network.keys.folders import ClientKeys
from baffle.network.keys.rosters import keep_roster
from baffle.network.link.server import Link
from baffle.network.member.policy import Policy
from baffle.plan import change
from tests.support.lines_in_memory import Federation
from tests.support.links import PATIENCE, until
from tests.support.served import Authority, Served


@pytest.fixture
def federation(federate: Callable[..., Federation]) -> Federation:
    lying = ('secure.mode="malicious-server"', 'federation.weighting="uniform"')
    return federate(5, *lying, "run.deadline_seconds=3000", "rounds=6", policy=Policy(without_privacy=True))


@pytest.fixture
def authority(federation: Federation) -> Authority:
    return Authority.over(federation.folder / "keys")


@contextmanager
def served(federation: Federation, authority: Authority) -> Iterator[Served]:
    own = ServerKeys.load(authority.server)
    with Link(own, "localhost", 0, None, PATIENCE, tell=federation.told.append) as link:
        yield Served(federation, own, link)


def test_a_client_is_revoked_and_another_gets_its_place(federation: Federation, authority: Authority) -> None:
    federation.plan = change(federation.plan, ["rounds=60"])
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
    assert [statement.roster for statement in federation.statements()][:3] == [1, 2, 3]
    with Journal.open(federation.run / "journal.sqlite") as journal:
        assert journal.participation.last_contributions(5) == dict.fromkeys(range(5), 59)
    assert verify(federation.run).weights_sha256 == federation.require_agreement(range(5))
    assert all("goes on with roster 3; new keys: 1 of 5" in client.log for client in clients[:3])


def test_a_client_that_is_handed_a_roster_without_it_ends_and_says_so(
    federation: Federation, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its server has not closed the door to it."""
    monkeypatch.setattr(Link, "admit", lambda _link, _roster: None)
    with served(federation, authority) as server:
        server.hold_at = 2
        clients = [server.join(number) for number in range(5)]
        until(lambda: server.rounds >= 2)
        authority.revoke(3)
        server.hold_at = -1
        until(lambda: clients[3].ended)
        assert isinstance(clients[3].fault, KeysError)
        assert str(clients[3].fault) == "this client's key is not in roster 2: it was revoked"
        server.end()
    with pytest.raises(KeysError, match=r"is not a client's in .*roster\.json"):
        ClientKeys.load(federation.keys[3].folder)  # it has it on its disk


def test_clients_refuse_a_server_with_an_earlier_roster(federation: Federation, authority: Authority) -> None:
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
        assert server.end()["rounds"] == 6
