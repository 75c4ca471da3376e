"""Building pages: which rows a target runs and shows, rows without data, and rows that are added later."""

import json
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from baffle.errors import DataError, PageError, PlanError
from baffle.paper import gradients, page
from baffle.paper.page import Onlooker, about_page, build_page, made_by, table
from baffle.paper.registry import TARGETS, target
from baffle.paper.target import Origin, Target
from baffle.paper.training_runs import Row, TrainingRuns


@contextmanager
def silence(_label: str) -> Iterator[Callable[[Any], None]]:
    yield lambda _report: None


def _target(**rows: Row) -> TrainingRuns:
    small = ("rounds=1", "probe.k=2", 'task.model={name="softmax"}')
    return TrainingRuns("some", "some rows", {"smoke": rows}, {"smoke": small})


THREE = _target(here=Row((), 40.0), there=Row(("probe.k=3",)), elsewhere=Row(("probe.k=4",)))


def _build(target: Target, folder: Path, only: Sequence[str] = (), out: str = "out", data: Path | None = None) -> Path:
    return build_page(target, "smoke", folder / "runs", folder / out, Onlooker(silence, silence), data, only)


def test_rows_without_data_are_left_out_and_named_and_without_any_data_there_is_no_page(tmp_path: Path) -> None:
    elsewhere = Row(("task.data=cifar100",), 50.0)
    with pytest.raises(DataError, match="CIFAR-100"):
        _build(_target(there=elsewhere), tmp_path, data=tmp_path)
    assert not list(tmp_path.glob("**/*.md"))
    target = _target(here=Row((), 40.0), there=elsewhere, yonder=Row(("task.data=cifar100", "probe.k=3")))
    built = _build(target, tmp_path, data=tmp_path)
    assert [row[0] for row in json.loads(built.with_suffix(".json").read_text())["rows"]] == ["here"]
    (note,) = [line for line in built.read_text().splitlines() if line.startswith("Left out")]
    assert "there; yonder" in note
    assert "CIFAR-100" in note


def test_only_chooses_rows_by_name(tmp_path: Path) -> None:
    def chosen(*only: str) -> tuple[list[str], str]:
        built = _build(THREE, tmp_path, only, out="-".join(only))
        return [row[0] for row in json.loads(built.with_suffix(".json").read_text())["rows"]], built.read_text()

    rows, text = chosen("ERE")
    assert rows == ["here", "there", "elsewhere"]
    assert "Not asked for" not in text
    assert "--only" not in text
    rows, text = chosen("there", "else")
    assert rows == ["there", "elsewhere"]
    assert "Not asked for: 1 of 3 rows." in text
    assert "`baffle paper some --scale smoke --only there --only elsewhere`" in text
    rows, _ = chosen("Here")  # the whole name of a row, although "there" contains it too
    assert rows == ["here"]
    with pytest.raises(PlanError, match="here; there; elsewhere"):
        _build(THREE, tmp_path, ["yonder"])
    with pytest.raises(PlanError, match="theorem2 is measured as a whole"):
        _build(gradients.THEOREM2, tmp_path, ["10"])


def _page(target: TrainingRuns, folder: Path, only: Sequence[str] = (), out: str = "out") -> dict[str, Any]:
    """The JSON of a page, built after all earlier runs are deleted."""
    shutil.rmtree(folder / "runs", ignore_errors=True)
    content: dict[str, Any] = json.loads(_build(target, folder, only, out).with_suffix(".json").read_text())
    return content


def _without_timings(content: dict[str, Any]) -> dict[str, Any]:
    """The page without what differs between two runs of one plan: times and memory."""
    for run in content["runs"].values():
        for record in (run["summary"], *run["metrics"]):
            for key in [key for key in record if "seconds" in key or "_mb" in key or "share" in key]:
                del record[key]
    return content


@pytest.mark.slow
@pytest.mark.parametrize("order", list(permutations(["here", "there", "elsewhere"])), ids="-".join)
def test_rows_added_one_by_one_in_any_order_make_the_page_of_all(tmp_path: Path, order: tuple[str, ...]) -> None:
    whole = _page(THREE, tmp_path, out="whole")
    grown = [_page(THREE, tmp_path, [name]) for name in order]
    assert [len(page["rows"]) for page in grown] == [1, 2, 3]
    assert _without_timings(grown[-1]) == _without_timings(whole)
    for kind in (".md", ".png", ".html"):
        pages = [(tmp_path / out / f"some-smoke{kind}").read_bytes() for out in ("out", "whole")]
        assert pages[0] == pages[1]


