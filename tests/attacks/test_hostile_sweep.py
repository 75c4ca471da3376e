"""Folders of sweeps that come from a stranger: nothing is written outside of one, and no page of it takes for ever."""

import json
from pathlib import Path

import pytest

from baffle.grid.spread import UNTOLD
from baffle.grid.sweep import SWEEP
from tests.support.command_line import Cli, refused


def planted(folder: Path, runs: list[tuple[str, int, str]]) -> Path:
    """A sweep of a stranger, by rows, seeds and folders."""
    folder.mkdir(exist_ok=True)
    listed = [{"row": row, "seed": seed, "folder": name} for row, seed, name in runs]
    (folder / SWEEP).write_text(json.dumps({"command": "", "runs": listed}))
    return folder


@pytest.mark.parametrize("has_begun", [True, False])
def test_a_sweep_does_not_go_on_in_a_linked_folder(cli: Cli, tiny_toml: Path, tmp_path: Path, has_begun: bool) -> None:
    """N13. The link leads to a run of the user that was stopped, or to an empty folder."""
    sweep, mine = ("sweep", tiny_toml, "--jobs", "1", "--out", tmp_path / "theirs"), tmp_path / "mine"
    assert cli(*sweep).returncode == 0
    (run,) = (path.parent for path in (tmp_path / "theirs").glob("*/plan.toml"))
    run.rename(mine)
    (mine / "summary.json").unlink()
    for file in [] if has_begun else mine.iterdir():
        file.unlink()
    run.symlink_to(mine)
    before = {path.name: path.read_bytes() for path in mine.iterdir()}
    done = cli(*sweep)
    assert done.returncode == 2
    assert "is a link, and nothing is written through links" in done.stderr
    assert {path.name: path.read_bytes() for path in mine.iterdir()} == before


@pytest.mark.parametrize(
    ("runs", "words"),
    [
        ([("row", seed, "run") for seed in range(2)], "names a folder twice"),
        ([("row", seed, f"run-{seed}") for seed in range(10_001)], "length <= 10000"),
    ],
)
def test_a_sweep_names_no_more_runs_than_it_has(
    cli: Cli, tmp_path: Path, runs: list[tuple[str, int, str]], words: str
) -> None:
    """N12. A list of eight megabytes could name one folder a hundred thousand times, each to be read and compared."""
    refused(cli("report", planted(tmp_path / "theirs", runs)), words)


def test_rows_that_are_equal_in_too_many_ways_do_not_take_for_ever(
    cli: Cli, finished_run: Path, tmp_path: Path
) -> None:
    """N12. Forty pairs of rows, each equal to all but its partner: 2⁴⁰ sets of equal rows."""
    runs = [(f"{pair}{sign}", seed, f"{pair}{sign}{seed}") for pair in range(40) for sign in "+-" for seed in (0, 1)]
    theirs = planted(tmp_path / "theirs", runs)
    for row, seed, name in runs:
        away = 10.0 + int(row[:-1]) / 10
        (theirs / name).mkdir()
        for file in ("plan.toml", "journal.sqlite", "metrics.jsonl"):
            (theirs / name / file).symlink_to(finished_run / file)
        accuracy = (away if row[-1] == "+" else -away) + (seed - 0.5) * (2 * away - 0.05)
        (theirs / name / "summary.json").write_text(json.dumps({"test_accuracy": accuracy}))
    assert cli("report", theirs).returncode == 0
    assert f">{UNTOLD}<" in (theirs / "report.html").read_text()
