"""One changed byte, wherever it lies, breaks the chain, and verify names the round."""

import json
import random
import sqlite3
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from baffle.core.chain import chain_next
from baffle.core.messages import Group, Outcome, decode, encode
from baffle.core.state import unpack
from baffle.errors import BaffleError, ChainError, JournalError
from baffle.journal.audit import verify
from baffle.plan import load, parse
from baffle.trajectory import trajectory_of

ROUNDS = 6


def _read(run: Path, query: str) -> Any:
    db = sqlite3.connect(run / "journal.sqlite")
    row = db.execute(query).fetchone()
    db.close()
    return row[0]


def _change(run: Path, statement: str, *values: object) -> None:
    db = sqlite3.connect(run / "journal.sqlite")
    db.execute(statement, values)
    db.commit()
    db.close()


def _refused(run: Path, number: int) -> str:
    """Verify must refuse the run and name the round."""
    with pytest.raises(ChainError) as broken:
        verify(run)
    assert broken.value.round_number == number
    assert f"round {number}" in str(broken.value)
    assert "\n" not in str(broken.value)
    return str(broken.value)


def _outcome(run: Path, number: int) -> tuple[Outcome, bytes]:
    data = _read(run, f"SELECT outcome FROM rounds WHERE round = {number}")
    return decode(data, Outcome), data


def _with_byte_changed(data: bytes, place: int, mask: int = 1) -> bytes:
    changed = bytearray(data)
    changed[place] ^= mask
    return bytes(changed)


def test_an_untouched_run_passes(finished_run: Path) -> None:
    assert verify(finished_run).rounds == ROUNDS


@pytest.mark.parametrize("number", range(ROUNDS))
@pytest.mark.parametrize("field", ["totals", "key", "weight"])
def test_a_changed_total_key_or_weight_is_named(finished_run: Path, number: int, field: str) -> None:
    outcome, data = _outcome(finished_run, number)
    (group,) = outcome.groups
    values: dict[str, Any] = {"key": group.key, "totals": group.totals, "weight": group.weight}
    old = values[field]
    values[field] = _with_byte_changed(old, 5) if isinstance(old, bytes) else old ^ 1
    changed = encode(Outcome(outcome.round, outcome.kind, (Group(**values),)))
    assert sum(a != b for a, b in zip(changed, data, strict=True)) == 1
    _change(finished_run, "UPDATE rounds SET outcome = ? WHERE round = ?", changed, number)
    _refused(finished_run, number)


@pytest.mark.parametrize("mask", [0x01, 0x80])
def test_any_changed_byte_of_an_outcome_is_named(finished_run: Path, mask: int) -> None:
    _, data = _outcome(finished_run, 2)
    for place in range(len(data)):
        _change(finished_run, "UPDATE rounds SET outcome = ? WHERE round = 2", _with_byte_changed(data, place, mask))
        _refused(finished_run, 2)
    _change(finished_run, "UPDATE rounds SET outcome = ? WHERE round = 2", data)
    verify(finished_run)


@pytest.mark.parametrize("number", range(ROUNDS))
def test_any_changed_byte_of_a_hash_is_named(finished_run: Path, number: int) -> None:
    chain = _read(finished_run, f"SELECT chain FROM rounds WHERE round = {number}")
    assert len(chain) == 32
    for place in range(32):
        changed = _with_byte_changed(chain, place)
        _change(finished_run, "UPDATE rounds SET chain = ? WHERE round = ?", changed, number)
        _refused(finished_run, number)


def test_a_changed_seed_breaks_the_chain_before_its_first_round(finished_run: Path) -> None:
    text = _read(finished_run, "SELECT plan FROM run")
    assert "\nseed = 0\n" in text
    _change(finished_run, "UPDATE run SET plan = ?", text.replace("seed = 0", "seed = 1"))
    _refused(finished_run, 0)


def test_a_seed_changed_everywhere_breaks_the_chain_at_its_first_round(finished_run: Path) -> None:
    text = _read(finished_run, "SELECT plan FROM run").replace("seed = 0", "seed = 1")
    _change(finished_run, "UPDATE run SET plan = ?, trajectory_digest = ?", text, parse(text).trajectory_digest())
    (finished_run / "plan.toml").write_text(text)
    assert "does not follow" in _refused(finished_run, 0)


