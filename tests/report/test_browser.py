"""Reports of real runs in a real browser."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from baffle.grid.sweep import sweep
from baffle.plan import Plan
from baffle.report.charts import AXES
from baffle.report.live import LivePage, LiveRun
from baffle.report.page import script_name, write_report
from baffle.report.sweep import write_sweep
from baffle.server.recorder import Progress
from baffle.simulation import add_baseline, simulate
from tests.report.test_page import LIE, lied_run
from tests.support.browser import Page, browsing, installed

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not installed(), reason="needs a browser: scripts/browser installs Debian's Chromium"),
]

MARKS = """
[...document.querySelectorAll(".plot")].map((plot) => [
  plot.id,
  plot.querySelectorAll(".scatterlayer .js-line, .scatterlayer .point, .barlayer .point path, .hm image").length,
])
"""
TAB, ENTER, RIGHT = ("Tab", 9), ("Enter", 13, "\r"), ("ArrowRight", 39)


@pytest.fixture(scope="module")
def runs(tiny: Callable[..., Plan], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A run with a baseline, and one with dropouts and another partition."""
    folder = tmp_path_factory.mktemp("browser") / "runs"
    settings = ("run.evaluate_every=5", "rounds=40", "probe.k=30")
    simulate(tiny(*settings, "name=plain"), folder / "plain")
    add_baseline(folder / "plain")
    uneven = ("federation.dropout=0.3", "secure.mode=on", "federation.clients=6", "federation.partition=dirichlet")
    simulate(tiny(*settings, *uneven, "name=uneven"), folder / "my run")
    return [folder / "plain", folder / "my run"]


@pytest.fixture(scope="module")
def reports(runs: list[Path]) -> dict[str, str]:
    """Addresses of the report of each run, of both side by side, and of one that stands alone."""
    alone = write_report(runs[:1], runs[0].parent.parent / "alone.html", standalone=True)
    pages = {"one": write_report(runs[:1]), "other": write_report(runs[1:]), "both": write_report(runs), "alone": alone}
    return {name: page.resolve().as_uri() for name, page in pages.items()}


@pytest.fixture(scope="module")
def browser() -> Iterator[Page]:
    with browsing() as page:
        yield page


@pytest.fixture
def page(browser: Page) -> Page:
    browser.problems.clear()
    browser.requests.clear()
    return browser


@pytest.mark.parametrize("name", ["one", "other", "both", "alone"])
def test_it_opens_without_an_error_every_chart_has_marks_and_nothing_is_fetched(
    page: Page, reports: dict[str, str], name: str
) -> None:
    page.open(reports[name])
    marks = page.eval(MARKS)
    assert len(marks) >= 6
    for axis in AXES:
        page.eval(f"document.querySelector('input[value={axis}]').click()")
        assert all(count for _, count in page.eval(MARKS)), (axis, page.eval(MARKS))
    assert page.problems == []
    assert all(request.startswith(("file:", "data:")) for request in page.requests)
    assert not any("http" in request[:10] for request in page.requests)


