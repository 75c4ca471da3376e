"""Rosters that change while a run goes on: nobody is restarted, whoever was revoked is out from the next epoch on, the
journal verifies across epochs, and the run can be repeated."""

from collections.abc import Callable
from datetime import timedelta

import pytest

from baffle.aggregation.messages import Hello
from baffle.client.abstaining import abstention
from baffle.core.messages import encode, tag_of
from baffle.errors import RunFolderError
from baffle.journal.store import Journal
from baffle.network.keys import rosters
from baffle.network.keys.authority import ServerKeys, add_clients, revoke_clients
from baffle.network.keys.folders import ClientKeys
from baffle.network.keys.rosters import Roster, load_roster
from baffle.network.member.policy import Policy
from baffle.network.server.board import Board
from baffle.network.status import LinkCounts
from baffle.plan import change, load
from tests.support.lines_in_memory import Answer, Federation, LinesInMemory
from tests.support.served import Authority


@pytest.fixture
def federation(federate: Callable[..., Federation]) -> Federation:
    """Five clients; three are enough for a round. Clients protect themselves against a server that lies, so they take
    states only with certificates."""
    settings = ("rounds=6", 'secure.mode="malicious-server"', 'federation.weighting="uniform"')
    return federate(5, *settings, policy=Policy(without_privacy=True))


@pytest.fixture
def authority(federation: Federation) -> Authority:
    return Authority.over(federation.folder / "keys")


def admit(federation: Federation, lines: LinesInMemory, keys: ClientKeys) -> None:
    """Let a new client come, with a folder of its own."""
    (federation.folder / f"client-{keys.number}").rename(federation.folder / f"predecessor-{keys.number}")
    federation.keys[keys.number] = keys
    federation.come(lines, keys.number)


@pytest.mark.parametrize("mode", ["on", "malicious-server"])
def test_a_revoked_client_is_out_of_the_next_epoch(federation: Federation, authority: Authority, mode: str) -> None:
    federation.plan = change(federation.plan, [f'secure.mode="{mode}"'])
    lines = federation.lines(5)
    lines.at[10] = lambda: authority.revoke(3)
    summary = federation.serve(lines, reread=authority.reread())
    assert (summary["rounds"], summary["skipped_rounds"]) == (6, 0)
    first, second = federation.statements()
    assert (first.roster, second.roster) == (1, 2)
    assert second.roster_hash == authority.roster.hash()
    assert (first.salters, second.salters) == ((0, 1, 2, 3, 4), (0, 1, 2, 4))
    assert 0 < second.first < 6
    played = federation.contributors()
    assert all(clients == {0, 1, 2, 3, 4} for clients in played[: second.first])
    assert all(clients == {0, 1, 2, 4} for clients in played[second.first :])
    assert federation.said("roster 2 takes the place of roster 1")
    assert federation.said("client 3 no longer belongs to the federation")
    assert federation.said("4 of 4 clients hold the last weights")
    for number in (0, 1, 2, 4):
        assert load_roster(federation.keys[number].folder) == authority.roster
    federation.require_sound((0, 1, 2, 4))


def test_a_successor_enters_the_same_run(federation: Federation, authority: Authority) -> None:
    """It knows the new roster alone."""
    lines = federation.lines(5)

    def replace() -> None:
        (successor,) = authority.replace(3)
        lines.clients.pop(3)
        admit(federation, lines, successor)

    lines.at[10] = replace
    summary = federation.serve(lines, reread=authority.reread())
    assert (summary["rounds"], summary["skipped_rounds"]) == (6, 0)
    told = federation.statements()
    assert [one.roster for one in told[:2]] == [1, 3]
    entered = next(one for one in told if one.roster == 3 and 3 in one.salters)
    assert all(3 in clients for clients in federation.contributors()[entered.first :])
    federation.require_sound(range(5))


def test_a_renewed_roster_changes_nobody(federation: Federation, authority: Authority) -> None:
    lines = federation.lines(5)
    lines.at[10] = authority.renew
    assert federation.serve(lines, reread=authority.reread())["skipped_rounds"] == 0
    assert [(one.roster, len(one.salters)) for one in federation.statements()] == [(1, 5), (2, 5)]
    assert {load_roster(keys.folder).expires for keys in federation.keys} == {authority.roster.expires}
    federation.require_sound(range(5))


