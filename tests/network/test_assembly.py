"""How epochs come about: with clients that come late, leave, are killed or do not keep their word, and with a server
that is killed. Whatever happens, the journal verifies, the run can be repeated, and all hold the same weights."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from baffle.core.messages import decode, encode, tag_of
from baffle.journal.audit import verify
from baffle.journal.store import Journal
from baffle.network import connected, serve
from baffle.network.assembly import TRIES
from baffle.network.joining import Begin, Introduction, Openings, Ready, Salted, decode_asked
from baffle.network.policy import Policy
from baffle.plan import Plan, change, parse
from baffle.repetition import repeat
from baffle.statement import NOTHING, Statement, read_statement
from tests.support.lines_in_memory import Answer, Federation, LinesInMemory, StoppedError, new_keys

pytestmark = pytest.mark.usefixtures("impatient")


@pytest.fixture
def federation(tiny: Callable[..., Plan], tmp_path: Path) -> Federation:
    """Four clients; two are enough for a round."""
    settings = ("federation.clients=4", 'secure.mode="on"', "secure.floor=2", "rounds=8")
    plan = tiny(*settings, "run.deadline_seconds=0.2", "run.evaluate_every=100")
    return Federation(new_keys(tmp_path, 4), tmp_path, plan, policy=Policy(floor=2))


def statements(federation: Federation) -> list[Statement]:
    with Journal.open(federation.run / "journal.sqlite") as journal:
        return [read_statement(record.statement) for record in journal.statements.epochs()]


def rounds_of(federation: Federation) -> list[set[int]]:
    """Who contributed to each round."""
    with Journal.open(federation.run / "journal.sqlite") as journal:
        return [journal.participation.contributors(number) for number in range(journal.length())]


def require_sound(federation: Federation, clients: range | tuple[int, ...]) -> None:
    """The statements follow each other, the journal verifies, these clients hold its weights, and it can be
    repeated."""
    told = statements(federation)
    assert [one.epoch for one in told] == list(range(len(told)))
    assert told[0].previous == NOTHING
    assert len({one.chain for one in told}) == len(told)
    expected = federation.require_agreement(clients)
    repeated = federation.folder / "repeated"
    assert repeat(federation.run, repeated)["weights_sha256"] == expected
    assert verify(repeated).chain == verify(federation.run).chain


def changing(answer: Answer, change: Callable[[bytes, bytes], bytes | None]) -> Answer:
    """A client whose answers to requests are changed."""

    def changed(data: bytes) -> bytes | None:
        reply = answer(data)
        return None if reply is None else change(data, reply)

    return changed


def on(kind: type, change: Callable[[bytes], bytes | None]) -> Callable[[bytes, bytes], bytes | None]:
    """Changes only the answers to one kind of question."""
    return lambda data, reply: change(reply) if isinstance(decode_asked(data), kind) else reply


def stop_at(stop: int) -> Callable[[int], None]:
    """Kills the server before this exchange."""

    def before(exchange: int) -> None:
        if exchange == stop:
            raise StoppedError

    return before


def test_an_epoch_is_what_its_clients_were_told(federation: Federation) -> None:
    federation.serve(federation.lines(4))
    (statement,) = statements(federation)
    assert statement.salters == (0, 1, 2, 3)
    assert (statement.epoch, statement.first, statement.previous) == (0, 0, NOTHING)
    assert (statement.roster, statement.roster_hash) == (federation.roster.number, federation.roster.hash())
    assert statement.tiers == (4, 4, 4, 4)
    plan = parse(statement.plan)
    assert (plan.run.evaluate_every, plan.run.deadline_seconds) == (Plan().run.evaluate_every, 0.2)
    require_sound(federation, range(4))


def test_two_runs_of_one_plan_never_ask_the_same_question(federation: Federation) -> None:
    """Their sums differ in everything, so that the difference of two of them tells nothing about a client that was away
    in one."""
    first = federation.serve(federation.lines(4))
    one = statements(federation)[0]
    federation.run = federation.folder / "second"
    second = federation.serve(federation.lines(4))
    assert first["weights_sha256"] != second["weights_sha256"]
    assert one.commitments != statements(federation)[0].commitments


SPOILT: dict[str, Callable[[bytes], bytes | None]] = {
    "silent": lambda _reply: None,
    "another nonce": lambda reply: encode(msgspec.structs.replace(decode(reply, Ready), nonce=bytes(32))),
    "no signature": lambda reply: encode(msgspec.structs.replace(decode(reply, Ready), signature=bytes(64))),
    "another message": lambda _reply: encode(Salted(bytes(32))),
    "nonsense": lambda _reply: b"\xc1",
}


@pytest.mark.parametrize("how", SPOILT)
def test_a_client_that_commits_and_does_not_open_is_left_out_and_the_next_statement_works(
    federation: Federation, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connected, "AGAIN", 1000.0)
    lines = federation.lines(4)
    lines.clients[2] = changing(lines.clients[2], on(Begin, SPOILT[how]))
    summary = federation.serve(lines, least=4)
    assert (summary["rounds"], summary["skipped_rounds"]) == (8, 0)
    (statement,) = statements(federation)
    assert statement.salters == (0, 1, 3)
    assert federation.said("client 2 does not take part: ")
    require_sound(federation, (0, 1, 3))


def test_a_commitment_that_its_client_has_not_signed_is_not_taken(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connected, "AGAIN", 1000.0)
    lines = federation.lines(4)

    def unsigned(data: bytes, reply: bytes) -> bytes:
        if tag_of(data) != "introduce":
            return reply
        return encode(msgspec.structs.replace(decode(reply, Introduction), signature=bytes(64)))

    lines.clients[0] = changing(lines.clients[0], unsigned)
    federation.serve(lines, least=4)
    assert [one.salters for one in statements(federation)] == [(1, 2, 3)]
    assert federation.said("client 0 does not take part: its commitment is not signed")
    require_sound(federation, (1, 2, 3))


def test_a_client_that_follows_another_salt_is_not_asked(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connected, "AGAIN", 1000.0)
    lines = federation.lines(4)
    lines.clients[1] = changing(lines.clients[1], on(Openings, lambda _reply: encode(Salted(bytes(32)))))
    summary = federation.serve(lines)
    assert summary["skipped_rounds"] == 0
    assert federation.said("client 1 does not take part: it follows another salt")
    assert set().union(*rounds_of(federation)) == {0, 2, 3}
    require_sound(federation, (0, 2, 3))


def test_nobody_waits_for_ever_while_clients_do_not_open(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each try leaves somebody out. After a few the server looks again who is here; the others still wait, with nonces
    that have not been opened."""
    monkeypatch.setattr(connected, "AGAIN", 1000.0)
    lines = federation.lines(4)
    for number in (2, 3):
        lines.clients[number] = changing(lines.clients[number], on(Begin, lambda _reply: None))
    begins = list[int]()

    def count(data: bytes, reply: bytes) -> bytes:
        begins.extend([0] * isinstance(decode_asked(data), Begin))
        return reply

    lines.clients[0] = changing(lines.clients[0], count)
    federation.serve(lines, least=2)
    assert len(begins) <= TRIES
    assert [one.salters for one in statements(federation)] == [(0, 1)]
    require_sound(federation, (0, 1))


