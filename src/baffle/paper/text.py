"""The text of a page, as Markdown and as HTML: from its JSON and its figure alone."""

import base64
import io
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from baffle.paper.rates import COLUMNS, Search
from baffle.paper.target import SCALES, Cell, row_of
from baffle.report.page import document
from baffle.report.sections import Content, element, table as html_table
from baffle.report.words import SCALARS, duration


def made_by(content: Mapping[str, Any]) -> str:
    """The commands that build a page, its date, and the commit of the source."""
    only, options = content.get("only", ()), content.get("options", {})
    groups = dict[str, list[str]]()
    for row in only or options or [""]:
        groups.setdefault(options.get(row, ""), []).append(row)
    commands = list[str]()
    for how, rows in groups.items():
        named = [row_of(row) for row in rows] if only or len(groups) > 1 else []
        chosen = "".join(f" --only {shlex.quote(row)}" for row in named)
        commands.append(f"`baffle paper {content['target']} --scale {content['scale']}{how}{chosen}`")
    return f"{' and '.join(commands)}, {content['date']}, commit {content['commit']}"


def time_of(content: Mapping[str, Any]) -> str:
    """How long the runs and the trials of a page took; empty for a page that keeps no runs."""
    runs = [run["summary"].get("seconds", 0.0) for run in content.get("runs", {}).values()]
    trials = [trial["seconds"] for search in content.get("searches", {}).values() for trial in search["trials"]]
    if not runs:
        return ""
    before = f", {len(trials)} trials before them {duration(sum(trials))}" if trials else ""
    return f"{len(runs)} {'runs' if len(runs) > 1 else 'run'} took {duration(sum(runs))}{before}, added up."


def _scalars(run: Mapping[str, Any]) -> str:
    """Where a run's scalars came from; empty for runs of older versions, which do not tell."""
    kind = run.get("scalars") or SCALARS.get(run["summary"].get("estimator", ""), "")
    return f"scalars {kind}" if kind in ("probed", "drawn") else kind


def _origins(content: Mapping[str, Any]) -> list[list[str]]:
    """For each run behind the table: its name, its scalars, its plan, its date and its commit. Old pages keep no runs,
    and tell their plans alone."""
    runs = content.get("runs", {})
    if not runs:
        return [[name, f"plan {digest[:16]}"] for name, digest in content["plans"].items()]
    return [
        [
            name,
            _scalars(runs[name]),
            f"plan {digest[:16]}",
            runs[name]["origin"]["date"],
            f"commit {runs[name]['origin']['commit']}",
        ]
        for name, digest in content["plans"].items()
    ]


def _trials(content: Mapping[str, Any]) -> list[list[Cell]]:
    searches = content.get("searches", {})
    return [search.cells(row) for row, search in msgspec.convert(searches, dict[str, Search]).items()]


def markdown_of(content: Mapping[str, Any], figure: str) -> str:
    """A page in Markdown, from its JSON alone. `figure` is the name of its picture, if there is one."""
    about = content["about"]
    lines = [f"# {content['target']}: {about}", "", table(content["columns"], content["rows"])]
    lines += ["", *(f"{note}\n" for note in content["notes"])]
    lines += [f"![{about}]({figure})", ""] if figure else []
    if trials := _trials(content):
        lines += ["## Trials", "", table(COLUMNS, trials), ""]
    lines += [f"{made_by(content)}.", "", *([f"{time}\n"] if (time := time_of(content)) else [])]
    lines += [f"- `{name}`: {', '.join(filter(None, facts))}" for name, *facts in _origins(content)]
    return "\n".join(lines).rstrip() + "\n"


def html_of(content: Mapping[str, Any], figures: Sequence[bytes]) -> str:
    """The same in the style of a run's report. It fetches nothing from the network. `figures` are drawn on a light and
    on a dark ground."""
    name, about, columns, rows = (content[key] for key in ("target", "about", "columns", "rows"))
    numeric = [place for place in range(1, len(columns)) if not any(isinstance(row[place], str) for row in rows)]
    body: list[Content] = [
        element("h1", name),
        element("p", element("span", SCALES[content["scale"]], class_="pill"), about, class_="lead"),
        element("h2", "Result"),
        html_table(columns, [[*map(_cell, row)] for row in rows], about, numbers=numeric),
        *(element("p", note, class_="about") for note in content["notes"]),
    ]
    if figures:
        light, dark = (f"data:image/png;base64,{base64.b64encode(figure).decode()}" for figure in figures)
        at_night = element("source", srcset=dark, media="(prefers-color-scheme: dark)")
        picture = element("picture", at_night, element("img", src=light, alt=about, class_="picture"))
        body += [element("h2", "Figure"), element("figure", picture, class_="wide")]
    if trials := _trials(content):
        body += [
            element("h2", "Trials"),
            html_table(COLUMNS, [[*map(_cell, row)] for row in trials], "Trials of rates"),
        ]
    body.append(element("h2", "Origin"))
    if origins := _origins(content):
        head = ("run", "scalars", "plan", "date", "commit")
        body.append(html_table(head, origins, "The runs behind the table"))
    made = f"Made by BAFFLE {content['version']}: {made_by(content).replace('`', '')}. {time_of(content)}"
    body.append(element("footer", element("p", made)))
    return document(f"{name} · BAFFLE", body, "default-src 'none'; style-src 'unsafe-inline'; img-src data:")


def table(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """A Markdown table."""
    head, *texts = ["| " + " | ".join(map(_cell, row)) + " |" for row in (columns, *rows)]
    return "\n".join([head, "|" + "---|" * len(columns), *texts])


def _cell(cell: Cell) -> str:
    if isinstance(cell, float):
        return f"{cell:.2f}"
    return "–" if cell is None else f"{cell:,}" if isinstance(cell, int) else cell


INK = {False: ("#1a1d21", "#565e67", "#dfe3e6", "#ffffff"), True: ("#e8eaec", "#a3acb5", "#30363d", "#121518")}
LINES = {
    False: ("#0a6aa8", "#c04e00", "#007a58", "#a2417f", "#7d6300", "#4d4d8f", "#4b535b", "#8a939c"),
    True: ("#62b8ee", "#ff9a56", "#3ccb9d", "#e79bc9", "#e8c547", "#b0b0f0", "#b9c1c9", "#747d87"),
}
"""The colours of a report (report/look.css), by whether its ground is dark: text, muted text, rules, ground; lines."""


def png_of(draw: Callable[[Any], None], *, dark: bool = False) -> bytes:
    import matplotlib as mpl
    from cycler import cycler
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    text, muted, rule, ground = INK[dark]
    style: Any = {
        **{"text.color": text, "axes.labelcolor": muted, "axes.titlecolor": text, "axes.edgecolor": rule},
        **{"xtick.color": muted, "ytick.color": muted, "grid.color": rule, "axes.grid": True, "axes.axisbelow": True},
        **{"axes.spines.top": False, "axes.spines.right": False, "figure.facecolor": ground, "axes.facecolor": ground},
        **{"axes.prop_cycle": cycler(color=LINES[dark]), "font.size": 9, "savefig.facecolor": ground},
    }
    with mpl.rc_context(style):
        figure = Figure(figsize=(7, 4), layout="constrained")
        FigureCanvasAgg(figure)
        draw(figure)
        data = io.BytesIO()
        figure.savefig(data, dpi=120, metadata={"Software": None})
    return data.getvalue()
