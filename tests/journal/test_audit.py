"""One changed byte, wherever it lies, breaks the chain, and verify names the round. Resuming starts at the newest sound
snapshot and replays the rest; verifying replays everything."""

import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from baffle.core.messages import Group, Outcome, decode, encode
from baffle.core.state import Present, chain_next, unpack
from baffle.errors import BaffleError, ChainError, JournalError, RunFolderError
from baffle.journal.audit import verify
from baffle.journal.replay import catch_up, follow, lineage_of
from baffle.journal.store import Journal
from baffle.lineage import Lineage
from baffle.plan import Plan, load, parse
from baffle.trajectory import trajectory_of
from tests.support.journals import Written, change, read, refused, with_bit_flipped

ROUNDS = 6


def _refused(run: Path, number: int) -> str:
    """Verify must refuse the run and name the round."""
    with pytest.raises(ChainError) as broken:
        verify(run)
    assert broken.value.round_number == number
    assert f"round {number}" in str(broken.value)
    assert "\n" not in str(broken.value)
    return str(broken.value)


def _outcome(run: Path, number: int) -> tuple[Outcome, bytes]:
    data = read(run, f"SELECT outcome FROM rounds WHERE round = {number}")
    return decode(data, Outcome), data


@pytest.mark.parametrize("number", [0, 3, 5])
@pytest.mark.parametrize("field", ["totals", "key", "weight"])
def test_a_changed_total_key_or_weight_is_named(finished_run: Path, number: int, field: str) -> None:
    outcome, data = _outcome(finished_run, number)
    (group,) = outcome.groups
    values: dict[str, Any] = {"key": group.key, "totals": group.totals, "weight": group.weight}
    old = values[field]
    values[field] = with_bit_flipped(old, 5) if isinstance(old, bytes) else old ^ 1
    changed = encode(Outcome(outcome.round, outcome.kind, (Group(**values),)))
    assert sum(a != b for a, b in zip(changed, data, strict=True)) == 1
    change(finished_run, "UPDATE rounds SET outcome = ? WHERE round = ?", changed, number)
    _refused(finished_run, number)


def test_any_changed_byte_of_an_outcome_is_named(finished_run: Path) -> None:
    _, data = _outcome(finished_run, 2)
    for place in range(len(data)):
        flipped = with_bit_flipped(data, place, 0x80 if place % 2 else 0x01)
        change(finished_run, "UPDATE rounds SET outcome = ? WHERE round = 2", flipped)
        _refused(finished_run, 2)
    change(finished_run, "UPDATE rounds SET outcome = ? WHERE round = 2", data)
    verify(finished_run)


@pytest.mark.parametrize("number", [0, 3, 5])
def test_any_changed_byte_of_a_hash_is_named(finished_run: Path, number: int) -> None:
    chain = read(finished_run, f"SELECT chain FROM rounds WHERE round = {number}")
    assert len(chain) == 32
    for place in range(0, 32, 3):
        changed = with_bit_flipped(chain, place)
        change(finished_run, "UPDATE rounds SET chain = ? WHERE round = ?", changed, number)
        _refused(finished_run, number)


def test_a_changed_seed_breaks_the_chain_before_its_first_round_or_at_it(finished_run: Path) -> None:
    text = read(finished_run, "SELECT plan FROM run").replace("\nseed = 0\n", "\nseed = 1\n")
    change(finished_run, "UPDATE run SET plan = ?", text)
    assert "the plan was changed" in _refused(finished_run, 0)
    change(finished_run, "UPDATE run SET plan = ?, trajectory_digest = ?", text, parse(text).trajectory_digest())
    (finished_run / "plan.toml").write_text(text)
    assert "does not follow" in _refused(finished_run, 0)


def test_a_changed_digest_is_noticed(finished_run: Path) -> None:
    digest = read(finished_run, "SELECT trajectory_digest FROM run")
    for place in (0, 31):
        change(finished_run, "UPDATE run SET trajectory_digest = ?", with_bit_flipped(digest, place))
        _refused(finished_run, 0)


def test_a_plan_file_of_another_run_is_refused(finished_run: Path) -> None:
    plan = finished_run / "plan.toml"
    plan.write_text(plan.read_text().replace("seed = 0", "seed = 1"))
    refused(finished_run, r"plan\.toml describes another run")


@pytest.mark.parametrize("content", [b"\xff", b""])
def test_a_plan_that_cannot_be_read_is_refused(finished_run: Path, content: bytes) -> None:
    (finished_run / "plan.toml").write_bytes(content)
    with pytest.raises(BaffleError, match=r"plan\.toml"):
        verify(finished_run)


