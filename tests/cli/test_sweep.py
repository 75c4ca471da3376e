"""`baffle sweep`: what it prints and writes, what it refuses, and how it ends if a run fails."""

import io
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from baffle.cli import show
from baffle.grid.job import Event, Failure
from baffle.grid.play import Standing
from baffle.plan import Plan
from baffle.server.recorder import Progress
from tests.support.command_line import Cli, refused

GRID = ("--grid", "update.rate=0.01,0.1", "--seeds", "0..1", "--jobs", "1")


def test_it_prints_a_row_for_each_setting_and_writes_a_page(cli: Cli, tiny_toml: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = cli("sweep", tiny_toml, *GRID, "--out", out)
    assert (done.returncode, done.stderr) == (0, "")
    first, *lines = done.stdout.splitlines()
    assert re.fullmatch(r"update\.rate=0\.01, seed 0  finished  1/4 runs  about \d+ s left", first)
    head, one, other, report = lines[3:]
    assert head.split() == ["seeds", "test", "accuracy,", "mean", "least", "–", "most", "equal", "time"]
    assert [line.split()[:2] for line in (one, other)] == [["update.rate=0.01", "2"], ["update.rate=0.1", "2"]]
    assert report == f"report: {out / 'report.html'}"
    again = cli("sweep", tiny_toml, *GRID, "--out", out, "--json")
    told = json.loads(again.stdout)
    assert again.stdout.count("\n") == 1
    assert told["failed"] == {}
    for row in told["rows"]:
        assert row["seeds"] == [0, 1]
        assert row["mean"] == pytest.approx(sum(row["values"]) / 2)
        assert (row["metric"], row["estimator"]) == ("test_accuracy", "probe")
        assert row["values"] == [
            json.loads(path.read_text())["test_accuracy"] for path in sorted(out.glob(f"{row['row']}-*/summary.json"))
        ]
    page = (out / "report.html").read_text()
    assert cli("report", out).stdout == f"report: {out / 'report.html'}\n"
    for path in out.glob("*/plan.toml"):
        assert path.parent.name in page


def test_a_run_that_fails_is_named_and_the_exit_code_says_so(cli: Cli, tiny_toml: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = (tiny_toml, "--grid", "task.data=digits,mnist", "--jobs", "1", "--data", tmp_path, "--out", out)
    done = cli("sweep", *arguments)
    assert done.returncode == 2
    assert "task.data=mnist, seed 0  failed: " in done.stdout
    assert "task.data=digits" in done.stdout
    assert done.stderr.startswith("error: 1 of 2 runs failed, the others are kept: task.data=mnist, seed 0: ")
    assert done.stderr.count("\n") == 1
    silent = cli("sweep", *arguments, "--json")
    assert silent.returncode == 2
    assert list(json.loads(silent.stdout)["failed"]) == ["task.data=mnist, seed 0"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--seeds", "3", "--out", "x"), "--seeds: expected a range such as 0..4 or a list such as 0,3,7, got '3'"),
        (("--grid", "probe.kk=1,2", "--out", "x"), "unknown key probe.kk (did you mean probe.k?)"),
        (("--on", "moon", "--out", "x"), '--on: expected "local", "ray" or "ray://HOST:PORT"'),
        ((), "Missing option '--out'"),
    ],
)
def test_what_it_cannot_run_is_refused(cli: Cli, tiny_toml: Path, arguments: tuple[str, ...], words: str) -> None:
    refused(cli("sweep", tiny_toml, *arguments), words)


def test_a_paper_page_is_asked_for_with_seeds_and_trials(cli: Cli, tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ("--seeds", "2", "--choose-rates", "0.5", "--only", "K = 20", "--jobs", "1", "--runs", tmp_path / "runs")
    done = cli("paper", "fig-k", "--scale", "smoke", *options, "--out", out)
    assert (done.returncode, done.stderr) == (0, "")
    page = (out / "fig-k-smoke.md").read_text()
    assert "`baffle paper fig-k --scale smoke --seeds 2 --choose-rates 0.5 --only 'K = 20'`" in page
    assert "| K = 20 | " in page
    refused(cli("paper", "fig-k", "--seeds", "0"), "--seeds")


STANDING = Standing(12, 5, 1, {"a": Progress(3, 10), "b": None}, 125.0)


def test_the_progress_of_a_grid_fits_its_terminal_and_failures_stay_visible() -> None:
    screen = io.StringIO()
    with show.many_runs(Console(file=screen, force_terminal=True, width=60, color_system=None)) as watch:
        watch(Event("a", "going on", Progress(3, 10)), STANDING)
        watch(Event("b", "lost", failure=Failure("its process died of signal 9")), STANDING)
        watch(Event("c", "failed", failure=Failure("a bad day")), STANDING)
    lines = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen.getvalue()).replace("\r", "\n").splitlines()
    assert "b  its process died of signal 9, it is started again  5/12 runs, 1 failed  about 2 min 5 s left" in lines
    assert "c  failed: a bad day  5/12 runs, 1 failed  about 2 min 5 s left" in lines
    live = [line for line in lines if "a; b" in line]
    assert live
    assert max(map(len, live)) <= 60


def test_without_a_terminal_only_ends_have_a_line() -> None:
    plain = io.StringIO()
    with show.many_runs(Console(file=plain, width=10)) as watch:
        watch(Event("a", "began"), STANDING)
        watch(Event("a", "going on", Progress(3, 10)), STANDING)
        watch(Event("a", "ended"), STANDING)
    assert plain.getvalue() == "a  finished  5/12 runs, 1 failed  about 2 min 5 s left\n"


def test_a_sweep_of_unfinished_runs_has_a_page(cli: Cli, tiny: Callable[..., Plan], tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(tiny().to_toml())
    out = tmp_path / "out"
    cli("sweep", tmp_path / "tiny.toml", *GRID, "--out", out)
    for path in out.glob("*seed-1*/summary.json"):
        path.unlink()
    assert cli("report", out).returncode == 0
    page = (out / "report.html").read_text()
    assert "2 rows, 4 runs, 2 of them finished" in page
    assert "1 of 2" in page
    for path in out.glob("*/summary.json"):
        path.unlink()
    assert cli("report", out).returncode == 0
    assert "0 of 2" in (out / "report.html").read_text()
