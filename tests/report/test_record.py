"""What a report reads from the folders of real runs."""

import json
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from baffle.core.ports import CONTRIBUTED, MISSING
from baffle.errors import BaffleError, JournalError, RunFolderError
from baffle.plan import Plan
from baffle.report.attendance import LEFT_OUT, by_phase
from baffle.report.record import read_run, read_runs
from baffle.report.series import AXES, series_of, stride
from baffle.simulation import add_baseline, simulate

Tiny = Callable[..., Plan]


def test_a_finished_run(finished_run: Path) -> None:
    run = read_run(finished_run)
    assert (run.state, run.name, run.rounds_done, run.networked) == ("finished", "tiny", 6, False)
    assert run.test_metrics == ("test_accuracy", "test_top5")
    assert run.last("test_accuracy") == run.summary["test_accuracy"]
    assert run.n_weights == run.summary["n_weights"] == 650
    assert len(run.chain) == 64
    assert run.versions["baffle"]
    assert run.baseline is None
    assert run.alignment.missing == "it needs at least 10 rounds"


def test_reading_changes_nothing(finished_run: Path) -> None:
    before = {file.name: file.read_bytes() for file in finished_run.iterdir()}
    read_run(finished_run)
    assert {file.name: file.read_bytes() for file in finished_run.iterdir()} == before


def test_the_series_end_with_the_numbers_of_the_summary(finished_run: Path) -> None:
    run = read_run(finished_run)
    columns = series_of(run).columns
    assert set(AXES) <= set(columns)
    assert columns["rounds"] == [1, 2, 3, 4, 5, 6]
    assert columns["forwards"][-1] == run.summary["forwards"]
    assert columns["test_accuracy"][-1] == pytest.approx(run.summary["test_accuracy"], rel=1e-4)
    assert columns["test_accuracy"][0] is None
    up, down = run.summary["uplink_bytes_per_client_round"], run.summary["downlink_bytes_per_client_round"]
    assert columns["bytes"][-1] == pytest.approx(3 * 6 * (up + down), rel=0.01)
    assert columns["loss"][-1] == pytest.approx(run.summary["train_loss"], rel=1e-4)


@pytest.mark.parametrize(("settings", "forwards"), [(["probe.scheme=central"], 8), (["federation.tiers=[]"], 5)])
def test_a_run_without_a_summary_has_the_same_forward_passes(
    tiny: Tiny, tmp_path: Path, settings: list[str], forwards: int
) -> None:
    simulate(tiny(*settings), tmp_path / "run")
    whole = series_of(read_run(tmp_path / "run")).columns["forwards"]
    (tmp_path / "run" / "summary.json").unlink()
    assert series_of(read_run(tmp_path / "run")).columns["forwards"] == whole
    assert whole[-1] == 6 * 3 * forwards


def test_a_long_run_is_drawn_in_few_points_at_whole_multiples(tiny: Tiny, tmp_path: Path) -> None:
    simulate(tiny("rounds=333", "run.evaluate_every=100", "probe.k=1"), tmp_path / "run")
    series = series_of(read_run(tmp_path / "run"))
    rounds = series.columns["rounds"]
    assert series.step == 5
    assert len(rounds) <= 70
    assert rounds[:3] == [5, 10, 15]
    assert rounds[-1] == 333
    measured = [r for r, value in zip(rounds, series.columns["test_accuracy"], strict=True) if value is not None]
    assert measured == [100, 200, 300, 333]
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    first_five = [record["loss"] for record in records[:5]]
    assert series.columns["loss"][0] == pytest.approx(sum(first_five) / 5, rel=1e-4)


@pytest.mark.parametrize(("length", "step"), [(0, 1), (150, 1), (151, 2), (301, 5), (1500, 10), (10**9, 10**7)])
def test_strides(length: int, step: int) -> None:
    assert stride(length, 150) == step


def test_backpropagation_is_read_where_it_was_run(finished_run: Path) -> None:
    pytest.importorskip("torch")
    add_baseline(finished_run)
    run = read_run(finished_run)
    assert run.baseline is not None
    assert run.baseline.plan.estimator == "backprop"
    assert run.baseline.rounds_done == 6
    assert run.baseline.alignment.expected is None


def test_who_dropped_out_is_counted_by_client_round_and_phase(tiny: Tiny, tmp_path: Path) -> None:
    simulate(tiny("rounds=30", "federation.clients=5", "federation.dropout=0.3", "secure.mode=on"), tmp_path / "run")
    run = read_run(tmp_path / "run")
    missing = sum(ways.get(MISSING, 0) for ways in run.attendance.by_client.values())
    assert missing == run.summary["dropouts"] > 0
    assert missing == sum(ways.get(MISSING, 0) for ways in run.attendance.by_round.values())
    assert all(sum(ways.values()) == 5 for ways in run.attendance.by_round.values())
    contributed = sum(ways.get(CONTRIBUTED, 0) for ways in run.attendance.by_client.values())
    left_out = sum(ways.get(LEFT_OUT, 0) for ways in run.attendance.by_client.values())
    assert contributed + left_out + missing == 5 * 30
    assert sum(silent for silent, _ in by_phase(run.rounds).values()) >= missing
    if left_out:
        assert any("too few" in words for words in run.attendance.reasons)


def test_a_run_that_was_stopped_before_it_had_a_journal(finished_run: Path) -> None:
    for name in ("journal.sqlite", "metrics.jsonl", "summary.json"):
        (finished_run / name).unlink()
    run = read_run(finished_run)
    assert run.rounds == ()
    assert series_of(run).columns["rounds"] == []
    (finished_run / "journal.sqlite").touch()  # a process was killed while it made its journal
    assert read_run(finished_run).rounds == ()


@pytest.mark.slow
def test_a_run_that_goes_on_and_one_that_was_killed(
    start: Callable[..., "subprocess.Popen[str]"], tiny_toml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    settings = ("--set", "rounds=1000000", "--set", "run.commit_seconds=0")
    process = start("run", tiny_toml, "--out", folder, *settings)
    limit = time.monotonic() + 60
    while not (folder / "metrics.jsonl").exists() or read_run(folder).rounds_done < 3:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < limit
        time.sleep(0.05)
    assert read_run(folder).state == "going on"
    process.send_signal(signal.SIGKILL)
    process.wait()
    run = read_run(folder)
    assert run.rounds_done >= 3
    assert run.state == "going on"  # nobody can know yet
    monkeypatch.setattr("baffle.report.record.SIGN_OF_LIFE", 0.0)
    time.sleep(0.5)
    assert read_run(folder).state == "stopped"


def test_a_folder_without_a_run_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="holds no run"):
        read_run(tmp_path)


def test_a_damaged_journal_is_refused_in_words(finished_run: Path) -> None:
    (finished_run / "journal.sqlite").write_bytes(b"no journal" * 500)
    with pytest.raises(JournalError, match="cannot be read"):
        read_run(finished_run)


def test_the_same_folder_twice_is_refused(finished_run: Path) -> None:
    with pytest.raises(BaffleError, match="named twice"):
        read_runs((finished_run, finished_run))


def test_old_journals_can_be_reported() -> None:
    folders = [path for path in (Path(__file__).parent.parent / "journals").iterdir() if (path / "plan.toml").exists()]
    assert len(folders) > 10
    for folder in folders:
        read_run(folder)


def test_a_copied_folder_reads_the_same(finished_run: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(finished_run, tmp_path / "a b"))
    assert read_run(copy).metrics == read_run(finished_run).metrics
