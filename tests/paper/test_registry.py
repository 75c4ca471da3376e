"""Every target, found by its name and run at smoke scale: offline, in seconds, and resumed where it stopped."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import pytest

from baffle.cli.main import commands
from baffle.errors import PlanError
from baffle.paper import registry
from baffle.paper.page import kept_runs, write
from baffle.paper.registry import TARGETS, register, target
from baffle.paper.target import Finished, Result, Scale, Tell
from baffle.plan import Plan, change
from baffle.simulation import simulate


def _paper(folder: Path, name: str) -> dict[str, Any]:
    """The JSON that `baffle paper NAME --scale smoke` writes."""
    command = ["paper", name, "--scale", "smoke", "--runs", str(folder / "runs"), "--out", str(folder / "out")]
    commands.main(command, standalone_mode=False)
    page: dict[str, Any] = json.loads((folder / "out" / f"{name}-smoke.json").read_text())
    return page


def _table_on(page: str) -> list[list[str]]:
    """The cells of a page's only table, the head first and without the ruler."""
    head, _ruler, *rows = [line for line in page.splitlines() if line.startswith("|")]
    return [line.removeprefix("| ").removesuffix(" |").split(" | ") for line in (head, *rows)]


def _shows(text: str, cell: object) -> bool:
    """Whether a page's text says what the JSON says: numbers to two decimals, with commas between thousands."""
    match cell:
        case None:
            return text == "–"
        case float():
            return float(text) == pytest.approx(cell, abs=0.00501)
        case int():
            return int(text.replace(",", "")) == cell
        case _:
            return text == cell


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
    head, *rows = _table_on(page)
    assert head == data["columns"]
    assert rows, "a table has rows"
    for texts, cells in zip(rows, data["rows"], strict=True):
        assert all(_shows(text, cell) for text, cell in zip(texts, cells, strict=True)), (texts, cells)
    plans = target(name).plans("smoke")
    assert data["plans"].keys() == plans.keys()
    assert all(f"\n{label}  " in f"\n{printed}" for label in plans or [name]), "it says what it is at"
    assert all(digest[:16] in page for digest in data["plans"].values())
    runs = kept_runs(tmp_path / "out" / f"{name}-smoke.json", plans)
    assert runs.keys() == plans.keys()
    for row, run in runs.items():
        result = target(name).result({row: run}, "smoke", None, lambda _: None)
        alone = write(target(name), "smoke", result, {row: run}, tmp_path / "alone", run.origin, [row])
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
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert listed == list(TARGETS)
    with pytest.raises(PlanError, match=", ".join(TARGETS)):
        target("table9")


def test_targets_are_called_like_their_modules() -> None:
    assert [name.replace("-", "_") for name in TARGETS] == list(registry.BUILT_IN)


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("scale", get_args(Scale))
def test_the_plans_of_every_scale_can_be_read_and_differ(name: str, scale: Scale) -> None:
    plans = target(name).plans(scale)
    digests = {plan.digest() for plan in plans.values()}
    assert len(digests) == len(plans)


@dataclass(frozen=True)
class Toy:
    """The smallest target there is: it measures one number."""

    name: str = "toy"
    about: str = "a toy"

    def plans(self, _scale: Scale) -> dict[str, Plan]:
        return {}

    def result(self, _runs: Mapping[str, Finished], scale: Scale, _data: Path | None, tell: Tell) -> Result:
        tell("the only row")
        return Result(("scale", "answer"), [[scale, 42]])


def test_a_new_target_is_registered_like_the_built_in_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(registry, "TARGETS", dict(TARGETS))
    register(Toy())
    commands.main(["paper", "--list"], standalone_mode=False)
    assert capsys.readouterr().out.splitlines()[-1].split() == ["toy", "a", "toy"]
    assert _paper(tmp_path, "toy")["rows"] == [["smoke", 42]]
    assert not (tmp_path / "out" / "toy-smoke.png").exists()


def test_a_name_that_is_taken_is_refused() -> None:
    before = dict(TARGETS)
    with pytest.raises(PlanError, match=r"two targets are called 'table1'.*rename"):
        register(Toy(name="table1"))
    assert before == TARGETS
