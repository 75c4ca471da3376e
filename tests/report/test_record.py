"""What a report reads from the folders of real runs, the alignment that it measures, and how it shows numbers."""

import json
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from baffle.core.directions import DISTRIBUTIONS, Directions
from baffle.core.ports import CONTRIBUTED, MISSING
from baffle.core.rebuild import gradient_from_scalars
from baffle.core.seeds import Scratch
from baffle.errors import BaffleError, JournalError, RunFolderError
from baffle.plan import Plan, load
from baffle.report.charts import AXES, series_of
from baffle.report.record import LEFT_OUT, by_phase, measured_alignment, read_run, read_runs, squares
from baffle.report.words import duration, is_share, measured, metric_name, round_number, size
from baffle.simulation import add_baseline, simulate
from baffle.trajectory import Trajectory, trajectory_of

Tiny = Callable[..., Plan]


def test_a_finished_run_and_its_series_which_end_with_the_numbers_of_the_summary(finished_run: Path) -> None:
    before = {file.name: file.read_bytes() for file in finished_run.iterdir()}
    run = read_run(finished_run)
    assert {file.name: file.read_bytes() for file in finished_run.iterdir()} == before
    assert (run.state, run.name, run.rounds_done, run.networked) == ("finished", "tiny", 6, False)
    assert run.test_metrics == ("test_accuracy", "test_top5")
    assert run.last("test_accuracy") == run.summary["test_accuracy"]
    assert run.n_weights == run.summary["n_weights"] == 650
    assert len(run.chain) == 64
    assert run.versions["baffle"]
    assert run.baseline is None
    assert run.alignment.missing == "it needs at least 10 rounds"
    columns = series_of(run).columns
    assert set(AXES) <= set(columns)
    assert columns["rounds"] == [1, 2, 3, 4, 5, 6]
    assert columns["forwards"][-1] == run.summary["forwards"]
    assert columns["test_accuracy"][-1] == pytest.approx(run.summary["test_accuracy"], rel=1e-4)
    assert columns["test_accuracy"][0] is None
    up, down = run.summary["uplink_bytes_per_client_round"], run.summary["downlink_bytes_per_client_round"]
    assert columns["bytes"][-1] == pytest.approx(3 * 6 * (up + down), rel=0.01)
    assert columns["loss"][-1] == pytest.approx(run.summary["train_loss"], rel=1e-4)


@pytest.mark.parametrize(
    ("settings", "forwards"),
    [
        (["probe.scheme=central"], 6 * 8),
        (["federation.tiers=[]"], 6 * 5),
        (["probe.head=exact"], 6 * 1),  # softmax regression is a head alone
        (["federation.local_steps=3", "federation.warm_up=2", "federation.batch=4"], (2 + 4 * 3) * 5),
    ],
)
def test_a_run_without_a_summary_has_the_same_forward_passes(
    tiny: Tiny, tmp_path: Path, settings: list[str], forwards: int
) -> None:
    simulate(tiny(*settings), tmp_path / "run")
    whole = series_of(read_run(tmp_path / "run")).columns["forwards"]
    (tmp_path / "run" / "summary.json").unlink()
    assert series_of(read_run(tmp_path / "run")).columns["forwards"] == whole
    assert whole[-1] == 3 * forwards


def test_a_long_run_is_drawn_in_few_points_at_whole_multiples(tiny: Tiny, tmp_path: Path) -> None:
    simulate(tiny("rounds=161", "run.evaluate_every=50", "probe.k=1"), tmp_path / "run")
    series = series_of(read_run(tmp_path / "run"))
    rounds = series.columns["rounds"]
    assert (series.step, rounds) == (2, [*range(2, 161, 2), 161])
    evaluated = [r for r, value in zip(rounds, series.columns["test_accuracy"], strict=True) if value is not None]
    assert evaluated == [50, 100, 150, 161]
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert series.columns["loss"][0] == pytest.approx((records[0]["loss"] + records[1]["loss"]) / 2, rel=1e-4)


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
    start: Callable[..., "subprocess.Popen[str]"], tiny_toml: Path, tmp_path: Path
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
    assert read_run(folder, clock=lambda: time.time() + 3600).state == "stopped"


def test_a_folder_without_a_run_the_same_folder_twice_and_a_damaged_journal_are_refused(
    finished_run: Path, tmp_path: Path
) -> None:
    with pytest.raises(RunFolderError, match="holds no run"):
        read_run(tmp_path)
    with pytest.raises(BaffleError, match="named twice"):
        read_runs((finished_run, finished_run))
    (finished_run / "journal.sqlite").write_bytes(b"no journal" * 500)
    with pytest.raises(JournalError, match="cannot be read"):
        read_run(finished_run)


def test_old_journals_can_be_reported() -> None:
    folders = [path for path in (Path(__file__).parent.parent / "journals").iterdir() if (path / "plan.toml").exists()]
    assert len(folders) > 10
    for folder in folders:
        read_run(folder)