CLAIM = '{"rounds": 6, "weights_sha256": "x"'


@pytest.mark.parametrize("number", [4, 6])
def test_a_changed_snapshot_is_named_by_the_round_before_it(finished_run: Path, number: int) -> None:
    """Also one that cannot be read any more."""
    state = read(finished_run, f"SELECT state FROM snapshots WHERE round = {number}")
    places = (0, 3, *range(50, len(state), 997), -1)
    for changed in (*(with_bit_flipped(state, place) for place in places), state[:-1], b""):
        change(finished_run, "UPDATE snapshots SET state = ? WHERE round = ?", changed, number)
        _refused(finished_run, number - 1)


def test_changed_initial_weights_break_the_chain_at_the_first_round(finished_run: Path) -> None:
    state = read(finished_run, "SELECT state FROM snapshots WHERE round = 0")
    for place in range(50, len(state), 1997):
        change(finished_run, "UPDATE snapshots SET state = ? WHERE round = 0", with_bit_flipped(state, place))
        _refused(finished_run, 0)


@pytest.mark.parametrize("number", [0, 3, 5])
def test_a_deleted_round_is_named(finished_run: Path, number: int) -> None:
    change(finished_run, "DELETE FROM rounds WHERE round = ?", number)
    if number < ROUNDS - 1:
        _refused(finished_run, number)
    else:
        with pytest.raises(ChainError, match="ends before") as broken:
            verify(finished_run)
        assert broken.value.round_number == number


@pytest.mark.parametrize(("one", "other"), [(0, 1), (1, 4), (4, 5)])
def test_swapped_rounds_are_named(finished_run: Path, one: int, other: int) -> None:
    for old, new in ((one, -1), (other, one), (-1, other)):
        change(finished_run, "UPDATE rounds SET round = ? WHERE round = ?", new, old)
    _refused(finished_run, one)


def test_a_round_added_behind_is_named(finished_run: Path) -> None:
    change(finished_run, "INSERT INTO rounds SELECT 6, outcome, chain FROM rounds WHERE round = 5")
    _refused(finished_run, 6)
    changed = encode(Outcome(6, "skipped", ()))
    change(finished_run, "UPDATE rounds SET outcome = ? WHERE round = 6", changed)
    _refused(finished_run, 6)


def test_a_round_under_a_wrong_number_is_named_even_if_its_hash_fits(finished_run: Path) -> None:
    outcome, _ = _outcome(finished_run, 5)
    before = read(finished_run, "SELECT chain FROM rounds WHERE round = 4")
    packed = read(finished_run, "SELECT state FROM snapshots WHERE round = 6")
    state = unpack(trajectory_of(load(str(finished_run / "plan.toml")), 650).rule, packed)
    changed = encode(Outcome(9, outcome.kind, outcome.groups))
    chain = chain_next(before, changed, state)
    change(finished_run, "UPDATE rounds SET outcome = ?, chain = ? WHERE round = 5", changed, chain)
    _refused(finished_run, 5)


def test_a_changed_number_of_weights_is_refused(finished_run: Path) -> None:
    for number in (0, 649, 651, 10_000):
        change(finished_run, "UPDATE run SET n_weights = ?", number)
        with pytest.raises(JournalError):
            verify(finished_run)


@pytest.mark.parametrize(
    "content",
    [
        *("", "[]", "{}", '{"weights_sha256": "", "rounds": "6"}', "\udcff", " " * (2 << 20), CLAIM[:-3] + "NaN}"),
        *(CLAIM + ', "a": ' + "[" * 100_000 + end for end in ("", "]" * 100_000 + "}")),
        *(CLAIM.replace("6", number) + "}" for number in ("9" * 10_000, "-1", "4.5", "1e400", "null")),
        *(CLAIM.replace("x", text) + "}" for text in ("x" * 100_000, "\\ud800")),
        *({"rounds": 5}, {"rounds": 7}, {"weights_sha256": "0" * 64}, {"weights_sha256": "x"}),
    ],
)
def test_a_summary_that_is_not_the_runs_or_cannot_be_read_is_refused(
    finished_run: Path, content: str | dict[str, object]
) -> None:
    file = finished_run / "summary.json"
    text = content if isinstance(content, str) else json.dumps(json.loads(file.read_text()) | content)
    file.write_bytes(text.encode(errors="surrogateescape"))
    refused(finished_run, r"summary\.json claims" if isinstance(content, dict) else r"summary\.json cannot be read")


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
        file.write_bytes(with_bit_flipped(sound, place, mask))
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
    change(finished_run, "UPDATE rounds SET chain = zeroblob(32) WHERE round = 3")
    done = cli("verify", finished_run)
    assert done.returncode == 2
    assert done.stdout.strip() == ""
    assert done.stderr.startswith("error: round 3 does not follow")
    assert done.stderr.count("\n") == 1


