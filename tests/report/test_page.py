"""Pages of real runs, and of plans and servers that lie."""

import json
import re
import sqlite3
from collections.abc import Callable
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baffle.plan import Plan
from baffle.report.markup import Html, data_block, element
from baffle.report.page import SECTIONS, Scripts, content_of, render
from baffle.report.partition import partition_of
from baffle.report.record import RunRecord, read_run
from baffle.report.words import ranges
from baffle.simulation import simulate

LIE = "<b>b</b><a href=//x>a</a><script>alert(1)</script><img src=x onerror=alert(2)>\"'&</title></script><!--"


class Elements(HTMLParser):
    """The elements of a page, in order, and the text outside of scripts."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.found if name == tag]


def _page(*runs: RunRecord) -> str:
    partitions = [partition_of(run) for run in runs]
    return render(runs, content_of(runs, partitions), Scripts("plotly.js", source="plotly.js"))


def _elements(page: str) -> Elements:
    elements = Elements()
    elements.feed(page)
    return elements


def _data(page: str) -> Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found
    return json.loads(found[1])


def test_the_page_of_a_finished_run(finished_run: Path) -> None:
    run = read_run(finished_run)
    page = _page(run)
    elements = _elements(page)
    assert len(page) < 45_000
    for heading in SECTIONS:
        assert heading in elements.text
    assert f"{run.summary['test_accuracy']:.2%}" in elements.text
    assert run.summary["weights_sha256"] in elements.text
    assert f"baffle verify {finished_run}" in elements.text
    assert "The server refused nothing." in elements.text
    assert {chart["kind"] for chart in _data(page)["charts"]} == {"lines", "bars", "heat"}


def test_every_chart_has_a_place_a_title_and_a_table(finished_run: Path) -> None:
    page = _page(read_run(finished_run))
    ids = {attributes.get("id") for _, attributes in _elements(page).found}
    charts = _data(page)["charts"]
    assert len(charts) == 6
    for chart in charts:
        assert {chart["id"], f"{chart['id']}-title"} <= ids
    assert page.count("<summary>Numbers: ") == len(charts)


def test_headings_are_in_order(finished_run: Path, tiny: Callable[..., Plan], tmp_path: Path) -> None:
    simulate(tiny("seed=1", "federation.dropout=0.3", "secure.mode=on", "federation.clients=5"), tmp_path / "other")
    for runs in ([read_run(finished_run)], [read_run(finished_run), read_run(tmp_path / "other")]):
        levels = [int(tag[1]) for tag, _ in _elements(_page(*runs)).found if re.fullmatch(r"h\d", tag)]
        assert levels[0] == 1
        assert levels.count(1) == 1
        assert all(after <= before + 1 for before, after in pairwise(levels))


def test_the_page_may_load_nothing_from_anywhere(finished_run: Path) -> None:
    page = _page(read_run(finished_run))
    elements = _elements(page)
    assert [script["src"] for script in elements.named("script") if "src" in script] == ["plotly.js"]
    assert not elements.named("link")
    assert not elements.named("img")
    (policy,) = [meta["content"] for meta in elements.named("meta") if meta.get("http-equiv")]
    assert policy is not None
    assert "default-src 'none'" in policy
    assert "connect-src 'none'" in policy
    assert "'unsafe-inline'" not in policy.partition("script-src")[2].partition(";")[0]
    assert not re.findall(r"https?://", page)


def test_several_runs_stand_side_by_side_with_what_differs(
    tiny: Callable[..., Plan], finished_run: Path, tmp_path: Path
) -> None:
    simulate(tiny("probe.k=9", "name=other"), tmp_path / "other")
    page = _page(read_run(finished_run), read_run(tmp_path / "other"))
    text = _elements(page).text
    settings = page.partition('id="part-settings"')[2].partition("</section>")[0]
    assert "probe.k" in settings
    assert "update.rate" not in settings
    assert "2 runs side by side" in text
    assert [line["name"] for line in _data(page)["lines"]] == ["tiny", "other"]
    assert page.count('id="part-partition-') == 1  # both have the same


def test_runs_of_one_name_are_told_apart_by_their_folders(tiny: Callable[..., Plan], tmp_path: Path) -> None:
    for name in ("one", "two"):
        simulate(tiny(), tmp_path / name)
    page = _page(read_run(tmp_path / "one"), read_run(tmp_path / "two"))
    assert [line["name"] for line in _data(page)["lines"]] == ["tiny (one)", "tiny (two)"]


def test_a_run_without_rounds_has_a_page(finished_run: Path) -> None:
    for name in ("journal.sqlite", "metrics.jsonl", "summary.json"):
        (finished_run / name).unlink()
    text = _elements(_page(read_run(finished_run))).text
    assert "No round has ended yet." in text
    assert "baffle run --resume" in text


def test_commands_are_quoted_for_a_shell(tiny: Callable[..., Plan], tmp_path: Path) -> None:
    folder = tmp_path / "my run; rm -rf x"
    simulate(tiny(), folder)
    assert f"baffle verify '{folder}'" in _elements(_page(read_run(folder))).text


def lied_run(folder: Path, tiny: Callable[..., Plan]) -> RunRecord:
    """A run whose plan, journal and summary hold HTML wherever they hold text."""
    simulate(tiny(f"name={LIE!r}"), folder)
    with sqlite3.connect(folder / "journal.sqlite") as db:
        record = json.loads(db.execute("SELECT record FROM metrics WHERE round = 2").fetchone()[0])
        record |= {"refusals": 2, "refused": [f"client 1: {LIE}", LIE], "test_domains": {LIE: {LIE: 0.5}}}
        record |= {f"test_{LIE}": 0.25}
        db.execute("UPDATE metrics SET record = ? WHERE round = 2", (json.dumps(record),))
        db.execute("UPDATE participation SET event = ? WHERE round = 2 AND client = 1", (LIE,))
        db.execute("UPDATE run SET versions = ?", (json.dumps({LIE: LIE}),))
    db.close()
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps(summary | {"weights_sha256": LIE, "peak_rss_mb": LIE}))
    return read_run(folder)


def test_html_in_a_plan_a_refusal_or_a_metric_stays_text(tiny: Callable[..., Plan], tmp_path: Path) -> None:
    honest = tmp_path / "honest"
    simulate(tiny(), honest)
    expected = _elements(_page(read_run(honest)))
    page = _page(lied_run(tmp_path / "lie", tiny))
    elements = _elements(page)
    assert len(elements.named("script")) == len(expected.named("script")) == 3
    assert not elements.named("img")
    assert not elements.named("a")
    assert not any(name.startswith("on") for _, attributes in elements.found for name in attributes)
    assert "alert(1)" in elements.text
    assert "client 1: <b>b</b><a href=//x>a</a><script>alert(1)</script>" in elements.text
    assert page.count("<title>") == page.count("</title>") == 1


@given(st.text(), st.text())
def test_no_text_leaves_its_element(content: str, value: str) -> None:
    elements = _elements(element("p", content, title=value))
    assert len(elements.found) == 1
    assert elements.found[0][0] == "p"
    plain = content.replace("\r\n", "\n").replace("\r", "\n").replace("\0", "")
    assert plain in elements.text.replace("\r\n", "\n").replace("\r", "\n").replace("\0", "")


@given(st.dictionaries(st.text(), st.text()))
def test_no_data_ends_its_block(data: dict[str, str]) -> None:
    block = data_block("data", data)
    assert block.count("</") == 1
    assert "<!--" not in block
    assert json.loads(block.partition(">")[2].rpartition("</script>")[0]) == data


def test_html_is_not_escaped_twice() -> None:
    assert element("p", element("b", "a & b"), Html("<i>")) == "<p><b>a &amp; b</b><i></p>"
    assert element("input", type="radio", checked=True, disabled=False) == '<input type="radio" checked>'


@pytest.mark.parametrize(
    ("numbers", "words"),
    [([], ""), ([3], "3"), ([1, 2, 3, 7], "1–3, 7"), (list(range(1, 40, 2)), "1, 3, 5, 7, 9, 11, 13, 15, and 12 more")],
)
def test_ranges(numbers: list[int], words: str) -> None:
    assert ranges(numbers) == words


def test_own_data_are_not_run_for_a_report(tiny: Callable[..., Plan], finished_run: Path) -> None:
    """A folder may be a stranger's, and its plan may name any function."""
    plan = (finished_run / "plan.toml").read_text()
    (finished_run / "plan.toml").write_text(plan.replace('data = "digits"', 'data = "os:abort"'))
    (finished_run / "journal.sqlite").unlink()
    partition = partition_of(read_run(finished_run))
    assert partition.holdings == ()
    assert "os:abort, which is not run" in partition.missing
    assert tiny().task.data == "digits"


def test_data_that_a_program_gave_are_not_looked_for(finished_run: Path) -> None:
    plan = (finished_run / "plan.toml").read_text()
    (finished_run / "plan.toml").write_text(plan.replace('data = "digits"', f'data = "given:{"0" * 64}"'))
    (finished_run / "journal.sqlite").unlink()
    text = _elements(_page(read_run(finished_run))).text
    assert "A program gave the data as objects" in text
    assert "lenet on" not in text
    assert "0" * 64 not in text.partition("Settings")[0]
    assert "baffle run " not in text