N = 300


def _trajectory(distribution: str, k: int = 30) -> Trajectory:
    return trajectory_of(load("digits", [f"probe.k={k}", f"probe.distribution={distribution}", "ring.n_max=1"]), N)


@pytest.mark.parametrize("distribution", ["gaussian", "rademacher"])
@pytest.mark.parametrize("noise", [0.0, 3.0])
def test_squares_are_unbiased_whatever_noise_the_scalars_carry(distribution: str, noise: float) -> None:
    random, trajectory = np.random.default_rng(1), _trajectory(distribution)
    gradient = random.standard_normal(N) / np.sqrt(N)
    errors = list[float]()
    for number in range(300):
        directions = Directions(number.to_bytes(32, "big"), DISTRIBUTIONS[distribution])
        z = directions.draw(range(30), 0, N).astype(np.float64) * directions.distribution.unit
        scalars = z @ gradient + noise * random.standard_normal(30) + noise  # a part that all share, as curvature has
        square, of_estimate = squares(scalars, directions, trajectory, Scratch())
        assert of_estimate == pytest.approx(np.sum((scalars @ z / 30) ** 2))
        errors.append(square - gradient @ gradient)
    assert abs(np.mean(errors)) < 4 * np.std(errors) / np.sqrt(len(errors))
    assert noise or abs(np.mean(errors)) < 0.15 * gradient @ gradient


def test_the_estimate_is_the_one_that_the_server_rebuilds() -> None:
    trajectory = _trajectory("gaussian")
    totals = np.random.default_rng(0).integers(-(2**20), 2**20, 30).astype(np.int32)
    directions = trajectory.directions(0)
    rebuilt = gradient_from_scalars(totals, 7, directions, trajectory.supports, N, trajectory.ring)
    _, square = squares(totals / (trajectory.ring.scale * 7), directions, trajectory, Scratch())
    assert square == pytest.approx(float(rebuilt.astype(np.float64) @ rebuilt), rel=1e-5)


def test_a_real_run_is_as_aligned_as_expected(tiny: Tiny, tmp_path: Path) -> None:
    simulate(tiny("rounds=40", "probe.k=100", 'update.optimizer="sgd"', "update.rate=0.001"), tmp_path / "run")
    alignment = read_run(tmp_path / "run").alignment
    assert alignment.expected == pytest.approx(np.sqrt(100 / (100 + 650 + 1)), rel=1e-3)
    assert alignment.measured is not None
    assert alignment.error is not None
    assert alignment.expected is not None
    assert alignment.error < 0.06
    assert abs(alignment.measured - alignment.expected) < 4 * alignment.error


def test_noise_instead_of_a_gradient_is_not_called_aligned() -> None:
    random, trajectory = np.random.default_rng(2), _trajectory("rademacher", k=100)
    pairs = [
        squares(random.standard_normal(100), trajectory.directions(number), trajectory, Scratch())
        for number in range(200)
    ]
    alignment = measured_alignment(0.5, np.array(pairs))
    assert alignment.measured is None or alignment.measured < 4 * (alignment.error or 0)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (["federation.seeds=own"], "whole vectors"),
        (["federation.tiers=[{k=2,share=0.5}]"], "tiers"),
        (["probe.k=1"], "one direction"),
        (["probe.head=exact"], "the last layer is exact"),
        (["federation.local_steps=2", "federation.batch=4"], "several steps"),
        (["rounds=5"], "at least 10 rounds"),
    ],
)
def test_what_cannot_be_measured_is_said(tiny: Tiny, tmp_path: Path, settings: list[str], why: str) -> None:
    simulate(tiny("rounds=12", *settings), tmp_path / "run")
    alignment = read_run(tmp_path / "run").alignment
    assert alignment.measured is None
    assert why in alignment.missing
    assert alignment.expected is not None


def test_numbers_and_metrics_are_shown_as_people_say_them() -> None:
    sizes = {0: "0 B", 999: "999 B", 1000: "1.0 kB", 1_500_000: "1.5 MB", 2e9: "2.0 GB", 5e12: "5000.0 GB"}
    assert {count: size(count) for count in sizes} == sizes
    times = {0.4: "0 s", 59.6: "1 min 0 s", 61: "1 min 1 s", 3599.9: "1 h 0 min", 7325: "2 h 2 min"}
    assert {seconds: duration(seconds) for seconds in times} == times
    steps = {0: 1, 150: 1, 151: 2, 301: 5, 1500: 10, 10**9: 10**7}
    assert {length: round_number(length / 150) for length in steps} == steps
    assert metric_name("test_accuracy") == "test accuracy"
    assert metric_name("test_top5") == "top-5 accuracy"
    assert (measured("test_accuracy", 0.5), measured("test_mse", 0.5)) == ("50.00%", "0.5")
    assert measured("test_r2", float("nan")) == measured("test_r2", None) == "–"
    assert is_share("test_accuracy_last")
    assert not is_share("test_mae")