def test_a_changed_digest_is_noticed(finished_run: Path) -> None:
    digest = _read(finished_run, "SELECT trajectory_digest FROM run")
    for place in (0, 31):
        _change(finished_run, "UPDATE run SET trajectory_digest = ?", _with_byte_changed(digest, place))
        _refused(finished_run, 0)


def test_a_plan_beside_the_journal_that_tells_of_another_run_is_refused(finished_run: Path) -> None:
    plan = finished_run / "plan.toml"
    plan.write_text(plan.read_text().replace("seed = 0", "seed = 1"))
    with pytest.raises(JournalError, match=r"plan\.toml describes another run"):
        verify(finished_run)


@pytest.mark.parametrize("content", [b"\xff", b"rounds = = 1", b""])
def test_a_plan_that_cannot_be_read_is_refused(finished_run: Path, content: bytes) -> None:
    (finished_run / "plan.toml").write_bytes(content)
    with pytest.raises(BaffleError, match=r"plan\.toml"):
        verify(finished_run)


@pytest.mark.parametrize("number", [4, 6])
def test_a_changed_snapshot_is_named_by_the_round_before_it(finished_run: Path, number: int) -> None:
    state = _read(finished_run, f"SELECT state FROM snapshots WHERE round = {number}")
    statement = "UPDATE snapshots SET state = ? WHERE round = ?"
    for place in range(50, len(state), 997):
        _change(finished_run, statement, _with_byte_changed(state, place), number)
        _refused(finished_run, number - 1)
    _change(finished_run, statement, _with_byte_changed(state, len(state) - 1), number)
    _refused(finished_run, number - 1)


@pytest.mark.parametrize("number", [4, 6])
def test_a_snapshot_that_cannot_be_read_is_named_by_the_round_before_it(finished_run: Path, number: int) -> None:
    state = _read(finished_run, f"SELECT state FROM snapshots WHERE round = {number}")
    for changed in (_with_byte_changed(state, 0), _with_byte_changed(state, 3), state[:-1], b""):
        _change(finished_run, "UPDATE snapshots SET state = ? WHERE round = ?", changed, number)
        _refused(finished_run, number - 1)


def test_changed_initial_weights_break_the_chain_at_the_first_round(finished_run: Path) -> None:
    state = _read(finished_run, "SELECT state FROM snapshots WHERE round = 0")
    for place in range(50, len(state), 1997):
        _change(finished_run, "UPDATE snapshots SET state = ? WHERE round = 0", _with_byte_changed(state, place))
        _refused(finished_run, 0)


@pytest.mark.parametrize("number", range(ROUNDS))
def test_a_deleted_round_is_named(finished_run: Path, number: int) -> None:
    _change(finished_run, "DELETE FROM rounds WHERE round = ?", number)
    if number < ROUNDS - 1:
        _refused(finished_run, number)
    else:
        with pytest.raises(ChainError, match="ends before") as broken:
            verify(finished_run)
        assert broken.value.round_number == number


@pytest.mark.parametrize(("one", "other"), [(0, 1), (1, 4), (4, 5)])
def test_swapped_rounds_are_named(finished_run: Path, one: int, other: int) -> None:
    for old, new in ((one, -1), (other, one), (-1, other)):
        _change(finished_run, "UPDATE rounds SET round = ? WHERE round = ?", new, old)
    _refused(finished_run, one)


@pytest.mark.parametrize(("one", "other"), [(0, 1), (1, 4)])
def test_swapped_totals_are_named(finished_run: Path, one: int, other: int) -> None:
    first, second = _outcome(finished_run, one)[0], _outcome(finished_run, other)[0]
    for number, outcome in ((one, second), (other, first)):
        changed = encode(Outcome(number, outcome.kind, outcome.groups))
        _change(finished_run, "UPDATE rounds SET outcome = ? WHERE round = ?", changed, number)
    _refused(finished_run, one)


