"""Rosters that change while a run goes on: nobody is restarted, whoever was revoked is out from the next epoch on, the
journal verifies across epochs, and the run can be repeated."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from baffle.aggregation.messages import Hello
from baffle.client.abstaining import abstention
from baffle.core.messages import encode, tag_of
from baffle.journal.audit import verify
from baffle.journal.store import Journal
from baffle.network import rosters, serve
from baffle.network.joining import BEHIND
from baffle.network.keys import ClientKeys
from baffle.network.rosters import Roster, load_roster
from baffle.plan import Plan, change
from baffle.repetition import repeat
from baffle.statement import Statement, read_statement
from tests.support.lines_in_memory import Answer, Federation, LinesInMemory, StoppedError, new_keys
from tests.support.successions import Authority, at

MODES = ("on", "malicious-server")


pytestmark = pytest.mark.usefixtures("impatient")


@pytest.fixture
def federation(tiny: Callable[..., Plan], tmp_path: Path) -> Federation:
    """Five clients; three are enough for a round."""
    plan = tiny('secure.mode="on"', "run.deadline_seconds=0.2", "run.evaluate_every=100", "rounds=10")
    return Federation(new_keys(tmp_path, 5), tmp_path, plan)


@pytest.fixture
def authority(federation: Federation) -> Authority:
    return Authority.over(federation.folder / "keys")


def in_mode(federation: Federation, mode: str) -> Federation:
    federation.plan = change(federation.plan, [f'secure.mode="{mode}"'])
    return federation


def statements(federation: Federation) -> list[Statement]:
    with Journal.open(federation.run / "journal.sqlite") as journal:
        return [read_statement(record.statement) for record in journal.statements.epochs()]


def contributors(federation: Federation) -> list[set[int]]:
    with Journal.open(federation.run / "journal.sqlite") as journal:
        return [journal.participation.contributors(number) for number in range(journal.length())]


def require_sound(federation: Federation, clients: range | tuple[int, ...]) -> None:
    """The journal verifies, these clients hold its weights, and it can be repeated."""
    expected = federation.require_agreement(clients)
    repeated = federation.folder / "repeated"
    assert repeat(federation.run, repeated)["weights_sha256"] == expected
    assert verify(repeated).chain == verify(federation.run).chain


def admit(federation: Federation, lines: LinesInMemory, keys: ClientKeys) -> Callable[[], None]:
    """Lets a new client come, with a folder of its own."""

    def come() -> None:
        place = federation.folder / f"client-{keys.number}"
        if place.exists():
            place.rename(federation.folder / f"predecessor-{keys.number}")
        while len(federation.keys) <= keys.number:
            federation.keys.append(keys)
        federation.keys[keys.number] = keys
        lines.clients[keys.number] = federation.member(keys.number).answer

    return come


@pytest.mark.parametrize("mode", MODES)
def test_a_revoked_client_is_out_from_the_next_epoch_on(
    federation: Federation, authority: Authority, mode: str
) -> None:
    in_mode(federation, mode)
    lines = federation.lines(5)
    lines.before = at(12, lambda: authority.revoke(3))
    summary = federation.serve(lines, reread=authority.reread())
    assert (summary["rounds"], summary["skipped_rounds"]) == (10, 0)
    first, second = statements(federation)
    assert (first.roster, second.roster) == (1, 2)
    assert second.roster_hash == authority.roster.hash()
    assert (first.salters, second.salters) == ((0, 1, 2, 3, 4), (0, 1, 2, 4))
    assert 0 < second.first < 10
    played = contributors(federation)
    assert all(clients == {0, 1, 2, 3, 4} for clients in played[: second.first])
    assert all(clients == {0, 1, 2, 4} for clients in played[second.first :])
    assert federation.said("roster 2 takes the place of roster 1")
    assert federation.said("client 3 no longer belongs to the federation")
    assert federation.said("4 of 4 clients hold the last weights")
    for number in (0, 1, 2, 4):
        assert load_roster(federation.keys[number].folder) == authority.roster
    require_sound(federation, (0, 1, 2, 4))


@pytest.mark.parametrize("mode", MODES)
def test_a_successor_enters_the_same_run(federation: Federation, authority: Authority, mode: str) -> None:
    """In `malicious-server` it knows the new roster alone, and takes a state only with a certificate."""
    in_mode(federation, mode)
    lines = federation.lines(5)

    def replace() -> None:
        (successor,) = authority.replace(3)
        lines.clients.pop(3)
        admit(federation, lines, successor)()

    lines.before = at(12, replace)
    summary = federation.serve(lines, reread=authority.reread())
    assert (summary["rounds"], summary["skipped_rounds"]) == (10, 0)
    told = statements(federation)
    assert [one.roster for one in told[:2]] == [1, 3]
    entered = next(one for one in told if one.roster == 3 and 3 in one.salters)
    assert all(3 in clients for clients in contributors(federation)[entered.first :])
    require_sound(federation, range(5))


def test_a_client_comes_into_an_empty_place(federation: Federation, authority: Authority) -> None:
    lines = federation.lines(5)

    def before(exchange: int) -> None:
        if exchange == 10:
            authority.revoke(1)
        if exchange == 20:
            (added,) = authority.add()
            assert added.number == 1
            admit(federation, lines, added)()

    lines.before = before
    assert federation.serve(lines, reread=authority.reread())["skipped_rounds"] == 0
    assert [one.roster for one in statements(federation)][:3] == [1, 2, 3]
    assert 1 in contributors(federation)[-1]
    require_sound(federation, range(5))


@pytest.mark.parametrize("mode", MODES)
def test_a_renewed_roster_changes_nobody(federation: Federation, authority: Authority, mode: str) -> None:
    in_mode(federation, mode)
    lines = federation.lines(5)
    lines.before = at(12, authority.renew)
    assert federation.serve(lines, reread=authority.reread())["skipped_rounds"] == 0
    assert [(one.roster, len(one.salters)) for one in statements(federation)] == [(1, 5), (2, 5)]
    assert {load_roster(keys.folder).expires for keys in federation.keys} == {authority.roster.expires}
    require_sound(federation, range(5))


def test_the_server_takes_a_roster_while_it_waits(federation: Federation, authority: Authority) -> None:
    lines = federation.lines(2)

    def tell(words: str) -> None:
        federation.told.append(words)
        if words == "2 clients are here, 5 are needed to begin: waiting":
            authority.revoke(4)
        if words == "2 clients are here, 4 are needed to begin: waiting":
            lines.clients |= {number: federation.member(number).answer for number in (2, 3)}

    serve.serve(federation.plan, federation.run, lines, federation.roster, reread=authority.reread(), tell=tell)
    assert [one.roster for one in statements(federation)] == [2]
    require_sound(federation, range(4))


def test_a_client_that_was_away_is_handed_the_roster_when_it_comes_back(
    federation: Federation, authority: Authority
) -> None:
    lines, asked = federation.lines(5), list[tuple[str, bytes]]()

    def watched(data: bytes) -> bytes:
        reply = federation.members[2].answer(data)
        asked.append((tag_of(data), reply))
        return reply

    def before(exchange: int) -> None:
        if exchange == 8:
            del lines.clients[2]
        if exchange == 12:
            authority.revoke(3)
        if exchange == 18:
            federation.member(2)  # its folder still holds the first roster
            lines.clients[2] = watched

    lines.before = before
    assert federation.serve(lines, reread=authority.reread())["rounds"] == 10
    assert [tag for tag, _ in asked[:3]] == ["introduce", "new-roster", "introduce"]
    assert asked[0][1] == BEHIND
    assert 2 in contributors(federation)[-1]
    require_sound(federation, (0, 1, 2, 4))


@pytest.mark.parametrize("how", ["before it is written", "before it answers"])
def test_a_client_killed_while_it_takes_the_roster_comes_back(
    federation: Federation, authority: Authority, how: str
) -> None:
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
    lines.before = at(12, lambda: authority.revoke(3))
    assert federation.serve(lines, reread=authority.reread())["rounds"] == 10
    assert killed
    assert 2 in contributors(federation)[-1]
    require_sound(federation, (0, 1, 2, 4))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stop", range(13, 19))
def test_a_server_killed_while_it_takes_a_roster_goes_on(
    federation: Federation, authority: Authority, stop: int, mode: str
) -> None:
    in_mode(federation, mode)
    lines = federation.lines(5)

    def before(exchange: int) -> None:
        if exchange == 12:
            authority.revoke(3)
        if exchange == stop:
            raise StoppedError

    lines.before = before
    with pytest.raises(StoppedError):
        federation.serve(lines, reread=authority.reread())
    federation.keys[0] = ClientKeys.load(federation.keys[0].folder)
    lines.before = lambda _exchange: None
    lines.clients.pop(3, None)
    summary = serve.serve(
        federation.plan, federation.run, lines, authority.roster, reread=authority.reread(), tell=federation.told.append
    )
    assert summary["rounds"] == 10
    assert summary["skipped_rounds"] <= 2
    require_sound(federation, (0, 1, 2, 4))


def test_a_bad_file_is_told_once_and_changes_nothing(federation: Federation, authority: Authority) -> None:
    lines = federation.lines(5)
    lines.before = at(12, lambda: (authority.server / "roster.json").write_bytes(b'{"number":'))
    assert federation.serve(lines, reread=authority.reread())["skipped_rounds"] == 0
    (told,) = [line for line in federation.told if "roster" in line]
    assert told.startswith("the new roster is not a roster: ")
    assert told.endswith("; the run goes on with roster 1")
    assert len(statements(federation)) == 1
    require_sound(federation, range(5))


@pytest.mark.parametrize("mode", MODES)
def test_if_there_are_more_places_the_run_goes_on_with_those_who_have_been_in_it(
    federation: Federation, authority: Authority, mode: str
) -> None:
    in_mode(federation, mode)
    lines, log = federation.lines(5), list[str]()

    def grow() -> None:
        (added,) = authority.add()
        assert added.number == 5
        federation.keys.append(added)
        lines.clients[5] = federation.member(5, tell=log.append).answer

    def restart() -> None:
        federation.keys[2] = ClientKeys.load(federation.keys[2].folder)
        lines.clients[2] = federation.member(2).answer

    def before(exchange: int) -> None:
        at(12, grow)(exchange)
        at(24, restart)(exchange)

    lines.before = before
    assert federation.serve(lines, reread=authority.reread())["rounds"] == 10
    assert federation.said("roster 2 has 6 places, but this run 5: it goes on with clients that have been in it")
    assert any("whoever has not been in that run waits for the next one" in line for line in log)
    first, second = statements(federation)
    assert (first.roster, second.roster) == (1, 2)
    assert second.salters == (0, 1, 2, 3, 4)
    require_sound(federation, range(5))


def test_a_run_that_has_not_begun_stays_with_its_roster_if_there_are_more_places(
    federation: Federation, authority: Authority
) -> None:
    lines = federation.lines(2)

    def tell(words: str) -> None:
        federation.told.append(words)
        if words == "2 clients are here, 5 are needed to begin: waiting":
            authority.add()
        if "has not begun and stays with roster 1" in words:
            lines.clients |= {number: federation.member(number).answer for number in (2, 3, 4)}

    serve.serve(federation.plan, federation.run, lines, federation.roster, reread=authority.reread(), tell=tell)
    assert [one.roster for one in statements(federation)] == [1]
    require_sound(federation, range(5))


def test_a_client_that_keeps_saying_that_it_does_not_know_the_roster_is_left_alone(federation: Federation) -> None:
    lines, handed = federation.lines(4), list[bytes]()

    def ignorant(data: bytes) -> bytes:
        handed.extend([data] * (tag_of(data) == "new-roster"))
        return federation.members[0].answer(data) if tag_of(data) == "new-roster" else BEHIND

    lines.clients[4] = ignorant
    assert federation.serve(lines, least=4)["rounds"] == 10
    assert len(handed) == 1
    assert federation.said("client 4 does not take part: it was handed the roster")
    require_sound(federation, range(4))


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
            assert len(contributors(federation)) < 10
            hello = encode(Hello(9))
            assert lines.clients[0](hello) == abstention(hello)
            authority.renew()
        return reread()

    lines.before = at(12, lambda: monkeypatch.setattr(rosters, "now", lambda: later))
    summary = federation.serve(lines, reread=look)
    assert summary["rounds"] == 10
    assert federation.said(f"roster 1 expired at {roster.expires}")
    assert any(f"roster 1 expired at {roster.expires}" in words for words in told)
    assert [statement.roster for statement in statements(federation)] == [1, 2]
    assert summary["skipped_rounds"] <= 1
