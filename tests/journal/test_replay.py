"""Resuming starts at the newest sound snapshot and replays the rest; verifying replays everything."""

import json
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from baffle.core.chain import Present
from baffle.core.messages import Outcome
from baffle.core.state import apply
from baffle.errors import ChainError, JournalError, RunFolderError
from baffle.journal.audit import verify
from baffle.journal.replay import catch_up, follow, lineage_of
from baffle.journal.store import Journal
from baffle.lineage import Lineage
from baffle.plan import Plan
from baffle.trajectory import trajectory_of


def _change(run: Path, statement: str, *values: object) -> None:
    db = sqlite3.connect(run / "journal.sqlite")
    db.execute(statement, values)
    db.commit()
    db.close()


def _spoil_snapshot(run: Path, number: int, place: int) -> None:
    db = sqlite3.connect(run / "journal.sqlite")
    (state,) = db.execute("SELECT state FROM snapshots WHERE round = ?", (number,)).fetchone()
    spoilt = bytearray(state)
    spoilt[place] ^= 1
    db.execute("UPDATE snapshots SET state = ? WHERE round = ?", (bytes(spoilt), number))
    db.commit()
    db.close()


@contextmanager
def _opened(run: Path) -> Iterator[tuple[Journal, Lineage]]:
    journal = Journal.open(run / "journal.sqlite")
    try:
        yield journal, lineage_of(journal, journal.plan())
    finally:
        journal.close()


def _caught_up(run: Path) -> Present:
    with _opened(run) as (journal, lineage):
        return catch_up(journal, lineage)


def _folded(run: Path) -> Present:
    """Replay all rounds from the initial weights, without snapshots."""
    with _opened(run) as (journal, lineage):
        present = lineage.beginning(journal.snapshot(lineage.trajectory.rule, 0))
        for entry in journal.entries():
            present = follow(lineage, present, entry)
        return present


def _same(present: Present, other: Present) -> bool:
    return (present.round, present.chain, present.state.digest()) == (other.round, other.chain, other.state.digest())


def test_the_present_is_the_fold_over_all_rounds(finished_run: Path) -> None:
    with _opened(finished_run) as (journal, _):
        assert journal.snapshot_numbers() == [0, 4, 6]
    assert _caught_up(finished_run).round == 6
    assert _same(_caught_up(finished_run), _folded(finished_run))


def test_replay_starts_from_the_newest_snapshot(finished_run: Path) -> None:
    expected = _folded(finished_run)
    _change(finished_run, "UPDATE rounds SET outcome = X'00' WHERE round < 4")
    assert _same(_caught_up(finished_run), expected)
    with pytest.raises(ChainError):
        _folded(finished_run)


def test_rounds_after_the_newest_snapshot_are_replayed(finished_run: Path) -> None:
    expected = _folded(finished_run)
    _change(finished_run, "DELETE FROM snapshots WHERE round = 6")
    assert _same(_caught_up(finished_run), expected)


@pytest.mark.parametrize("place", [0, 1, 700, -1])
@pytest.mark.parametrize("damaged", [[6], [6, 4]])
def test_a_damaged_snapshot_is_passed_over(finished_run: Path, damaged: list[int], place: int) -> None:
    expected = _folded(finished_run)
    for number in damaged:
        _spoil_snapshot(finished_run, number, place)
    assert _same(_caught_up(finished_run), expected)


def test_a_snapshot_of_another_length_or_another_round_is_passed_over(finished_run: Path) -> None:
    expected = _folded(finished_run)
    _change(finished_run, "UPDATE snapshots SET state = X'00' WHERE round = 4")
    _change(finished_run, "UPDATE snapshots SET state = (SELECT state FROM snapshots WHERE round = 0) WHERE round = 6")
    assert _same(_caught_up(finished_run), expected)


def test_a_change_in_a_round_that_must_be_replayed_is_named(finished_run: Path) -> None:
    _change(finished_run, "DELETE FROM snapshots WHERE round = 6")
    _change(finished_run, "UPDATE rounds SET chain = zeroblob(32) WHERE round = 5")
    with pytest.raises(ChainError, match="round 5") as broken:
        _caught_up(finished_run)
    assert broken.value.round_number == 5