def test_a_round_added_behind_is_named(finished_run: Path) -> None:
    _change(finished_run, "INSERT INTO rounds SELECT 6, outcome, chain FROM rounds WHERE round = 5")
    _refused(finished_run, 6)
    changed = encode(Outcome(6, "skipped", ()))
    _change(finished_run, "UPDATE rounds SET outcome = ? WHERE round = 6", changed)
    _refused(finished_run, 6)


def test_a_round_under_a_wrong_number_is_named_even_if_its_hash_fits(finished_run: Path) -> None:
    outcome, _ = _outcome(finished_run, 5)
    db = sqlite3.connect(finished_run / "journal.sqlite")
    (before,) = db.execute("SELECT chain FROM rounds WHERE round = 4").fetchone()
    (packed,) = db.execute("SELECT state FROM snapshots WHERE round = 6").fetchone()
    db.close()
    state = unpack(trajectory_of(load(str(finished_run / "plan.toml")), 650).rule, packed)
    changed = encode(Outcome(9, outcome.kind, outcome.groups))
    chain = chain_next(before, changed, state)
    _change(finished_run, "UPDATE rounds SET outcome = ?, chain = ? WHERE round = 5", changed, chain)
    _refused(finished_run, 5)


def test_a_changed_number_of_weights_is_refused(finished_run: Path) -> None:
    for number in (0, 649, 651, 10_000):
        _change(finished_run, "UPDATE run SET n_weights = ?", number)
        with pytest.raises(JournalError):
            verify(finished_run)


def test_a_summary_of_other_weights_is_refused(finished_run: Path) -> None:
    summary = json.loads((finished_run / "summary.json").read_text())
    claimed = summary["weights_sha256"]
    changed = ("0" if claimed[0] != "0" else "1") + claimed[1:]
    (finished_run / "summary.json").write_text(json.dumps(summary | {"weights_sha256": changed}))
    with pytest.raises(JournalError, match=r"summary\.json claims other weights"):
        verify(finished_run)


@pytest.mark.parametrize("rounds", [5, 7])
def test_a_summary_of_another_number_of_rounds_is_refused(finished_run: Path, rounds: int) -> None:
    summary = json.loads((finished_run / "summary.json").read_text())
    (finished_run / "summary.json").write_text(json.dumps(summary | {"rounds": rounds}))
    with pytest.raises(JournalError, match=r"summary\.json"):
        verify(finished_run)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"weights_sha256": "", "rounds": "6"}', "\udcff"])
def test_a_summary_that_cannot_be_read_is_refused(finished_run: Path, content: str) -> None:
    (finished_run / "summary.json").write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(JournalError, match=r"summary\.json"):
        verify(finished_run)


def test_a_run_without_summary_passes(finished_run: Path) -> None:
    (finished_run / "summary.json").unlink()
    assert verify(finished_run).rounds == ROUNDS


@pytest.mark.slow
def test_a_byte_changed_anywhere_in_the_file_is_refused_or_harmless(finished_run: Path) -> None:
    """Names, metrics and free space are outside the chain; what is inside must not lead to other weights."""
    expected = verify(finished_run)
    file = finished_run / "journal.sqlite"
    sound = file.read_bytes()
    dice = random.Random(7)
    refusals = 0
    for _ in range(400):
        place, mask = dice.randrange(len(sound)), 1 << dice.randrange(8)
        file.write_bytes(_with_byte_changed(sound, place, mask))
        try:
            verified = verify(finished_run)
        except BaffleError:
            refusals += 1
        except Exception as fault:
            pytest.fail(f"byte {place} ^ {mask}: {fault!r}")
        else:
            assert verified == expected, f"byte {place} ^ {mask}"
    assert refusals > 100


def test_the_command_names_the_round_in_one_line(finished_run: Path, cli: Callable[..., CompletedProcess[str]]) -> None:
    _change(finished_run, "UPDATE rounds SET chain = zeroblob(32) WHERE round = 3")
    done = cli("verify", finished_run)
    assert done.returncode == 2
    assert done.stdout.strip() == ""
    assert done.stderr.startswith("error: round 3 does not follow")
    assert done.stderr.count("\n") == 1
