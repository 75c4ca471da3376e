"""Every target, found by its name and run at smoke scale: offline, in seconds, and resumed where it stopped."""

import json
import re
import shutil
from pathlib import Path
from typing import Any, get_args

import pytest

from baffle.cli.main import commands
from baffle.errors import PlanError
from baffle.journal.audit import verify
from baffle.paper.page import kept_runs, read_page, write
from baffle.paper.registry import BUILT_IN, TARGETS, target
from baffle.paper.target import Scale
from baffle.paper.text import table
from baffle.plan import change
from baffle.simulation import simulate


def _paper(folder: Path, name: str) -> dict[str, Any]:
    """The JSON that `baffle paper NAME --scale smoke` writes."""
    command = ["paper", name, "--scale", "smoke", "--runs", str(folder / "runs"), "--out", str(folder / "out")]
    commands.main(command, standalone_mode=False)
    page: dict[str, Any] = json.loads((folder / "out" / f"{name}-smoke.json").read_text())
    return page


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_a_target_and_each_of_its_rows_alone_write_a_table_its_data_and_a_figure(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    data = _paper(tmp_path, name)
    printed = capsys.readouterr().out
    page = (tmp_path / "out" / f"{name}-smoke.md").read_text()
    assert (tmp_path / "out" / f"{name}-smoke.png").read_bytes().startswith(b"\x89PNG")
    html = (tmp_path / "out" / f"{name}-smoke.html").read_text()
    assert f"<h1>{name}</h1>" in html
    assert "<script" not in html
    assert "data:image/png;base64," in html
    assert data["rows"], "a table has rows"
    assert table(data["columns"], data["rows"]) in page
    plans = target(name).plans("smoke")
    assert data["plans"].keys() == plans.keys()
    assert all(f"\n{label}  " in f"\n{printed}" for label in plans or [name]), "it says what it is at"
    assert all(digest[:16] in page for digest in data["plans"].values())
    page_before = read_page(tmp_path / "out" / f"{name}-smoke.json")
    for row, plan in plans.items():
        run = kept_runs(page_before, row, plan)[0]
        result = target(name).result({row: [run]}, "smoke", None, lambda _: None)
        alone = write(
            target(name), "smoke", result, {row: [run]}, tmp_path / "alone", run.origin, {row: ""}, {}, whole=False
        )
        assert len(result.rows) == 1, f"--only {row} shows one row"
        assert alone.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_finished_runs_are_kept_and_stopped_ones_resumed(tmp_path: Path) -> None:
    first = _paper(tmp_path, "fig-k")
    folders = sorted((tmp_path / "runs").iterdir())
    written = {folder: (folder / "summary.json").stat().st_mtime_ns for folder in folders}
    shutil.rmtree(folders[0])
    stopped = next(
        plan for plan in target("fig-k").plans("smoke").values() if folders[0].name.endswith(plan.digest().hex()[:12])
    )
    simulate(change(stopped, ["rounds=1"]), folders[0])
    (folders[0] / "summary.json").unlink()
    text = (folders[0] / "plan.toml").read_text()
    (folders[0] / "plan.toml").write_text(text.replace("rounds = 1\n", f"rounds = {stopped.rounds}\n"))
    again = _paper(tmp_path, "fig-k")
    assert again["weights"] == first["weights"]
    assert all((folder / "summary.json").stat().st_mtime_ns == written[folder] for folder in folders[1:])


def test_every_target_is_listed_and_an_unknown_name_gets_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    commands.main(["paper", "--list"], standalone_mode=False)
    lines = capsys.readouterr().out.splitlines()
    listed = [line.split()[0] for line in lines if not line.startswith(" ")]
    assert lines[1].split() == ["short:", "MNIST;", "full:", "MNIST,", "CIFAR-10,", "CIFAR-100"]
    assert listed == list(TARGETS) == [target.name for target in BUILT_IN]  # no two have the same name
    with pytest.raises(PlanError, match=", ".join(TARGETS)):
        target("table9")


@pytest.mark.slow
def test_a_target_says_how_long_each_of_its_runs_takes_here(capsys: pytest.CaptureFixture[str]) -> None:
    commands.main(["paper", "fig-k", "--list", "--scale", "smoke"], standalone_mode=False)
    listed = capsys.readouterr().out
    runs = re.findall(r"^  (.+): about .*(?: s| min)$", listed, re.MULTILINE)
    assert runs == list(target("fig-k").plans("smoke"))
    assert re.search(r"^  in all about .* here at scale smoke$", listed, re.MULTILINE)


@pytest.mark.parametrize("name", TARGETS)
def test_the_plans_of_every_scale_can_be_read_and_differ(name: str) -> None:
    for scale in get_args(Scale):
        plans = target(name).plans(scale)
        assert len({plan.digest() for plan in plans.values()}) == len(plans)


PAPER = Path(__file__).resolve().parents[2] / "results" / "paper"


@pytest.mark.parametrize("folder", sorted((PAPER / "journals").iterdir()), ids=lambda folder: folder.name)
def test_a_journal_of_the_results_replays_to_the_weights_of_its_row(folder: Path, tmp_path: Path) -> None:
    replayed = verify(shutil.copytree(folder, tmp_path / "run"))
    assert replayed.rounds > 0
    if (folder / "summary.json").exists():  # an unfinished run has no row yet
        stem, _, asked = folder.name.rpartition("-")
        page = json.loads((PAPER / f"{stem}.json").read_text())
        (name,) = (name for name, run in page["runs"].items() if run["asked"].startswith(asked))
        assert page["weights"][name] == replayed.weights_sha256
