"""A report: one page of HTML for one run, or for several side by side. It never asks the network for anything."""

import base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

from baffle.errors import one_line
from baffle.report import sections
from baffle.report.charts import attendance_chart, bytes_chart, line_charts, lines_data, partition_chart
from baffle.report.markup import Content, Html, data_block, element, joined
from baffle.report.partition import Partition
from baffle.report.record import RunRecord
from baffle.report.series import AXES
from baffle.version import __version__

ROOM = Path(__file__).parent


@dataclass(frozen=True)
class Shown:
    """What a page says: its parts as HTML, its charts as data, and whether it will say anything else later."""

    parts: dict[str, Html]
    charts: list[dict[str, Any]]
    lines: list[dict[str, Any]]
    over: bool

    def data(self) -> dict[str, Any]:
        return {"charts": self.charts, "lines": self.lines, "axes": AXES, "over": self.over}


def content_of(runs: Sequence[RunRecord], partitions: Sequence[Partition]) -> Shown:
    names = names_of(runs)
    lines = lines_data(runs, names)
    courses = line_charts(runs)
    traffic = bytes_chart(runs, names)
    attended = [attendance_chart(run, place) for place, run in enumerate(runs)]
    held = _distinct(partitions)
    shared = [partition_chart(partition, place) for place, (_, partition) in enumerate(held)]
    several = len(runs) > 1
    known = {axis for axis in AXES if any(axis in line for line in lines)}
    first = [sections.figure(chart, wide=place == 0 and len(courses) % 2 == 1) for place, chart in enumerate(courses)]
    parts = {
        "state": _state(runs),
        "overview": sections.overview(runs, names),
        "axes": sections.axis_switch(known),
        "key": sections.key(runs, names),
        "courses": element("div", first, class_="grid"),
        "domains": sections.domains(runs, names),
        "traffic": sections.figure(traffic, wide=True) if traffic else element("p", "No round has ended yet."),
        "settings": sections.settings(runs, names),
        "origins": sections.origins(runs, names),
    }
    for place, run in enumerate(runs):
        heading = element("h3", sections.named(place, names[place])) if several else Html("")
        chart = attended[place]
        drawn = sections.figure(chart, "h4" if several else "h3", wide=True) if chart else Html("")
        parts[f"attendance-{place}"] = joined([heading, drawn])
        parts[f"clients-{place}"] = sections.attendance(run)
    for place, (whose, partition) in enumerate(held):
        heading = element("h3", ", ".join(names[run] for run in whose)) if len(held) > 1 else Html("")
        chart = shared[place]
        drawn = sections.figure(chart, "h4" if len(held) > 1 else "h3", wide=True) if chart else Html("")
        parts[f"partition-{place}"] = joined([heading, sections.partition_words(partition), drawn])
    charts = [chart for chart in (*courses, traffic, *attended, *shared) if chart]
    return Shown(parts, charts, lines, all(run.state == "finished" for run in runs))


SECTIONS: dict[str, tuple[str, ...]] = {
    "Course": ("axes", "key", "courses", "domains"),
    "Bytes": ("traffic",),
    "Who took part": ("attendance", "clients"),
    "Who holds what": ("partition",),
    "Settings": ("settings",),
    "Origin": ("origins",),
}
"""The headings of a page, and the parts below each. A name stands for all parts that begin with it."""


def render(runs: Sequence[RunRecord], content: Shown, scripts: "Scripts", live: str = "") -> str:
    """The whole page. `live` is where a live page asks for news."""
    title = ", ".join(names_of(runs)) if len(runs) < 4 else f"{len(runs)} runs"
    own = (ROOM / "page.js").read_text()
    body = [
        element("h1", title),
        _part("state", content.parts["state"]),
        element("p", "", id="live", class_="lead", role="status") if live else "",
        _part("overview", content.parts["overview"]),
        *(_section(heading, names, content.parts) for heading, names in SECTIONS.items()),
        _footer(),
    ]
    end = [
        data_block("data", content.data() | ({"parts": content.parts} if live else {})),
        scripts.drawing(),
        element("script", Html(own)),
    ]
    policy = scripts.policy(own, live=bool(live))
    return document(f"{title} · BAFFLE report", body, policy, end, data_live=live or None, data_script=scripts.name)


