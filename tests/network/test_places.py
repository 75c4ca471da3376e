"""Runs under rosters that change: an empty place is a client that is away, and whoever is left goes on."""

from collections.abc import Callable
from pathlib import Path

import pytest

from baffle.errors import RunFolderError
from baffle.journal.store import Journal
from baffle.network import connected, serve
from baffle.network.authority import ServerKeys
from baffle.network.board import Board
from baffle.network.keys import ClientKeys
from baffle.network.membership import add_clients, revoke_clients
from baffle.network.same_plan import for_roster
from baffle.network.status import LinkCounts
from baffle.plan import Plan
from baffle.statement import read_statement
from tests.support.lines_in_memory import Federation, LinesInMemory, StoppedError, new_keys


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "LOOK", 0.001)
    monkeypatch.setattr(connected, "AGAIN", 0.0)


@pytest.fixture
def federation(tiny: Callable[..., Plan], tmp_path: Path) -> Federation:
    """Five clients; three are enough for a round."""
    plan = tiny('secure.mode="on"', "run.deadline_seconds=0.2", "run.evaluate_every=100", "rounds=6")
    return Federation(new_keys(tmp_path, 5), tmp_path, plan)


def reload(federation: Federation) -> dict[int, ClientKeys]:
    """Let everybody take the newest roster."""
    keys = federation.folder / "keys"
    roster = ServerKeys.load(keys / "server").roster
    known = {number: ClientKeys.load(keys / f"client-{number}") for number in roster.directory()}
    federation.keys = [known.get(number, known[0]) for number in range(len(roster.clients))]
    return known


def lines(federation: Federation, clients: dict[int, ClientKeys]) -> LinesInMemory:
    return LinesInMemory({number: federation.member(number).answer for number in clients})


@pytest.mark.parametrize("mode", ["on", "malicious-server"])
def test_a_run_begins_and_ends_with_those_who_have_a_place(
    federation: Federation, mode: str, tiny: Callable[..., Plan]
) -> None:
    federation.plan = tiny(f'secure.mode="{mode}"', "run.deadline_seconds=0.2", "run.evaluate_every=100", "rounds=3")
    revoke_clients(federation.folder / "keys", [1])
    known = reload(federation)
    assert list(known) == [0, 2, 3, 4]
    summary = federation.serve(lines(federation, known))  # it does not wait for a fifth client
    assert (summary["rounds"], summary["skipped_rounds"]) == (3, 0)
    assert federation.said("4 of 4 clients hold the last weights")
    federation.require_agreement(known)
    with Journal.open(federation.run / "journal.sqlite") as journal:
        assert journal.participation.contributions(5) == {0: 3, 2: 3, 3: 3, 4: 3}


def test_a_run_goes_on_after_a_revocation(federation: Federation) -> None:
    first = lines(federation, dict(enumerate(federation.keys)))

    def stop(exchange: int) -> None:
        if exchange == 9:
            raise StoppedError

    first.before = stop
    with pytest.raises(StoppedError):
        federation.serve(first)
    revoke_clients(federation.folder / "keys", [3])
    known = reload(federation)
    summary = federation.serve(lines(federation, known))
    assert summary["rounds"] == 6
    federation.require_agreement(known)
    with Journal.open(federation.run / "journal.sqlite") as journal:
        last = journal.participation.last_contributions(5)
    assert last.pop(3) < 5
    assert last == dict.fromkeys(known, 5)


def test_a_successor_takes_part_from_the_next_epoch_on(federation: Federation) -> None:
    """The old key has answered in the epoch before, and the new one does not know what. Another roster begins another
    epoch, with a salt that the old key has answered nothing under."""
    first = lines(federation, dict(enumerate(federation.keys)))

    def stop(exchange: int) -> None:
        if exchange == 12:
            raise StoppedError

    first.before = stop
    with pytest.raises(StoppedError):
        federation.serve(first)
    revoke_clients(federation.folder / "keys", [3])
    add_clients(federation.folder / "keys")
    known = reload(federation)
    (federation.folder / "client-3").rename(federation.folder / "predecessor")
    with Journal.open(federation.run / "journal.sqlite") as journal:
        before = journal.participation.contributions(5)[3]
        (first_epoch,) = journal.statements.epochs()
    assert federation.serve(lines(federation, known))["rounds"] == 6
    federation.require_agreement(known)
    with Journal.open(federation.run / "journal.sqlite") as journal:
        old, new = journal.statements.epochs()
        assert journal.participation.last_contributions(5)[3] == 5
        assert journal.participation.contributions(5)[3] > before > 0
    assert old == first_epoch
    assert read_statement(new.statement).roster == federation.roster.number
    assert 3 in read_statement(new.statement).salters
    marks = federation.members[3].memory
    assert marks.marks(new.run).slot == 5
    assert marks.marks(old.run).slot == -1


def test_more_places_are_for_the_next_run(federation: Federation) -> None:
    """The run that has begun goes on with those who have been in it."""
    first = lines(federation, dict(enumerate(federation.keys)))

    def stop(exchange: int) -> None:
        if exchange == 9:
            raise StoppedError

    first.before = stop
    with pytest.raises(StoppedError):
        federation.serve(first)
    add_clients(federation.folder / "keys")
    known = reload(federation)
    newcomer = list[str]()
    again = lines(federation, known)
    again.clients[5] = federation.member(5, tell=newcomer.append).answer
    assert federation.serve(again)["rounds"] == 6
    assert federation.said("roster 2 has 6 places, but this run 5: it goes on with clients that have been in it")
    assert "a run of 5 clients, but the roster has 6: whoever has not been in that run waits for" in newcomer[0]
    federation.require_agreement(range(5))
    federation.run = federation.folder / "next"
    assert federation.serve(lines(federation, known))["rounds"] == 6
    federation.require_agreement(range(6))


def test_a_run_in_which_nobody_has_taken_part_is_not_begun_with_more_places(federation: Federation) -> None:
    first = lines(federation, dict(enumerate(federation.keys)))

    def stop(_exchange: int) -> None:
        raise StoppedError

    first.before = stop
    with pytest.raises(StoppedError):
        federation.serve(first)
    add_clients(federation.folder / "keys")
    known = reload(federation)
    with pytest.raises(RunFolderError, match="roster 2 has 6 places, but this run 5; nobody has taken part in it yet"):
        federation.serve(lines(federation, known))


def test_the_board_counts_clients_and_the_plan_counts_places(federation: Federation) -> None:
    revoke_clients(federation.folder / "keys", [1, 4])
    known = reload(federation)
    board = Board()
    serve.serve(federation.plan, federation.run, lines(federation, known), federation.roster, board=board)
    assert for_roster(federation.plan, federation.roster).federation.clients == 5
    assert board.status(LinkCounts()).clients_on_roster == 3