def test_the_server_takes_a_roster_while_it_waits(federation: Federation, authority: Authority) -> None:
    lines = federation.lines(2)

    def tell(words: str) -> None:
        federation.told.append(words)
        if words == "2 clients are here, 5 are needed to begin: waiting":
            authority.revoke(4)
        if words == "2 clients are here, 4 are needed to begin: waiting":
            lines.clients |= {number: federation.member(number).answer for number in (2, 3)}

    federation.serve(lines, reread=authority.reread(), tell=tell)
    assert [one.roster for one in federation.statements()] == [2]
    federation.require_sound(range(4))


@pytest.mark.parametrize("how", ["before it is written", "before it answers"])
def test_a_client_killed_with_a_new_roster_comes_back(federation: Federation, authority: Authority, how: str) -> None:
    lines = federation.lines(5)
    killed = list[bool]()

    def dying(answer: Answer) -> Answer:
        def one(data: bytes) -> bytes | None:
            if tag_of(data) != "new-roster" or killed:
                return answer(data)
            if how == "before it answers":
                answer(data)
            killed.append(True)
            federation.keys[2] = ClientKeys.load(federation.keys[2].folder)
            lines.clients[2] = federation.member(2).answer
            return None

        return one

    lines.clients[2] = dying(lines.clients[2])
    lines.at[10] = lambda: authority.revoke(3)
    assert federation.serve(lines, reread=authority.reread())["rounds"] == 6
    assert killed
    assert 2 in federation.contributors()[-1]
    federation.require_sound((0, 1, 2, 4))


@pytest.mark.parametrize("stop", [11, pytest.param(12, marks=pytest.mark.slow), 13, 14, 15])
def test_a_server_killed_with_a_new_roster_goes_on(federation: Federation, authority: Authority, stop: int) -> None:
    lines = federation.lines(5)
    lines.at[10] = lambda: authority.revoke(3)
    federation.serve_until_killed(lines, before=stop, reread=authority.reread())
    federation.keys[0] = ClientKeys.load(federation.keys[0].folder)
    lines.clients.pop(3, None)
    summary = federation.serve(lines, reread=authority.reread(), roster=authority.roster)
    assert summary["rounds"] == 6
    assert summary["skipped_rounds"] <= 2
    federation.require_sound((0, 1, 2, 4))


def test_a_bad_file_is_told_once_and_changes_nothing(federation: Federation, authority: Authority) -> None:
    lines = federation.lines(5)
    lines.at[10] = lambda: (authority.server / "roster.json").write_bytes(b'{"number":')
    assert federation.serve(lines, reread=authority.reread())["skipped_rounds"] == 0
    (told,) = [line for line in federation.told if "roster" in line]
    assert told.startswith("the new roster is not a roster: ")
    assert told.endswith("; the run goes on with roster 1")
    assert len(federation.statements()) == 1
    federation.require_sound(range(5))


def test_with_more_places_a_run_goes_on_with_its_clients(federation: Federation, authority: Authority) -> None:
    lines, log = federation.lines(5), list[str]()

    def grow() -> None:
        (added,) = authority.add()
        assert added.number == 5
        federation.keys.append(added)
        lines.clients[5] = federation.member(5, tell=log.append).answer

    def restart() -> None:
        federation.keys[2] = ClientKeys.load(federation.keys[2].folder)
        lines.clients[2] = federation.member(2).answer

    lines.at = {10: grow, 17: restart}
    assert federation.serve(lines, reread=authority.reread())["rounds"] == 6
    assert federation.said("roster 2 has 6 places, but this run 5: it goes on with clients that have been in it")
    assert any("a client that has not been in that run waits for the next one" in line for line in log)
    first, second = federation.statements()
    assert (first.roster, second.roster) == (1, 2)
    assert second.salters == (0, 1, 2, 3, 4)
    federation.require_sound(range(5))


def test_more_places_do_not_change_a_run_that_has_not_begun(federation: Federation, authority: Authority) -> None:
    lines = federation.lines(2)

    def tell(words: str) -> None:
        federation.told.append(words)
        if words == "2 clients are here, 5 are needed to begin: waiting":
            authority.add()
        if "has not begun and stays with roster 1" in words:
            lines.clients |= {number: federation.member(number).answer for number in (2, 3, 4)}

    federation.serve(lines, reread=authority.reread(), tell=tell)
    assert [one.roster for one in federation.statements()] == [1]
    federation.require_sound(range(5))