def test_without_any_snapshot_nothing_can_be_rebuilt(finished_run: Path) -> None:
    _change(finished_run, "DELETE FROM snapshots")
    with pytest.raises(JournalError, match="no snapshot"):
        _caught_up(finished_run)


def test_a_run_of_no_rounds_is_at_its_beginning(finished_run: Path) -> None:
    _change(finished_run, "DELETE FROM rounds")
    _change(finished_run, "DELETE FROM snapshots WHERE round > 0")
    assert _caught_up(finished_run).round == 0
    assert _same(_caught_up(finished_run), _folded(finished_run))


def test_verify_tells_what_it_found(finished_run: Path) -> None:
    calls: list[tuple[int, int]] = []
    verified = verify(finished_run, lambda done, of: calls.append((done, of)))
    present = _folded(finished_run)
    assert (verified.rounds, verified.skipped, verified.n_weights) == (6, 0, 650)
    assert verified.weights_sha256 == present.state.weights_hash().hex()
    assert verified.chain == present.chain.hex()
    with _opened(finished_run) as (_, lineage):
        assert verified.trajectory_digest == lineage.trajectory.digest.hex()
    assert calls == [(number, 6) for number in range(1, 7)]


def test_verify_counts_skipped_rounds(tiny: Callable[..., Plan], tmp_path: Path) -> None:
    plan = tiny("ring.n_max=20")
    trajectory = trajectory_of(plan, 5)
    present = Lineage(trajectory).beginning(trajectory.rule.start(np.ones(5, np.float32)))
    (tmp_path / "plan.toml").write_text(plan.to_toml())
    journal = Journal.create(tmp_path / "journal.sqlite", plan, present.state, {})
    for number in range(3):
        outcome = Outcome(number, "skipped", ())
        state = apply(trajectory.rule, present.state, outcome)
        present = Present(number + 1, state, journal.append(present.chain, outcome, state, snapshot=number == 1))
    journal.close()
    verified = verify(tmp_path)
    assert (verified.rounds, verified.skipped) == (3, 3)
    assert verified.weights_sha256 == trajectory.rule.start(np.ones(5, np.float32)).weights_hash().hex()


def test_a_run_that_goes_on_can_be_verified_meanwhile(tiny: Callable[..., Plan], tmp_path: Path) -> None:
    plan = tiny("ring.n_max=20", "run.commit_seconds=0")
    trajectory = trajectory_of(plan, 5)
    (tmp_path / "plan.toml").write_text(plan.to_toml())
    present = Lineage(trajectory).beginning(trajectory.rule.start(np.ones(5, np.float32)))
    journal = Journal.create(tmp_path / "journal.sqlite", plan, present.state, {})

    def one_more() -> None:
        nonlocal present
        outcome = Outcome(present.round, "skipped", ())
        state = apply(trajectory.rule, present.state, outcome)
        chain = journal.append(present.chain, outcome, state, snapshot=True)
        present = Present(present.round + 1, state, chain)

    for _ in range(5):
        one_more()
    verified = verify(tmp_path, lambda _done, _of: one_more())
    assert verified.rounds >= 5
    journal.close()


def test_a_run_that_ends_meanwhile_can_be_verified(tiny: Callable[..., Plan], tmp_path: Path) -> None:
    plan = tiny("ring.n_max=20", "run.commit_seconds=0")
    trajectory = trajectory_of(plan, 5)
    (tmp_path / "plan.toml").write_text(plan.to_toml())
    start = Lineage(trajectory).beginning(trajectory.rule.start(np.ones(5, np.float32)))
    journal = Journal.create(tmp_path / "journal.sqlite", plan, start.state, {})
    chain = journal.append(start.chain, Outcome(0, "skipped", ()), start.state)

    def end(_done: int, _of: int) -> None:
        journal.append(chain, Outcome(1, "skipped", ()), start.state)
        summary = {"rounds": 2, "weights_sha256": start.state.weights_hash().hex()}
        (tmp_path / "summary.json").write_text(json.dumps(summary))

    assert verify(tmp_path, end).rounds >= 1
    journal.close()
    assert verify(tmp_path).rounds == 2


def test_a_folder_without_run_or_journal_is_refused(finished_run: Path, tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="holds no run"):
        verify(tmp_path)
    (finished_run / "journal.sqlite").unlink()
    with pytest.raises(JournalError, match=r"journal\.sqlite is missing"):
        verify(finished_run)
