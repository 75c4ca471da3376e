"""A report: one HTML page about one run, or about several side by side. It fetches nothing from the network.

It is written into the run's folder. Reports in one folder share the script that draws their charts.
"""

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from hashlib import sha256
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from secrets import token_hex
from typing import Any

from baffle.errors import PageError, one_line
from baffle.files import make_folder, replace
from baffle.report import charts as drawn, sections
from baffle.report.charts import AXES, Partition, partition_of
from baffle.report.record import RunRecord, read_run, read_runs
from baffle.report.sections import Content, Html, data_block, element, joined
from baffle.version import __version__

ROOM = Path(__file__).parent

REPORT, COMPARISON = "report.html", "comparison.html"

RUNS = "runs"  # the folder in which `baffle run` makes run folders; they share one copy of the script there
NO_ROUND = element("p", "No round has ended yet.")


@dataclass(frozen=True)
class Shown:
    """The content of a page: the parts of its top and of each section as HTML, its charts as data, and whether the runs
    have ended. A live page replaces parts by name; names are unique."""

    top: dict[str, Html]
    sections: dict[str, dict[str, Html]]
    charts: list[dict[str, Any]]
    lines: list[dict[str, Any]]
    over: bool

    @property
    def parts(self) -> dict[str, Html]:
        return {name: html for parts in (self.top, *self.sections.values()) for name, html in parts.items()}

    def data(self) -> dict[str, Any]:
        return {"charts": self.charts, "lines": self.lines, "axes": AXES, "over": self.over}


def content_of(runs: Sequence[RunRecord], partitions: Sequence[Partition]) -> Shown:
    names = names_of(runs)
    lines, courses, traffic = drawn.lines_data(runs, names), drawn.line_charts(runs), drawn.bytes_chart(runs, names)
    attended = [drawn.attendance_chart(run, place) for place, run in enumerate(runs)]
    held = _distinct(partitions)
    shared = [drawn.partition_chart(partition, place) for place, (_, partition) in enumerate(held)]
    known = {axis for axis in AXES if any(axis in line for line in lines)}
    first = [sections.figure(chart, wide=place == 0 and len(courses) % 2 == 1) for place, chart in enumerate(courses)]

    def under(heading: Content, chart: dict[str, Any] | None, *, several: bool, words: Content = "") -> Html:
        """A chart below its introduction, under a heading if there are several."""
        figure = sections.figure(chart, "h4" if several else "h3", wide=True) if chart else ""
        return joined([element("h3", heading) if several else "", words, figure])

    origins = [sections.origin(run, name if len(runs) > 1 else "") for run, name in zip(runs, names, strict=True)]
    attendance, holdings = dict[str, Html](), dict[str, Html]()
    for place, run in enumerate(runs):
        heading = sections.named(place, names[place])
        attendance[f"attendance-{place}"] = under(heading, attended[place], several=len(runs) > 1)
        attendance[f"clients-{place}"] = sections.attendance(run)
    for place, (whose, partition) in enumerate(held):
        owners, words = ", ".join(names[run] for run in whose), sections.partition_words(partition)
        holdings[f"partition-{place}"] = under(owners, shared[place], several=len(held) > 1, words=words)
    return Shown(
        top={"state": _state(runs), **_differences(runs, names), "overview": sections.overview(runs, names)},
        sections={
            "Course": {
                "axes": sections.axis_switch(known),
                "key": sections.key(runs, names),
                "courses": element("div", first, class_="grid"),
                "domains": sections.domains(runs, names),
            },
            "Bytes": {"traffic": sections.figure(traffic, wide=True) if traffic else NO_ROUND},
            "Who took part": attendance,
            "Who holds what": holdings,
            **({} if len(runs) > 1 else {"Settings": {"settings": sections.settings(runs, names)}}),
            "Origin": {"origins": joined(origins)},
        },
        charts=[chart for chart in (*courses, traffic, *attended, *shared) if chart],
        lines=lines,
        over=all(run.state == "finished" for run in runs),
    )


def render(runs: Sequence[RunRecord], content: Shown, scripts: "Scripts", live: str = "") -> str:
    """The whole page. `live` is the address from which a live page fetches updates."""
    title = ", ".join(names_of(runs)) if len(runs) < 4 else f"{len(runs)} runs"
    body = [
        element("h1", title),
        _part("state", content.top["state"]),
        element("p", "", id="live", class_="lead", role="status") if live else "",
        *(_part(name, html) for name, html in content.top.items() if name != "state"),
        *(_section(heading, parts) for heading, parts in content.sections.items()),
    ]
    data = content.data() | ({"parts": content.parts} if live else {})
    return drawn_document(f"{title} · BAFFLE report", body, data, scripts, live)


def drawn_document(title: str, body: Content, data: Mapping[str, Any], scripts: "Scripts", live: str = "") -> str:
    """An HTML document whose charts are drawn from data."""
    own = (ROOM / "page.js").read_text()
    made = f"Made by BAFFLE {__version__} on {datetime.now(UTC):%Y-%m-%d at %H:%M} UTC."
    rounds = "Rounds count from 1 here and in a terminal, from 0 in the journal and in metrics.jsonl."
    footer = element("footer", element("p", f"{made} {rounds}"))
    end = [data_block("data", data), scripts.drawing(), element("script", Html(own))]
    policy = scripts.policy(own, live=bool(live))
    return document(title, [body, footer], policy, end, data_live=live or None, data_script=scripts.name)