def document(title: str, body: Content, policy: str, end: Content = (), **attributes: str | None) -> str:
    """A page in this look, which may do no more than its policy allows. `end` comes after what people see."""
    head = [
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="referrer", content="no-referrer"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("title", title),
        element("style", Html((ROOM / "look.css").read_text())),
    ]
    page = element(
        "html",
        element("head", head),
        element("body", element("main", body), end, **attributes),
        lang="en",
    )
    return f"<!doctype html>\n{page}\n"


def _section(heading: str, names: tuple[str, ...], parts: dict[str, Html]) -> Html:
    number = heading.lower().replace(" ", "-")
    chosen = {key: html for key, html in parts.items() if key.rstrip("0123456789").rstrip("-") in names}
    if len(names) > 1 and "clients" in names:  # a run's chart and its tables stand together
        chosen = dict(sorted(chosen.items(), key=lambda item: (int(item[0].rpartition("-")[2]), item[0])))
    inside = [_part(key, html) for key, html in chosen.items()]
    return element("section", element("h2", heading, id=number), inside, aria_labelledby=number)


def _part(name: str, html: Html) -> Html:
    return element("div", html, id=f"part-{name}")


def _footer() -> Html:
    made = f"Made by BAFFLE {__version__} on {datetime.now(UTC):%Y-%m-%d at %H:%M} UTC."
    rounds = "Rounds count from 1 here and in a terminal, from 0 in the journal and in metrics.jsonl."
    return element("footer", element("p", f"{made} {rounds}"))


def _state(runs: Sequence[RunRecord]) -> Html:
    if len(runs) > 1:
        return element("p", f"{len(runs)} runs side by side", class_="lead")
    (run,) = runs
    where = "over a network" if run.networked else "simulated in one process"
    model, named = run.plan.task.model.__struct_config__.tag, one_line(run.plan.task.data, 60)
    data = "data of a program" if run.given else named
    about = f"{model} on {data}, {run.n_weights:,} weights, {where}"
    return element("p", element("span", sections.state_words(run), class_="pill"), about, class_="lead")


def names_of(runs: Sequence[RunRecord]) -> list[str]:
    """A name for each run: its plan's, and that of its folder where plans have the same."""
    plain = [run.name for run in runs]
    return [
        name if plain.count(name) == 1 else f"{name} ({run.folder.resolve().name})"
        for name, run in zip(plain, runs, strict=True)
    ]


def _distinct(partitions: Sequence[Partition]) -> list[tuple[list[int], Partition]]:
    """The different partitions, each with the runs that have it."""
    found: list[tuple[list[int], Partition]] = []
    for place, partition in enumerate(partitions):
        same = next((whose for whose, other in found if other == partition), None)
        if same is None:
            found.append(([place], partition))
        else:
            same.append(place)
    return found


@dataclass(frozen=True)
class Scripts:
    """Where the page finds the script that draws: at an address beside it, or inside."""

    name: str
    source: str = ""
    inline: Callable[[], str] | None = None

    def drawing(self) -> Html:
        if self.inline:
            return element("script", Html(self.inline()))
        return element("script", src=self.source) if self.source else Html("")

    def policy(self, own: str, *, live: bool) -> str:
        """What the page may do: run these scripts, and talk to nobody, or if it is live to whoever served it."""
        hashes = [_hash(own), *([_hash(self.inline())] if self.inline else ["'self'", "file:"])]
        server = "'self'" if live else "'none'"
        return (
            f"default-src 'none'; script-src {' '.join(hashes)}; style-src 'unsafe-inline'; img-src data: blob:; "
            f"connect-src {server}; base-uri 'none'; form-action 'none'"
        )


def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(sha256(script.encode()).digest()).decode()}'"