def test_nobody_goes_on_under_a_roster_that_has_expired(
    federation: Federation, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither side: a server that lies would go on. A later roster ends the wait."""
    lines, looks = federation.lines(5), 0
    told: list[str] = []
    federation.members[0].tell = told.append
    roster, reread = authority.roster, authority.reread()
    later = roster.expiry + timedelta(days=1)

    def look() -> Roster | None:
        nonlocal looks
        looks += rosters.now() == later
        if looks == 5:
            assert len(federation.contributors()) < 6
            hello = encode(Hello(9))
            assert lines.clients[0](hello) == abstention(hello)
            authority.renew()
        return reread()

    lines.at[10] = lambda: monkeypatch.setattr(rosters, "now", lambda: later)
    summary = federation.serve(lines, reread=look)
    assert summary["rounds"] == 6
    assert federation.said(f"roster 1 expired at {roster.expires}")
    assert any(f"roster 1 expired at {roster.expires}" in words for words in told)
    assert [statement.roster for statement in federation.statements()] == [1, 2]
    assert summary["skipped_rounds"] <= 1


# A server that is started under another roster


def take_newest_roster(federation: Federation) -> dict[int, ClientKeys]:
    """Let everybody take the newest roster."""
    keys = federation.folder / "keys"
    roster = ServerKeys.load(keys / "server").roster
    known = {number: ClientKeys.load(keys / f"client-{number}") for number in roster.directory()}
    federation.keys = [known.get(number, known[0]) for number in range(len(roster.clients))]
    return known


def lines_to(federation: Federation, clients: dict[int, ClientKeys]) -> LinesInMemory:
    return LinesInMemory({number: federation.member(number).answer for number in clients})


@pytest.mark.parametrize("mode", ["on", "malicious-server"])
def test_a_run_begins_and_ends_with_those_who_have_a_place(federation: Federation, mode: str) -> None:
    """The board counts these clients, and the plan counts places."""
    federation.plan, board = change(federation.plan, [f'secure.mode="{mode}"', "rounds=3"]), Board()
    revoke_clients(federation.folder / "keys", [1])
    known = take_newest_roster(federation)
    assert list(known) == [0, 2, 3, 4]
    summary = federation.serve(lines_to(federation, known), board=board)  # it does not wait for a fifth client
    assert (summary["rounds"], summary["skipped_rounds"]) == (3, 0)
    assert board.status(LinkCounts()).clients_on_roster == 4
    assert load(str(federation.run / "plan.toml")).federation.clients == 5
    assert federation.said("4 of 4 clients hold the last weights")
    federation.require_agreement(known)
    with Journal.open(federation.run / "journal.sqlite") as journal:
        assert journal.participation.contributions(5) == {0: 3, 2: 3, 3: 3, 4: 3}


def test_more_places_are_for_the_next_run(federation: Federation) -> None:
    """The run that has begun goes on with those who have been in it."""
    first = federation.lines(5)
    federation.serve_until_killed(first, before=9)
    add_clients(federation.folder / "keys")
    known = take_newest_roster(federation)
    newcomer = list[str]()
    again = lines_to(federation, known)
    again.clients[5] = federation.member(5, tell=newcomer.append).answer
    assert federation.serve(again)["rounds"] == 6
    assert federation.said("roster 2 has 6 places, but this run 5: it goes on with clients that have been in it")
    assert "a run of 5 clients, but the roster has 6: a client that has not been in that run waits for" in newcomer[0]
    federation.require_agreement(range(5))
    federation.run = federation.folder / "next"
    assert federation.serve(lines_to(federation, known))["rounds"] == 6
    federation.require_agreement(range(6))


def test_a_run_in_which_nobody_has_taken_part_is_not_begun_with_more_places(federation: Federation) -> None:
    first = federation.lines(5)
    federation.serve_until_killed(first, before=1)
    add_clients(federation.folder / "keys")
    known = take_newest_roster(federation)
    with pytest.raises(RunFolderError, match="roster 2 has 6 places, but this run 5; nobody has taken part in it yet"):
        federation.serve(lines_to(federation, known))
