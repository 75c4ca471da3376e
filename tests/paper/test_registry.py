"""Every target of the paper, in its smoke form: offline, in seconds, and taken up where it was left."""

import json
import shutil
from pathlib import Path

import pytest

from baffle.cli.main import commands
from baffle.errors import PlanError
from baffle.paper.page import held, write
from baffle.paper.registry import TARGETS, target
from baffle.plan import change
from baffle.simulation import simulate


def _paper(folder: Path, name: str) -> dict[str, object]:
    command = ["paper", name, "--scale", "smoke", "--runs", str(folder / "runs"), "--out", str(folder / "out")]
    commands.main(command, standalone_mode=False)
    found: dict[str, object] = json.loads((folder / "out" / f"{name}-smoke.json").read_text())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_a_target_and_each_of_its_rows_alone_write_a_table_its_data_and_a_figure(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = _paper(tmp_path, name)
    said = capsys.readouterr().out
    page = (tmp_path / "out" / f"{name}-smoke.md").read_text()
    assert (tmp_path / "out" / f"{name}-smoke.png").read_bytes().startswith(b"\x89PNG")
    assert isinstance(found["rows"], list)
    assert all(str(cell) in page or isinstance(cell, float | int | None) for row in found["rows"] for cell in row)
    plans = target(name).plans("smoke")
    assert isinstance(found["plans"], dict)
    assert found["plans"].keys() == plans.keys()
    assert all(f"\n{label}  " in f"\n{said}" for label in plans or [name]), "it says what it is at"
    assert all(digest[:16] in page for digest in found["plans"].values())
    runs = held(tmp_path / "out" / f"{name}-smoke.json", plans)
    for row, run in runs.items():
        result = target(name).result({row: run}, "smoke", None, lambda _: None)
        alone = write(target(name), "smoke", result, {row: run}, tmp_path / "alone", run.origin, [row])
        assert len(result.rows) == 1, f"--only {row} shows one row"
        assert alone.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_finished_runs_are_kept_and_unfinished_ones_gone_on_with(tmp_path: Path) -> None:
    first = _paper(tmp_path, "fig-k")
    folders = sorted((tmp_path / "runs").iterdir())
    made = {folder: (folder / "summary.json").stat().st_mtime_ns for folder in folders}
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
    assert all((folder / "summary.json").stat().st_mtime_ns == made[folder] for folder in folders[1:])


def test_every_target_is_listed_and_others_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    commands.main(["paper", "--list"], standalone_mode=False)
    listed = capsys.readouterr().out
    assert all(name in listed for name in TARGETS)
    with pytest.raises(PlanError, match="table1"):
        target("table9")


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("scale", ["short", "full"])
def test_the_plans_of_every_scale_can_be_read(name: str, scale: str) -> None:
    plans = target(name).plans("short" if scale == "short" else "full")
    digests = {plan.digest() for plan in plans.values()}
    assert len(digests) == len(plans)
