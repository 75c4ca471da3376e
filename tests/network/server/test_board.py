"""The board: its numbers agree with the run's summary, and it can be read while a round is played."""

import sqlite3
from collections.abc import Callable
from contextlib import closing

import msgspec
import pytest

from baffle.cli.results import rows
from baffle.errors import JournalError
from baffle.network.member.policy import Policy
from baffle.network.server.board import MOST_NAME, Board
from baffle.network.status import LinkCounts, Status, as_metrics
from baffle.plan import Plan, change
from baffle.server.recorder import Summary
from tests.support.lines_in_memory import Federation, LinesInMemory, kill
from tests.support.own_tasks import HERE
from tests.support.prometheus import parse

SILENT_LINK = LinkCounts()


@pytest.fixture
def federation(federate: Callable[..., Federation]) -> Federation:
    return federate(4, "run.evaluate_every=3")


def require_agreement(status: Status, summary: Summary) -> None:
    assert (status.rounds_done, status.rounds) == (summary["rounds"], summary["rounds"])
    assert (status.skipped_rounds, status.dropouts) == (summary["skipped_rounds"], summary["dropouts"])
    assert status.refusals == summary["refusals"]
    headline = summary["metrics"][0]
    assert (status.metric, status.value) == (headline, summary[f"test_{headline}"])
    assert status.accuracy == summary.get("test_accuracy")
    assert status.loss == summary["train_loss"]
    assert (status.secure, status.plan) == (summary["secure"], summary["name"])


def test_a_regression_has_another_metric_than_accuracy(federate: Callable[..., Federation]) -> None:
    settings = (f'task.data="{HERE}:line"', "task.loss=mse", "rounds=3", "federation.batch=8", "run.evaluate_every=3")
    federation, board = federate(4, *settings, policy=Policy(data=(f"{HERE}:line",))), Board()
    summary = federation.serve(federation.lines(4), board=board)
    assert summary["metrics"] == ["mae", "r2"]
    status = board.status(SILENT_LINK)
    require_agreement(status, summary)
    assert rows(status)["test mae"] == f"{summary['test_mae']:.4g}"
    samples = parse(as_metrics(status))["baffle_metric"].samples
    assert samples == {frozenset({("metric", "mae")}): summary["test_mae"]}


def test_after_a_run_the_numbers_are_those_of_the_summary(federation: Federation) -> None:
    board, lines = Board(), federation.lines(4)
    answer = lines.clients[1]
    silent = iter([False] * 6 + [True] * 2)
    lines.clients[1] = lambda data: None if next(silent, False) else answer(data)
    summary = federation.serve(lines, board=board)
    federation.require_agreement(range(4))
    status = board.status(SILENT_LINK)
    require_agreement(status, summary)
    assert status.dropouts > 0
    assert sum(status.silent.values()) >= status.dropouts
    assert status.silent.keys() <= {"keys", "share", "vector", "agree", "unmask"}
    assert (status.run, status.clients_on_roster, status.epsilon) == ("run", 4, None)
    assert status.uplink_bytes > 6 * 3 * summary["uplink_bytes_per_client_round"]
    assert status.downlink_bytes > status.uplink_bytes / 10
    assert (status.doing, status.taking_part) == ("ending", "0-3")
    assert status.recent_round_seconds is not None
    assert status.median_round_seconds is not None
    assert 0 < status.median_round_seconds < status.uptime_seconds


def test_a_restarted_server_counts_on_from_its_journal(federation: Federation) -> None:
    lines = federation.lines(4)
    lines.at[12] = kill
    first, second = Board(), Board()
    federation.serve_until_killed(lines, board=first)
    before = first.status(SILENT_LINK)
    assert 0 < before.rounds_done < 6
    summary = federation.serve(lines, board=second)
    after = second.status(SILENT_LINK)
    require_agreement(after, summary)
    assert after.uplink_bytes > before.uplink_bytes
    assert after.downlink_bytes > before.downlink_bytes


def test_it_says_for_what_the_server_waits(federation: Federation) -> None:
    lines, board, seen = federation.lines(2), Board(), list[Status]()
    away: dict[int, Callable[[bytes], bytes | None]] = {}
    present = lines.present

    def look() -> object:
        status = board.status(SILENT_LINK)
        if status.doing == "waiting" and (not seen or status.waits_for != seen[-1].waits_for):
            seen.append(status)
        if status.waits_for == "2 clients are here, 4 are needed to begin" and 2 not in lines.clients:
            lines.clients.update({number: federation.member(number).answer for number in (2, 3)})
        if status.rounds_done == 2 and not away:
            away.update({number: lines.clients.pop(number) for number in (0, 1)})
        if status.waits_for == "2 clients are here, 3 are needed":
            lines.clients.update(away)
        return present()

    lines.present = look  # type: ignore[method-assign, assignment]
    assert federation.serve(lines, board=board, least=4)["skipped_rounds"] <= 2
    assert federation.said("2 clients are here, 3 are needed: waiting")
    federation.require_agreement(range(4))
    assert [status.waits_for for status in seen] == [
        "2 clients are here, 4 are needed to begin",
        "2 clients are here, 3 are needed",
    ]
    assert [(status.clients_needed, status.taking_part) for status in seen] == [(4, ""), (3, "2-3")]


def test_the_loss_of_a_single_client_is_not_shown(federation: Federation) -> None:
    """If one client contributes to a round, the round's loss is that client's own."""
    board = Board()
    federation.plan = change(federation.plan, ['secure.mode="off"', "federation.participation=0.25"])
    members = {number: federation.member(number, pinned=federation.plan) for number in range(4)}
    lines = LinesInMemory({number: member.answer for number, member in members.items()})
    summary = federation.serve(lines, board=board, least=4)
    assert summary["train_loss"] is not None
    assert board.status(SILENT_LINK).loss is None
    assert board.status(SILENT_LINK).rounds_done == 6


def test_what_the_link_counts_is_shown() -> None:
    status = Board().status(LinkCounts((0, 1, 2, 7), 1, 2, 3, 4, 5))
    assert (status.clients_connected, status.connected) == (4, "0-2, 7")
    assert (status.late_replies, status.refused_replies, status.turned_away) == (1, 2, 3)
    assert (status.received_bytes, status.sent_bytes) == (4, 5)


@pytest.mark.parametrize("name", ["\x1b[2Jgone", "a\nb", "x" * 10_000, "\u202egnirts", "\udcff"])
def test_names_are_shown_without_control_characters_and_cut(tiny: Callable[..., Plan], name: str) -> None:
    board = Board()
    board.begin(name, msgspec.structs.replace(tiny(), name=name), 4)
    status = board.status(SILENT_LINK)
    for shown in (status.run, status.plan):
        assert shown.isprintable()
        assert len(shown) <= MOST_NAME
    assert msgspec.json.decode(msgspec.json.encode(status), type=Status) == status


def test_a_journal_with_unreadable_counts_is_refused(federation: Federation) -> None:
    federation.serve(federation.lines(4))
    with closing(sqlite3.connect(federation.run / "journal.sqlite", isolation_level=None)) as database:
        database.execute("UPDATE metrics SET record = json_set(record, '$.silent', json('{\"KEYS\": 1}'))")
    with pytest.raises(JournalError, match="metrics cannot be read"):
        federation.serve(federation.lines(4))
