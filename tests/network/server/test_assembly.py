"""How epochs come about: with clients that come late, leave, are killed or do not keep their word, and with a server
that is killed. Whatever happens, the journal verifies, the run can be repeated, and all hold the same weights."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import pytest

from baffle.core.messages import Message, decode, encode
from baffle.network.joining import Begin, Introduce, Introduction, Openings, Ready, Salted, decode_asked
from baffle.network.member.policy import Policy
from baffle.plan import Plan, change, parse
from baffle.statement import NOTHING
from tests.support.lines_in_memory import Answer, Federation, kill, new_keys


@pytest.fixture
def federation(federate: Callable[..., Federation]) -> Federation:
    """Four clients; two are enough for a round."""
    settings = ("federation.clients=4", "secure.floor=2", "rounds=6", "run.deadline_seconds=50")
    return federate(4, *settings, policy=Policy(floor=2, without_privacy=True))


def changing(answer: Answer, kind: type, change: Callable[[bytes], bytes | None]) -> Answer:
    """A client whose answers to one kind of question are changed."""

    def changed(data: bytes) -> bytes | None:
        reply = answer(data)
        return change(reply) if reply is not None and isinstance(decode_asked(data), kind) else reply

    return changed


def test_an_epoch_is_what_its_clients_were_told(federation: Federation) -> None:
    federation.serve(federation.lines(4))
    (statement,) = federation.statements()
    assert statement.salters == (0, 1, 2, 3)
    assert (statement.epoch, statement.first, statement.previous) == (0, 0, NOTHING)
    assert (statement.roster, statement.roster_hash) == (federation.roster.number, federation.roster.hash())
    assert statement.tiers == (4, 4, 4, 4)
    plan = parse(statement.plan)
    assert (plan.run.evaluate_every, plan.run.deadline_seconds) == (Plan().run.evaluate_every, 50.0)
    federation.require_sound(range(4))


def with_zeros(kind: type[Message], field: str, size: int) -> Callable[[bytes], bytes]:
    return lambda reply: encode(msgspec.structs.replace(decode(reply, kind), **{field: bytes(size)}))


@pytest.mark.parametrize(
    ("question", "change", "why"),
    [
        (Introduce, with_zeros(Introduction, "signature", 64), "its commitment is not signed"),
        (Begin, with_zeros(Ready, "signature", 64), "it has opened another nonce, or signed another statement"),
        (Openings, with_zeros(Salted, "salt", 32), "it follows another salt"),
    ],
)
def test_a_client_that_breaks_its_word_is_left_out(
    federation: Federation, question: type, change: Callable[[bytes], bytes | None], why: str
) -> None:
    lines = federation.lines(4)
    lines.seconds = 0.0
    lines.clients[2] = changing(lines.clients[2], question, change)
    summary = federation.serve(lines, least=4)
    assert (summary["rounds"], summary["skipped_rounds"]) == (6, 0)
    (statement,) = federation.statements()
    assert statement.salters == ((0, 1, 2, 3) if question is Openings else (0, 1, 3))
    assert federation.said(f"client 2 does not take part: {why}")
    assert set().union(*federation.contributors()) == {0, 1, 3}
    federation.require_sound((0, 1, 3))


def test_a_client_that_was_caught_before_opens_first(federation: Federation) -> None:
    """If it does not open again, nobody else has opened a nonce in vain, and the same commitments serve again."""
    lines = federation.lines(4)
    opened: dict[int, list[bytes]] = {client: [] for client in range(4)}
    refuses = True

    def watching(client: int, answer: Answer) -> Answer:
        def watched(data: bytes) -> bytes | None:
            if isinstance(asked := decode_asked(data), Begin):
                opened[client].append(asked.statement)
                if client == 2 and refuses:
                    return None
            return answer(data)

        return watched

    def mend(_exchange: int) -> None:
        nonlocal refuses
        refuses = len(opened[2]) < 3

    lines.clients = {client: watching(client, answer) for client, answer in lines.clients.items()}
    lines.before = mend
    lines.at[20] = kill  # it has been caught once, and the journal says so
    federation.plan = change(federation.plan, ["rounds=20"])
    federation.serve_until_killed(lines, least=3)
    federation.serve(lines, least=3)
    statements = federation.statements()
    assert [one.salters for one in statements[-2:]] == [(0, 1, 3), (0, 1, 2, 3)]
    assert len(set(opened[0])) == len(statements) + 1  # the first statement alone came to nothing for the others
    assert len(set(opened[2])) == 4
    federation.require_sound(range(4))


def test_a_late_client_enters_with_the_next_epoch_and_holds_the_same_weights(federation: Federation) -> None:
    lines = federation.lines(3)
    lines.at[12] = lambda: federation.come(lines, 3)
    summary = federation.serve(lines, least=3)
    assert (summary["rounds"], summary["skipped_rounds"]) == (6, 0)
    first, second = federation.statements()
    assert (first.salters, second.salters) == ((0, 1, 2), (0, 1, 2, 3))
    assert 0 < second.first < 6
    contributed = federation.contributors()
    assert all(3 not in clients for clients in contributed[: second.first])
    assert all(clients == {0, 1, 2, 3} for clients in contributed[second.first :])
    federation.require_sound(range(4))


def test_late_clients_wait_for_each_other(federation: Federation) -> None:
    """A new statement costs everybody messages: it is not made for every newcomer at once."""
    lines = federation.lines(2)
    lines.seconds = 0.0

    lines.at = {10: lambda: federation.come(lines, 2), 14: lambda: federation.come(lines, 3)}
    federation.serve(lines, least=2)
    (statement,) = federation.statements()
    assert statement.salters == (0, 1)
    federation.require_sound((0, 1))


def test_if_too_few_are_left_the_newcomers_enter_at_once(federation: Federation) -> None:
    lines = federation.lines(2)
    lines.seconds = 0.0

    def change_shift() -> None:
        lines.clients = {number: federation.member(number).answer for number in (2, 3)}

    lines.at[12] = change_shift
    summary = federation.serve(lines, least=2)
    assert summary["skipped_rounds"] <= 1
    first, second = federation.statements()
    assert (first.salters, second.salters) == ((0, 1), (2, 3))
    federation.require_sound((2, 3))


def test_a_restarted_client_comes_back_in_the_same_epoch_with_its_marks(federation: Federation) -> None:
    lines = federation.lines(4)
    lines.at[8] = lambda: federation.come(lines, 2)
    summary = federation.serve(lines)
    assert summary["skipped_rounds"] == 0
    (statement,) = federation.statements()
    (run,) = (run for run in lines.runs[-1:])
    marks = federation.member(2).memory.marks(run)
    assert (marks.slot, marks.round) == (5, 5)
    assert all(2 in clients for clients in federation.contributors()[-2:])
    assert statement.salters == (0, 1, 2, 3)
    federation.require_sound(range(4))


@pytest.mark.parametrize(
    ("stop", "clients"), [(1, "stay"), (2, "start again"), (2, "stay"), (3, "start again"), (4, "stay")]
)
def test_a_server_killed_while_an_epoch_is_made_goes_on(federation: Federation, stop: int, clients: str) -> None:
    """The exchanges are: introductions, the statement, the nonces, the first round. Before the nonces go out, the
    statement is on disk; if it is not, it is forgotten, and its nonces serve no other."""
    lines = federation.lines(4)
    federation.serve_until_killed(lines, before=stop)
    begun = len(federation.statements())
    assert begun == (stop > 2)
    summary = federation.serve(lines if clients == "stay" else federation.lines(4))
    assert (summary["rounds"], summary["skipped_rounds"]) == (6, 0)
    assert len(federation.statements()) == 1
    federation.require_sound(range(4))


@pytest.mark.slow
@pytest.mark.parametrize("clients", ["stay", "start again"])
def test_a_server_killed_in_a_later_assembly_goes_on(federation: Federation, clients: str, tmp_path: Path) -> None:
    for stop in range(12, 20):
        folder, plan = tmp_path / str(stop), change(federation.plan, ["rounds=8"])
        at = Federation(new_keys(folder, 4), folder, plan, policy=federation.policy)
        lines = at.lines(3)
        lines.at = {11: partial(at.come, lines, 3), stop: kill}
        at.serve_until_killed(lines, least=3)
        summary = at.serve(lines if clients == "stay" else at.lines(4))
        assert summary["rounds"] == 8
        assert summary["skipped_rounds"] <= 2
        assert len(at.statements()) in (2, 3)
        at.require_sound(range(4))


def test_a_run_of_many_epochs_has_the_same_weights_for_everybody(federation: Federation) -> None:
    """One client after the other comes, and some leave for ever."""
    federation.plan = change(federation.plan, ["rounds=16", 'update.optimizer="adam"'])
    lines = federation.lines(2)
    lines.at[10] = lambda: federation.come(lines, 2)
    lines.at[20] = lambda: lines.clients.pop(0)
    lines.at[26] = lambda: federation.come(lines, 3)
    summary = federation.serve(lines, least=2)
    assert summary["rounds"] == 16
    assert summary["skipped_rounds"] <= 1
    assert [one.salters for one in federation.statements()] == [(0, 1), (0, 1, 2), (1, 2, 3)]
    federation.require_sound((1, 2, 3))


@pytest.mark.parametrize("mode", [pytest.param("on", marks=pytest.mark.slow), "malicious-server"])
def test_a_newcomer_replays_or_takes_the_state_that_the_statement_names(federation: Federation, mode: str) -> None:
    """After many rounds a whole state is shorter than all outcomes."""
    settings = [
        "rounds=7",
        "probe.k=600",
        "federation.batch=8",
        f'secure.mode="{mode}"',
        "federation.weighting=uniform",
    ]
    federation.plan = change(federation.plan, settings)
    lines = federation.lines(3)
    kinds = set[str]()

    def come(_exchange: int) -> None:
        metrics = federation.run / "metrics.jsonl"
        if 3 not in lines.clients and metrics.exists() and metrics.read_text().count("\n") >= 5:
            lines.clients[3] = watching(federation.member(3).answer)

    def watching(answer: Answer) -> Answer:
        def watched(data: bytes) -> bytes | None:
            kinds.update(kind for kind in ("snapshot", "outcomes") if f"\xa8{kind}".encode("latin1") in data)
            return answer(data)

        return watched

    lines.before = come
    summary = federation.serve(lines, least=3)
    assert (summary["rounds"], summary["skipped_rounds"]) == (7, 0)
    assert "snapshot" in kinds
    federation.require_sound(range(4))