def test_a_late_client_enters_with_the_next_epoch_and_holds_the_same_weights(federation: Federation) -> None:
    lines = federation.lines(3)

    def come(exchange: int) -> None:
        if exchange == 12:
            lines.clients[3] = federation.member(3).answer

    lines.before = come
    summary = federation.serve(lines, least=3)
    assert (summary["rounds"], summary["skipped_rounds"]) == (8, 0)
    first, second = statements(federation)
    assert (first.salters, second.salters) == ((0, 1, 2), (0, 1, 2, 3))
    assert 0 < second.first < 8
    contributed = rounds_of(federation)
    assert all(3 not in clients for clients in contributed[: second.first])
    assert all(clients == {0, 1, 2, 3} for clients in contributed[second.first :])
    require_sound(federation, range(4))


def test_late_clients_wait_for_each_other(federation: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new statement costs everybody messages: it is not made for every newcomer at once."""
    monkeypatch.setattr(serve, "EPOCH_SECONDS", 1000.0)
    lines = federation.lines(2)

    def come(exchange: int) -> None:
        if exchange in (10, 14):
            number = {10: 2, 14: 3}[exchange]
            lines.clients[number] = federation.member(number).answer

    lines.before = come
    federation.serve(lines, least=2)
    (statement,) = statements(federation)
    assert statement.salters == (0, 1)
    require_sound(federation, (0, 1))


def test_if_too_few_are_left_the_newcomers_enter_at_once(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "EPOCH_SECONDS", 1000.0)
    lines = federation.lines(2)

    def change_shift(exchange: int) -> None:
        if exchange == 12:
            lines.clients = {number: federation.member(number).answer for number in (2, 3)}

    lines.before = change_shift
    summary = federation.serve(lines, least=2)
    assert summary["skipped_rounds"] <= 1
    first, second = statements(federation)
    assert (first.salters, second.salters) == ((0, 1), (2, 3))
    require_sound(federation, (2, 3))


def test_a_restarted_client_comes_back_in_the_same_epoch_with_its_marks(federation: Federation) -> None:
    lines = federation.lines(4)

    def restart(exchange: int) -> None:
        if exchange == 13:
            lines.clients[2] = federation.member(2).answer

    lines.before = restart
    summary = federation.serve(lines)
    assert summary["skipped_rounds"] == 0
    (statement,) = statements(federation)
    (run,) = (run for run in lines.runs[-1:])
    marks = federation.member(2).memory.marks(run)
    assert (marks.slot, marks.round) == (7, 7)
    assert all(2 in clients for clients in rounds_of(federation)[-2:])
    assert statement.salters == (0, 1, 2, 3)
    require_sound(federation, range(4))


RESTARTS: dict[str, Callable[[Federation, LinesInMemory], LinesInMemory]] = {
    "stay": lambda _federation, lines: lines,
    "start again": lambda federation, _lines: federation.lines(4),
}
"""What clients do while the server is away."""


@pytest.mark.parametrize("clients", RESTARTS)
@pytest.mark.parametrize("stop", [1, 2, 3, 4])
def test_a_server_killed_while_an_epoch_is_made_goes_on(federation: Federation, stop: int, clients: str) -> None:
    """The exchanges are: introductions, the statement, the nonces, the first round. Before the nonces go out, the
    statement is on disk; if it is not, it is forgotten, and its nonces serve no other."""
    lines = federation.lines(4)
    lines.before = stop_at(stop)
    with pytest.raises(StoppedError):
        federation.serve(lines)
    begun = len(statements(federation))
    assert begun == (stop > 2)
    lines = RESTARTS[clients](federation, lines)
    lines.before = lambda _exchange: None
    summary = federation.serve(lines)
    assert (summary["rounds"], summary["skipped_rounds"]) == (8, 0)
    assert len(statements(federation)) == 1
    require_sound(federation, range(4))


@pytest.mark.slow
@pytest.mark.parametrize("clients", RESTARTS)
def test_a_server_killed_while_a_later_epoch_is_made_goes_on(
    federation: Federation, clients: str, tmp_path: Path
) -> None:
    for stop in range(12, 20):
        at = Federation(
            new_keys(tmp_path / str(stop), 4), tmp_path / str(stop), federation.plan, policy=federation.policy
        )
        lines = at.lines(3)
        before = stop_at(stop)

        def come(exchange: int, at: Federation = at, lines: LinesInMemory = lines, before: object = before) -> None:
            if exchange == 11:
                lines.clients[3] = at.member(3).answer
            before(exchange)  # type: ignore[operator]

        lines.before = come
        with pytest.raises(StoppedError):
            at.serve(lines, least=3)
        lines = RESTARTS[clients](at, lines)
        lines.before = lambda _exchange: None
        summary = at.serve(lines)
        assert summary["rounds"] == 8
        assert summary["skipped_rounds"] <= 2
        assert len(statements(at)) in (2, 3)
        require_sound(at, range(4))


def test_more_rounds_make_a_new_epoch(federation: Federation) -> None:
    federation.serve(federation.lines(4))
    federation.plan = change(federation.plan, ["rounds=12"])
    summary = federation.serve(federation.lines(3))
    assert (summary["rounds"], summary["skipped_rounds"]) == (12, 0)
    first, second = statements(federation)
    assert (second.first, second.salters) == (8, (0, 1, 2))
    assert (parse(first.plan).rounds, parse(second.plan).rounds) == (8, 12)
    require_sound(federation, range(3))


def test_a_server_that_is_started_again_unchanged_needs_no_new_epoch(federation: Federation) -> None:
    lines = federation.lines(4)
    lines.before = stop_at(16)
    with pytest.raises(StoppedError):
        federation.serve(lines)
    federation.serve(federation.lines(4))
    assert len(statements(federation)) == 1
    require_sound(federation, range(4))


def test_a_run_of_many_epochs_has_the_same_weights_for_everybody(federation: Federation) -> None:
    """One client after the other comes, and some leave for ever."""
    federation.plan = change(federation.plan, ["rounds=16", 'update.optimizer="adam"'])
    lines = federation.lines(2)

    def come_and_go(exchange: int) -> None:
        if exchange == 10:
            lines.clients[2] = federation.member(2).answer
        if exchange == 20:
            del lines.clients[0]
        if exchange == 26:
            lines.clients[3] = federation.member(3).answer

    lines.before = come_and_go
    summary = federation.serve(lines, least=2)
    assert summary["rounds"] == 16
    assert summary["skipped_rounds"] <= 1
    assert [one.salters for one in statements(federation)] == [(0, 1), (0, 1, 2), (1, 2, 3)]
    require_sound(federation, (1, 2, 3))


@pytest.mark.parametrize("mode", ["on", "malicious-server"])
def test_a_newcomer_replays_or_takes_the_state_that_the_statement_names(federation: Federation, mode: str) -> None:
    """After many rounds a whole state is shorter than all outcomes."""
    federation.plan = change(federation.plan, ["rounds=60", "probe.k=40", f'secure.mode="{mode}"'])
    lines = federation.lines(3)
    kinds = set[str]()

    def come(_exchange: int) -> None:
        metrics = federation.run / "metrics.jsonl"
        if 3 not in lines.clients and metrics.exists() and metrics.read_text().count("\n") >= 50:
            lines.clients[3] = watching(federation.member(3).answer)

    def watching(answer: Answer) -> Answer:
        def watched(data: bytes) -> bytes | None:
            kinds.update(kind for kind in ("snapshot", "outcomes") if f"\xa8{kind}".encode("latin1") in data)
            return answer(data)

        return watched

    lines.before = come
    summary = federation.serve(lines, least=3)
    assert (summary["rounds"], summary["skipped_rounds"]) == (60, 0)
    assert "snapshot" in kinds
    require_sound(federation, range(4))
