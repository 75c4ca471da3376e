"""Pages of real runs, and of plans and servers that lie; where they are written, and the command that writes them."""

import json
import re
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, strategies as st

from baffle.errors import PageError
from baffle.plan import Plan
from baffle.report.charts import partition_of
from baffle.report.page import Scripts, content_of, drawing_script, render, script_name, write_report
from baffle.report.record import RunRecord, read_run
from baffle.report.sections import Html, as_written, data_block, element, state_words
from baffle.report.words import duration
from baffle.simulation import simulate

Cli = Callable[..., subprocess.CompletedProcess[str]]

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
    elements, charts = _elements(page), _data(page)["charts"]
    assert len(page) < 45_000
    for heading in content_of([run], [partition_of(run)]).sections:
        assert heading in elements.text
    assert f"{run.summary['test_accuracy']:.2%}" in elements.text
    assert run.summary["weights_sha256"] in elements.text
    assert f"baffle verify {finished_run}" in elements.text
    assert "The server refused nothing." in elements.text
    assert {chart["kind"] for chart in charts} == {"lines", "bars", "heat"}
    ids = {attributes.get("id") for _, attributes in elements.found}
    assert {f"{chart['id']}{end}" for chart in charts for end in ("", "-title")} <= ids
    assert page.count("<summary>Numbers: ") == len(charts) == 6


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
    (word,) = [script["nonce"] for script in elements.named("script") if "nonce" in script]
    allowed = policy.partition("script-src ")[2].partition(";")[0].split()
    assert [source.partition("-")[0] for source in allowed] == ["'sha256", "'nonce"]
    assert allowed[1] == f"'nonce-{word}'"
    assert str(word) not in _page(read_run(finished_run)), "another page has another word"
    assert not re.findall(r"https?://", page)


def test_several_runs_stand_side_by_side_with_what_differs_under_headings_in_order(
    tiny: Callable[..., Plan], finished_run: Path, tmp_path: Path
) -> None:
    more = ("probe.k=9", "federation.dropout=0.3", "secure.mode=on", "federation.clients=5")
    simulate(tiny(*more, "name=other"), tmp_path / "other")
    shutil.copytree(tmp_path / "other", tmp_path / "again")
    run, other, again = (read_run(folder) for folder in (finished_run, tmp_path / "other", tmp_path / "again"))
    page = _page(run, other)
    settings = page.partition('id="part-settings"')[2].partition("</section>")[0]
    assert "probe.k" in settings
    assert "update.rate" not in settings
    assert "2 runs side by side" in _elements(page).text
    assert [line["name"] for line in _data(page)["lines"]] == ["tiny", "other"]
    for several in (_page(run), page):
        levels = [int(tag[1]) for tag, _ in _elements(several).found if re.fullmatch(r"h\d", tag)]
        assert levels[0] == 1
        assert levels.count(1) == 1
        assert all(after <= before + 1 for before, after in pairwise(levels))
    page = _page(other, again)  # runs of one name are told apart by their folders
    assert [line["name"] for line in _data(page)["lines"]] == ["other (other)", "other (again)"]
    assert page.count('id="part-partition-') == 1  # both have the same


def test_a_comparison_begins_with_what_differs_and_takes_seeds_together(
    tiny: Callable[..., Plan], tmp_path: Path
) -> None:
    for name, settings in {
        **{f"seed-{seed}": [f"seed={seed}"] for seed in range(3)},
        "other": ["update.betas=[0.5, 0.75]", "federation.partition=dirichlet", "federation.floor_samples=1"],
    }.items():
        simulate(tiny("rounds=2", f"name={name}", *settings), tmp_path / name)
    runs = [read_run(tmp_path / name) for name in ("seed-0", "seed-1", "seed-2", "other")]
    page = _page(*runs)
    text = " ".join(_elements(page).text.split())
    assert "4 runs side by side, which differ in name, seed, federation.partition" in text
    assert page.index("What differs") < page.index('id="part-overview"')
    assert page.count(">update.betas<") == 1
    assert "0.5, 0.75" in text
    assert "(0.5" not in text
    grouped = page.partition('id="part-seeds"')[2].partition("</table>")[0]
    values = [run.last("test_accuracy") or 0 for run in runs[:3]]
    for value in (sum(values) / 3, min(values), max(values)):
        assert f"{value:.2%}" in grouped
    assert grouped.count("<tr>") == 3  # the head, the three seeds, and the other run
    assert "Over seeds" not in _page(runs[0], runs[3])


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        *[((0.9, 0.99), "0.9, 0.99"), (((8, 16), (1,)), "8, 16; 1"), ((), "none"), (True, "yes"), (False, "no")],
        *[(({"k": 20, "share": 0.3},), "k = 20, share = 0.3"), ("iid", "iid"), ("", "“”"), (0.01, "0.01")],
    ],
)
def test_settings_are_written_as_people_write_them(value: object, shown: str) -> None:
    assert as_written(value) == shown