def test_a_row_that_stays_keeps_its_date_and_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "_origin", lambda: Origin("2001-02-03", "abc"))
    _page(THREE, tmp_path, ["there"])
    monkeypatch.setattr(page, "_origin", lambda: Origin("2004-05-06", "def"))
    content = _page(THREE, tmp_path, ["here"])
    assert (content["date"], content["commit"]) == ("2004-05-06", "def")
    there, here = ({"date": "2001-02-03", "commit": "abc"}, {"date": "2004-05-06", "commit": "def"})
    assert {name: run["origin"] for name, run in content["runs"].items()} == {"here": here, "there": there}
    (line,) = [line for line in (tmp_path / "out" / "some-smoke.md").read_text().splitlines() if "`there`" in line]
    assert line.endswith("2001-02-03, commit abc")


@pytest.mark.slow
def test_a_row_stays_without_data_but_not_if_its_plan_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _page(THREE, tmp_path)

    def without(path: Path, plan: Any, *rest: Any) -> Any:
        if plan.probe.k == 3:
            raise DataError("it is gone")
        return run(path, plan, *rest)

    run = page._run
    monkeypatch.setattr(page, "_run", without)
    content = _page(THREE, tmp_path)
    assert [row[0] for row in content["rows"]] == ["here", "there", "elsewhere"]
    assert not any("gone" in note for note in content["notes"])
    changed = _target(**{**THREE.rows["smoke"], "there": Row(("probe.k=5",))})
    assert [row[0] for row in _page(changed, tmp_path, ["here"])["rows"]] == ["here", "elsewhere"]


def test_a_page_that_cannot_be_read_is_named_and_left_alone_and_one_without_runs_is_rebuilt(tmp_path: Path) -> None:
    path = tmp_path / "out" / "some-smoke.json"
    path.parent.mkdir()
    for text in ("", "[]", '{"runs": {"here": {"asked": "00"}}}'):
        path.write_text(text)
        with pytest.raises(PageError, match=r"some-smoke\.json cannot be read as a page"):
            _build(THREE, tmp_path, ["here"])
        assert path.read_text() == text
    path.write_text('{"target": "some", "rows": [["there", 1.0]]}')  # from before pages kept their runs
    assert [row[0] for row in _page(THREE, tmp_path, ["here"])["rows"]] == ["here"]


def test_a_page_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(PageError, match=r"some-smoke cannot be written to .*finished runs are not lost"):
        _build(THREE, tmp_path, ["there"], out="file")
    (written,) = (path.stat().st_mtime_ns for path in (tmp_path / "runs").glob("*/summary.json"))
    _build(THREE, tmp_path, ["there"])
    assert [path.stat().st_mtime_ns for path in (tmp_path / "runs").glob("*/summary.json")] == [written]


def test_numbers_are_rounded_and_grouped_and_a_command_names_the_chosen_rows_as_a_shell_reads_them() -> None:
    assert table(("a", "b", "c", "d"), [["K = 20", 12.345678, 1234567, None]]) == (
        "| a | b | c | d |\n|---|---|---|---|\n| K = 20 | 12.35 | 1,234,567 | – |"
    )
    about = {"target": "table1", "scale": "full", "date": "2001-02-03", "commit": "abc"}
    assert made_by(about) == "`baffle paper table1 --scale full`, 2001-02-03, commit abc"
    chosen = made_by(about | {"only": ["K = 20", "back"]})
    assert chosen.startswith("`baffle paper table1 --scale full --only 'K = 20' --only back`, ")


@pytest.mark.parametrize("name", TARGETS)
def test_a_page_names_the_data_that_it_ran_on(name: str) -> None:
    known = "MNIST|CIFAR|PACS|OfficeHome"
    assert not re.search(known, about_page(target(name), "smoke"))
    needs = set(re.findall(known, f"{', '.join(target(name).data('full'))}"))
    assert set(re.findall(known, about_page(target(name), "full"))) == needs


def test_a_page_looks_like_a_report_by_day_and_by_night(tmp_path: Path) -> None:
    html = _build(THREE, tmp_path).with_suffix(".html").read_text()
    assert "a smoke test: its figures mean nothing" in html
    assert re.findall("<h2>(.*?)</h2>", html) == ["Result", "Figure", "Origin"]
    dark, light = re.findall(r"data:image/png;base64,([^\"]+)", html)
    assert dark != light
    assert html.index(dark) < html.index('prefers-color-scheme: dark)"') < html.index(light)