@pytest.mark.parametrize("name", ["one", "both"])
@pytest.mark.parametrize("width", [360, 768, 1200])
def test_it_fits_its_window(page: Page, reports: dict[str, str], name: str, width: int) -> None:
    page.open(reports[name], width=width, height=740)
    page.open_details()
    assert page.eval("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    assert page.eval("[...document.querySelectorAll('.plot')].every((plot) => plot.clientWidth > 250)")


def test_the_map_of_a_partition_has_a_scale(page: Page, reports: dict[str, str]) -> None:
    page.open(reports["one"])
    page.open_details()
    scales = page.eval("[...document.querySelectorAll('.colorbar')].map((bar) => bar.textContent)")
    assert scales
    assert all(scale.endswith("samples") for scale in scales), scales


BROKEN = """(() => {
    const walker = document.createTreeWalker(document.querySelector('main') || document.body, NodeFilter.SHOW_TEXT);
    const found = [];
    for (let node = walker.nextNode(); node; node = walker.nextNode())
        for (const word of node.data.matchAll(/[A-Za-z]{3,20}/g)) {
            const range = document.createRange();
            range.setStart(node, word.index);
            range.setEnd(node, word.index + word[0].length);
            const tops = [...range.getClientRects()].map((box) => Math.round(box.top));
            if (new Set(tops).size > 1) found.push(word[0] + ' in ' + node.data.trim().slice(0, 60));
        }
    return found;
})()"""
"""The words of letters alone that stand on two lines."""


@pytest.mark.parametrize("name", ["one", "both"])
@pytest.mark.parametrize("width", [360, 768, 1200])
def test_no_word_is_broken_in_the_middle(page: Page, reports: dict[str, str], name: str, width: int) -> None:
    page.open(reports[name], width=width, height=740)
    page.open_details()
    assert page.eval(BROKEN) == []
    page.eval("document.body.appendChild(document.createElement('style')).textContent = '* {word-break: break-all}'")
    assert page.eval(BROKEN), "the look at words would notice"


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("name", ["one", "other", "both"])
def test_contrast_suffices(page: Page, reports: dict[str, str], name: str, dark: bool) -> None:
    page.open(reports[name], dark=dark)
    assert page.eval("matchMedia('(prefers-color-scheme: dark)').matches") is dark
    page.open_details()
    found = page.eval((Path(__file__).parent / "contrast.js").read_text())
    assert found["count"] > 200
    assert found["low"] == []


def test_the_page_of_a_sweep_opens_without_an_error_and_shades_the_range_of_its_seeds(
    page: Page, tiny: Callable[..., Plan], tmp_path: Path
) -> None:
    sweep(tiny("run.evaluate_every=2"), tmp_path, grid=["update.rate=0.01,0.1"], seeds=[0, 1], jobs=1)
    address = write_sweep(tmp_path).as_uri()
    for width in (360, 1200):
        page.open(address, width=width, height=740)
        assert page.eval("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    for axis in AXES:
        page.eval(f"document.querySelector('input[value={axis}]').click()")
        assert all(count for _, count in page.eval(MARKS))
    assert page.eval("document.querySelectorAll('#chart-loss .fills path').length") == 2
    page.open_details()
    assert page.eval((Path(__file__).parent / "contrast.js").read_text())["low"] == []
    assert page.problems == []


def test_the_test_of_contrast_notices_grey_on_grey(page: Page, reports: dict[str, str]) -> None:
    page.open(reports["one"])
    page.eval("document.querySelector('h1').style.color = '#999'")
    found = page.eval((Path(__file__).parent / "contrast.js").read_text())
    assert [text.partition(":")[0] for text in found["low"]] == ["plain"]


def test_colours_follow_the_system_without_reloading(page: Page, reports: dict[str, str]) -> None:
    page.open(reports["one"])
    line = "document.querySelector('.scatterlayer .js-line').style.stroke"
    light = page.eval(line)
    page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    page.wait(f"{line} !== {light!r}")


def test_everything_can_be_reached_and_used_by_keyboard(page: Page, reports: dict[str, str]) -> None:
    page.open(reports["one"])
    reached = list[str]()
    for _ in range(60):
        page.press(*TAB)
        found = page.eval("(document.activeElement.textContent || document.activeElement.value || '').slice(0, 60)")
        if page.eval("document.activeElement === document.body"):
            break
        assert page.eval("getComputedStyle(document.activeElement).outlineStyle") != "none" or "rounds" in found
        reached.append(found)
    for summary in page.eval("[...document.querySelectorAll('summary')].map((summary) => summary.textContent)"):
        assert summary[:60] in reached
    page.open(reports["one"])
    page.press(*TAB)
    assert page.eval("document.activeElement.value") == "rounds"
    page.press(*RIGHT)
    assert page.eval("document.activeElement.value") == "forwards"
    page.wait("document.querySelector('#chart-loss .xtitle').textContent.includes('forward passes')")
    page.press(*TAB)
    assert page.eval("document.activeElement.tagName") == "SUMMARY"
    page.press(*ENTER)
    page.wait(
        "document.activeElement.parentElement.querySelectorAll('tbody tr').length === 16"
    )  # both lines have their own


def test_tables_hold_the_numbers_of_their_charts(page: Page, reports: dict[str, str]) -> None:
    page.open(reports["other"])
    page.open_details()
    tables = page.eval(
        "[...document.querySelectorAll('figure')].map((figure) => figure.querySelectorAll('tbody tr').length)"
    )
    assert all(tables)
    drawn = page.eval("document.getElementById('chart-loss').data[0].y.length")
    listed = page.eval("document.getElementById('chart-loss').parentElement.querySelectorAll('tbody tr').length")
    assert drawn == listed
    assert 20 < drawn <= 40  # skipped rounds have no loss


def test_a_screen_reader_finds_headings_and_named_charts(page: Page, reports: dict[str, str]) -> None:
    page.open(reports["both"])
    nodes = [node for node in page.call("Accessibility.getFullAXTree")["nodes"] if not node["ignored"]]

    def named(*roles: str) -> list[str]:
        return [n.get("name", {}).get("value", "") for n in nodes if n.get("role", {}).get("value") in roles]

    images, charts = named("image", "img"), page.eval("document.querySelectorAll('.plot').length")
    assert len(images) == charts
    assert all(images)
    assert all(named("heading"))
    assert all(named("region"))
    assert named("radio") == ["rounds", "forward passes", "bytes", "seconds"]


def test_without_its_script_the_page_says_so_and_has_its_tables(page: Page, runs: list[Path], tmp_path: Path) -> None:
    report = write_report(runs[:1], tmp_path / "report.html")
    (tmp_path / script_name()).unlink()
    page.open(report.as_uri())
    assert f"{script_name()} is missing" in page.eval("document.querySelector('.plot').textContent")
    page.eval("document.querySelector('details').open = true")
    page.wait("document.querySelectorAll('details[open] tbody tr').length > 0")


def test_a_lie_in_a_run_does_nothing(page: Page, tiny: Callable[..., Plan], tmp_path: Path) -> None:
    lied_run(tmp_path / "run", tiny)
    page.open(write_report([tmp_path / "run"]).as_uri())
    page.open_details()
    assert page.problems == []
    assert page.eval("document.querySelectorAll('img, a, iframe').length") == 0
    assert page.eval("document.querySelectorAll('script').length") == 3
    assert LIE[:25] in page.eval("document.body.innerText")
    assert page.eval("document.querySelectorAll('.plot svg a').length") == 0
    assert LIE[:25] in page.eval("document.querySelector('#chart-bytes .yaxislayer-above').textContent")


def test_the_page_runs_no_other_script_that_lies_beside_it(page: Page, runs: list[Path], tmp_path: Path) -> None:
    """Attack N14, in a browser: neither under the name of the page's own script nor under any other."""
    (tmp_path / script_name()).write_text("window.stranger = 1;")
    (tmp_path / "other.js").write_text("window.stranger = 1;")
    page.open(write_report(runs[:1], tmp_path / "report.html").as_uri())
    added = (
        "Object.assign(document.createElement('script'), {src: 'other.js', onload: () => go(1), onerror: () => go(0)})"
    )
    assert page.eval(f"new Promise((go) => document.body.append({added}))") == 0
    assert page.eval("[typeof stranger, typeof Plotly].join()") == "undefined,object"


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_the_page_could_not_tell_anybody_if_it_wanted_to(page: Page, reports: dict[str, str], scheme: str) -> None:
    page.open(reports["one"])
    sent: Any = page.eval(f"fetch('{scheme}://127.0.0.1:9/').then(() => 'sent', () => 'not sent')")
    assert sent == "not sent"
    assert any("Content Security Policy" in problem for problem in page.problems)


def test_a_live_page_follows_a_run(page: Page, tiny: Callable[..., Plan], tmp_path: Path) -> None:
    """The run waits until the page has shown its first rounds, so that it cannot end before."""
    shown, folder = Event(), tmp_path / "run"
    plan = tiny("rounds=40", "secure.mode=on", "run.commit_seconds=0", "run.evaluate_every=10")

    def wait_for_the_page(progress: Progress) -> None:
        assert progress.rounds_done < 20 or shown.wait(60)

    with ThreadPoolExecutor() as pool:
        run = pool.submit(simulate, plan, folder, watch=wait_for_the_page)
        while not (folder / "plan.toml").exists():
            assert not run.done(), run.result()
            time.sleep(0.02)
        with LivePage(LiveRun(folder), 0) as server, ExitStack() as always:
            pool.submit(server.serve_forever, 0.01)
            always.callback(server.shutdown)  # whatever fails, the pool must not wait for ever
            always.callback(shown.set)
            page.open(server.address)
            drawn = "(document.getElementById('chart-loss').data[0] || {x: [0]}).x.at(-1)"
            page.wait(f"{drawn} > 1")
            table = "document.getElementById('chart-loss').parentElement.querySelector('details')"
            page.eval(f"{table}.open = true")
            first = page.eval(drawn)
            shown.set()
            page.wait(f"{drawn} > {first}")
            page.wait("document.getElementById('live').textContent === 'The run has ended.'")
            assert page.eval("document.querySelector('.pill').textContent") == "finished"
            assert page.eval(f"{table}.open")
            assert page.problems == []
            assert all(request.startswith((server.address, "data:")) for request in page.requests)
            page.open("about:blank")
        run.result()