# Replaying


@contextmanager
def _opened(run: Path) -> Iterator[tuple[Journal, Lineage]]:
    with Journal.open(run / "journal.sqlite") as journal:
        yield journal, lineage_of(journal, journal.plan())


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
    change(finished_run, "DELETE FROM snapshots WHERE round = 6")  # the rounds after it are replayed
    change(finished_run, "UPDATE rounds SET outcome = X'00' WHERE round < 3")
    assert _same(_caught_up(finished_run), expected)
    with pytest.raises(ChainError):
        _folded(finished_run)


@pytest.mark.parametrize("place", [0, 700])
@pytest.mark.parametrize("damaged", [[6], [6, 4]])
def test_a_damaged_snapshot_is_passed_over(finished_run: Path, damaged: list[int], place: int) -> None:
    expected = _folded(finished_run)
    for number in damaged:
        state = read(finished_run, f"SELECT state FROM snapshots WHERE round = {number}")
        spoilt = with_bit_flipped(state, place)
        change(finished_run, "UPDATE snapshots SET state = ? WHERE round = ?", spoilt, number)
    assert _same(_caught_up(finished_run), expected)


def test_a_snapshot_of_another_length_or_another_round_is_passed_over(finished_run: Path) -> None:
    expected = _folded(finished_run)
    change(finished_run, "UPDATE snapshots SET state = X'00' WHERE round = 4")
    change(finished_run, "UPDATE snapshots SET state = (SELECT state FROM snapshots WHERE round = 0) WHERE round = 6")
    assert _same(_caught_up(finished_run), expected)


def test_a_change_in_a_round_that_must_be_replayed_is_named(finished_run: Path) -> None:
    change(finished_run, "DELETE FROM snapshots WHERE round = 6")
    change(finished_run, "UPDATE rounds SET chain = zeroblob(32) WHERE round = 5")
    with pytest.raises(ChainError, match="round 5") as broken:
        _caught_up(finished_run)
    assert broken.value.round_number == 5


def test_without_any_snapshot_nothing_can_be_rebuilt(finished_run: Path) -> None:
    change(finished_run, "DELETE FROM snapshots")
    with pytest.raises(JournalError, match="no snapshot"):
        _caught_up(finished_run)


def test_a_run_of_no_rounds_is_at_its_beginning(finished_run: Path) -> None:
    change(finished_run, "DELETE FROM rounds")
    change(finished_run, "DELETE FROM snapshots WHERE round > 0")
    assert _caught_up(finished_run).round == 0
    assert _same(_caught_up(finished_run), _folded(finished_run))


def test_verify_reports_what_it_found(finished_run: Path) -> None:
    calls: list[tuple[int, int]] = []
    verified = verify(finished_run, lambda done, of: calls.append((done, of)))
    present = _folded(finished_run)
    assert (verified.rounds, verified.skipped, verified.n_weights) == (6, 0, 650)
    assert verified.weights_sha256 == present.state.weights_hash().hex()
    assert verified.chain == present.chain.hex()
    with _opened(finished_run) as (_, lineage):
        assert verified.trajectory_digest == lineage.trajectory.digest.hex()
    assert calls == [(number, 6) for number in range(1, 7)]


@pytest.fixture
def written(tiny: Callable[..., Plan], tmp_path: Path) -> Written:
    return Written.begin(tmp_path, tiny("ring.n_max=20", "run.commit_seconds=0"))


def test_a_run_that_goes_on_can_be_verified_meanwhile(written: Written) -> None:
    for _ in range(5):
        written.append(snapshot=True)

    def one_more(_done: int, _of: int) -> None:
        written.append(snapshot=True)

    verified = verify(written.folder, one_more)
    assert verified.rounds >= 5
    written.journal.close()


def test_a_run_that_ends_meanwhile_can_be_verified(written: Written) -> None:
    written.skip()

    def end(_done: int, _of: int) -> None:
        state = written.skip().state
        summary = {"rounds": 2, "weights_sha256": state.weights_hash().hex()}
        (written.folder / "summary.json").write_text(json.dumps(summary))

    assert verify(written.folder, end).rounds >= 1
    written.journal.close()
    assert verify(written.folder).rounds == 2


def test_a_folder_without_run_or_journal_is_refused(finished_run: Path, tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="holds no run"):
        verify(tmp_path)
    (finished_run / "journal.sqlite").unlink()
    with pytest.raises(JournalError, match=r"journal\.sqlite is missing"):
        verify(finished_run)