def document(title: str, body: Content, policy: str, end: Content = (), **attributes: str | None) -> str:
    """An HTML document with this style and content security policy. `end` follows the visible content."""
    head = [
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="referrer", content="no-referrer"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("title", title),
        element("style", Html((ROOM / "look.css").read_text())),
    ]
    content = element("body", element("main", body), end, **attributes)
    return f"<!doctype html>\n{element('html', element('head', head), content, lang='en')}\n"


def _section(heading: str, parts: dict[str, Html]) -> Html:
    number = heading.lower().replace(" ", "-")
    inside = [_part(name, html) for name, html in parts.items()]
    return element("section", element("h2", heading, id=number), inside, aria_labelledby=number)


def _part(name: str, html: Html) -> Html:
    return element("div", html, id=f"part-{name}")


def _differences(runs: Sequence[RunRecord], names: Sequence[str]) -> dict[str, Html]:
    """What a comparison begins with."""
    if len(runs) == 1:
        return {}
    heading = element("h2", "What differs")
    return {"settings": joined([heading, sections.settings(runs, names)]), "seeds": sections.seeds(runs)}


def _state(runs: Sequence[RunRecord]) -> Html:
    if len(runs) > 1:
        keys = sections.differing(runs)
        differ = f", which differ in {', '.join(keys[:4])}{' and more' if len(keys) > 4 else ''}" if keys else ""
        return element("p", f"{len(runs)} runs side by side{differ}", class_="lead")
    (run,) = runs
    where = "over a network" if run.networked else "simulated in one process"
    model = run.plan.task.model.__struct_config__.tag
    data = "data of a program" if run.given else one_line(run.plan.task.data, 60)
    about = f"{model} on {data}, {run.n_weights:,} weights, {where}"
    return element("p", element("span", sections.state_words(run), class_="pill"), about, class_="lead")


def names_of(runs: Sequence[RunRecord]) -> list[str]:
    """A name for each run: its plan's, with its folder's if several plans have the same name."""
    plain = [run.name for run in runs]
    return [run.name if plain.count(run.name) == 1 else f"{run.name} ({run.folder.resolve().name})" for run in runs]


def _distinct(partitions: Sequence[Partition]) -> list[tuple[list[int], Partition]]:
    """The distinct partitions, each with the runs that use it."""
    firsts = [place for place, partition in enumerate(partitions) if partitions.index(partition) == place]
    return [
        ([place for place, other in enumerate(partitions) if other == partitions[first]], partitions[first])
        for first in firsts
    ]


@dataclass(frozen=True)
class Scripts:
    """The script that draws: its name, and its address or the script itself. The page's policy allows a script at an
    address by a random word that stands in both, because browsers compare no hashes of files beside a page."""

    name: str
    source: str = ""
    inline: str = ""
    word: str = field(default_factory=partial(token_hex, 16))

    def drawing(self) -> Html:
        inline, source = self.inline, self.source
        return element("script", Html(inline)) if inline else element("script", src=source, nonce=self.word)

    def policy(self, own: str, *, live: bool) -> str:
        """The page's content security policy: it may run these scripts, and connect to nothing but a live server."""
        digests = [sha256(script.encode()).digest() for script in (own, self.inline) if script]
        hashes = [f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests]
        scripts = " ".join([*hashes, *([] if self.inline else [f"'nonce-{self.word}'"])])
        server = "'self'" if live else "'none'"
        return (
            f"default-src 'none'; script-src {scripts}; style-src 'unsafe-inline'; img-src data: blob:; "
            f"connect-src {server}; base-uri 'none'; form-action 'none'"
        )


def write_report(
    folders: Sequence[Path],
    out: Path | None = None,
    *,
    standalone: bool = False,
    data: Path | None = None,
    own_code: bool = False,
) -> Path:
    """Write the report of one run, or of several side by side, and return its path. It is `report.html` in the run's
    folder, or `comparison.html` beside the first of several, unless `out` names a file."""
    runs = read_runs(tuple(folders)) if len(folders) > 1 else (read_run(folders[0]),)
    partitions = [partition_of(run, data, own_code=own_code) for run in runs]
    page = out or (folders[0] / REPORT if len(folders) == 1 else folders[0].resolve().parent / COMPARISON)
    return write_page(page, lambda scripts: render(runs, content_of(runs, partitions), scripts), standalone=standalone)


def write_page(page: Path, rendered: Callable[["Scripts"], str], *, standalone: bool) -> Path:
    """Write a page and, unless it stands alone, the script beside it."""
    try:
        make_folder(page.parent)
        inside = Scripts(script_name(), inline=drawing_script().read_text()) if standalone else None
        scripts = inside or _beside(page)
        replace(page, rendered(scripts).encode())
    except OSError as fault:
        raise PageError(
            f"the report {page} cannot be written: {fault.strerror or fault}; name another file with --out"
        ) from None
    return page


def drawing_script() -> Path:
    """The path of the script in plotly's package, which is not imported."""
    found = find_spec("plotly")
    if found is None or found.origin is None:
        raise ModuleNotFoundError("No module named 'plotly'", name="plotly")
    return Path(found.origin).parent / "package_data" / "plotly.min.js"


def script_name() -> str:
    """The script's file name. It has the version in it, so that older reports find theirs."""
    return f"plotly-{version('plotly')}.min.js"


def _beside(page: Path) -> Scripts:
    """Write the script: into `runs` for a page in a run folder there, else into the page's own folder. It is always
    written anew, because the folder may come from a stranger, and so may a script that is already there."""
    name, above = script_name(), page.parent.resolve().parent
    place = above if above.name == RUNS else page.parent
    replace(place / name, drawing_script().read_bytes())
    return Scripts(name, source=f"../{name}" if place == above else name)