def test_a_run_that_goes_on_says_how_long_it_still_takes(finished_run: Path) -> None:
    run = read_run(finished_run)
    plan = msgspec.structs.replace(run.plan, rounds=10 * run.rounds_done)
    going_on = replace(run, plan=plan, state="going on")
    assert going_on.seconds_left == pytest.approx(9 * run.seconds)
    assert f"rounds, about {duration(9 * run.seconds)} left" in state_words(going_on)
    assert "left" not in state_words(replace(going_on, rounds=()))


def test_a_run_without_rounds_has_a_page_with_commands_that_are_quoted_for_a_shell(
    finished_run: Path, tmp_path: Path
) -> None:
    for name in ("journal.sqlite", "metrics.jsonl", "summary.json"):
        (finished_run / name).unlink()
    folder = finished_run.rename(tmp_path / "my run; rm -rf x")
    text = _elements(_page(read_run(folder))).text
    assert "No round has ended yet." in text
    assert f"baffle run --resume '{folder}'" in text


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
    page = _page(lied_run(tmp_path / "lie", tiny))
    elements = _elements(page)
    assert len(elements.named("script")) == 3
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


def test_own_data_are_not_run_for_a_report_and_those_of_a_program_are_not_looked_for(finished_run: Path) -> None:
    """The folder may come from an untrusted source, and its plan may name any function."""
    plan = (finished_run / "plan.toml").read_text()
    (finished_run / "journal.sqlite").unlink()
    (finished_run / "plan.toml").write_text(plan.replace('data = "digits"', 'data = "os:abort"'))
    partition = partition_of(read_run(finished_run))
    assert partition.holdings == ()
    assert "os:abort, which is not run" in partition.missing
    (finished_run / "plan.toml").write_text(plan.replace('data = "digits"', f'data = "given:{"0" * 64}"'))
    text = _elements(_page(read_run(finished_run))).text
    assert "A program gave the data as objects" in text
    assert "lenet on" not in text
    assert "0" * 64 not in text.partition("Settings")[0]
    assert "baffle run " not in text


def test_a_report_lies_in_its_run_s_folder_with_the_script_beside_it_or_shared_in_runs(
    finished_run: Path, tmp_path: Path
) -> None:
    page = write_report([finished_run])
    assert page == finished_run / "report.html"
    assert (finished_run / script_name()).read_bytes() == drawing_script().read_bytes()
    assert f'src="{script_name()}"' in page.read_text()
    (finished_run / script_name()).unlink()
    runs = tmp_path / "runs"
    runs.mkdir()
    folder = finished_run.rename(runs / "mine")
    page = write_report([folder])
    assert not (folder / script_name()).exists()
    assert (runs / script_name()).exists()
    assert f'src="../{script_name()}"' in page.read_text()


def test_a_standalone_report_holds_its_script_and_one_that_cannot_be_written_is_one_line(
    finished_run: Path, tmp_path: Path
) -> None:
    page = write_report([finished_run], tmp_path / "page.html", standalone=True)
    assert {file.name for file in tmp_path.iterdir()} == {"page.html", finished_run.name}
    text = page.read_text()
    assert drawing_script().read_text() in text
    assert "src=" not in text.partition("<body")[2].partition("<script>")[0]
    assert " file:" not in text.partition("<title>")[0]
    with pytest.raises(PageError, match="cannot be written"):
        write_report([finished_run], page / "page.html")


def test_the_command_writes_a_report_and_so_does_a_run(
    cli: Cli, finished_run: Path, tiny_toml: Path, tmp_path: Path
) -> None:
    done = cli("report", finished_run, "--out", tmp_path / "page.html")
    assert (done.returncode, done.stdout) == (0, f"report: {tmp_path / 'page.html'}\n")
    assert cli("report", finished_run, "--quiet").stdout == ""
    assert (finished_run / "report.html").exists()
    nothing = cli("report", tmp_path / "nothing")
    assert nothing.returncode == 2
    assert nothing.stderr.startswith("error: ")
    assert "holds no run" in nothing.stderr
    done = cli("run", tiny_toml, "--out", tmp_path / "run")
    assert done.stdout.splitlines()[-1].split() == ["report", str(tmp_path / "run" / "report.html")]
    assert (tmp_path / "run" / "report.html").exists()
    cli("run", tiny_toml, "--out", tmp_path / "for-a-script", "--json")
    assert not (tmp_path / "for-a-script" / "report.html").exists()


def test_without_plotly_a_run_says_what_to_install_and_a_report_is_refused(
    cli: Cli, tiny_toml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    monkeypatch.setattr("baffle.report.page.find_spec", lambda _name: None)
    done = cli("run", tiny_toml, "--out", tmp_path / "run")
    assert done.returncode == 0
    assert "pip install 'baffle[report]'" in done.stderr
    refused = cli("report", tmp_path / "run")
    assert refused.returncode == 2
    assert refused.stderr == "error: this command needs plotly: pip install 'baffle[report]'\n"
