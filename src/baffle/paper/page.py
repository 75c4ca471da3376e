"""The page of a target: finishes its runs, then writes the result as Markdown and HTML to read, JSON to compute with,
and a figure. The JSON keeps the runs behind the rows, so that rows can be added later."""

import base64
import io
import json
import shlex
import subprocess
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from baffle import files
from baffle.errors import DataError, PageError, PlanError
from baffle.paper.target import SCALES, Cell, Finished, Origin, Result, Scale, Target, Tell
from baffle.plan import Plan, load
from baffle.report.page import document
from baffle.report.sections import Content, element
from baffle.report.sections import table as html_table
from baffle.server.recorder import Watch
from baffle.simulation import resume, simulate
from baffle.task.features import Backbones
from baffle.version import __version__


class Onlooker(NamedTuple):
    """Receives progress. Each field takes the name of a run or a measurement and opens a reporter for it."""

    watching: Callable[[str], AbstractContextManager[Watch]]
    telling: Callable[[str], AbstractContextManager[Tell]]


def build_page(
    target: Target, scale: Scale, runs: Path, out: Path, onlooker: Onlooker, data: Path | None, only: Sequence[str] = ()
) -> Path:
    """Run a target and write NAME-SCALE.md, .json and .png into `out`.

    A finished run of the same plan under `runs` is used as it is, and a stopped one is resumed. A run whose data set is
    missing is skipped, and the page says so; if every run lacks its data, there is no page. `only` chooses the runs
    whose names contain one of these texts. Rows already on the page stay while their plans are the same.
    """
    plans, origin, backbones = target.plans(scale), _origin(), Backbones()
    finished, faults = dict[str, Finished](), dict[str, DataError]()
    for name in _chosen(target.name, plans, only):
        with onlooker.watching(name) as watch:
            folder = f"{target.name}-{scale}-{plans[name].digest().hex()[:12]}"
            try:
                finished[name] = _run(runs / folder, plans[name], watch, data, backbones, origin)
            except DataError as fault:
                faults[name] = fault
    if faults and not finished:
        raise next(iter(faults.values()))
    known = kept_runs(out / f"{target.name}-{scale}.json", plans) | finished
    shown = {name: known[name] for name in plans if name in known}
    skipped = {name: fault for name, fault in faults.items() if name not in shown}
    rest = len(plans) - len(shown) - len(skipped)
    with onlooker.telling(target.name) as tell:
        result = target.result(shown, scale, data, tell)
    notes = list(result.notes)
    for reason in dict.fromkeys(str(fault) for fault in skipped.values()):
        left_out = [name for name, fault in skipped.items() if str(fault) == reason]
        notes.append(f"Left out: {'; '.join(left_out)} ({reason}).")
    if rest:
        notes.append(f"Not asked for: {rest} of {len(plans)} rows.")
    return write(target, scale, replace(result, notes=notes), shown, out, origin, list(shown) if rest else ())


def _chosen(target: str, names: Collection[str], only: Sequence[str]) -> list[str]:
    """The rows to run. A text that is a row's whole name chooses that row alone, even if other names contain it."""
    if only and not names:
        raise PlanError(f"{target} is measured as a whole; expected no --only")
    whole = {name.lower() for name in names}

    def is_chosen(name: str, text: str) -> bool:
        return text == name if text in whole else text in name

    chosen = [name for name in names if not only or any(is_chosen(name.lower(), text.lower()) for text in only)]
    if names and not chosen:
        raise PlanError(f"no row's name contains {' or '.join(only)}; expected a part of one of: {'; '.join(names)}")
    return chosen


def _run(path: Path, plan: Plan, watch: Watch, data: Path | None, backbones: Backbones, origin: Origin) -> Finished:
    if not (path / "plan.toml").exists():
        simulate(plan, path, data=data, watch=watch, backbones=backbones)
    elif not (path / "summary.json").exists():
        resume(path, data=data, watch=watch)
    summary = json.loads((path / "summary.json").read_text())
    metrics = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return Finished(load(str(path / "plan.toml")), summary, metrics, plan.digest().hex(), origin)


def _origin() -> Origin:
    """Today's date, and the commit of the running source, or "unknown" outside a checkout."""
    command = ["git", "-C", str(Path(__file__).resolve().parent), "rev-parse", "--short=12", "HEAD"]
    git = subprocess.run(command, capture_output=True, text=True, check=False)
    return Origin(f"{datetime.now(UTC):%Y-%m-%d}", git.stdout.strip() or "unknown")


class _Run(msgspec.Struct, frozen=True):
    """A run as a page keeps it, with metrics of evaluated rounds alone."""

    asked: str
    origin: Origin
    summary: dict[str, Any]
    metrics: list[dict[str, Any]]


class _Page(msgspec.Struct, frozen=True):
    """The part of a page's JSON that is read back. Old pages, and those of measurements, keep no runs."""

    runs: dict[str, _Run] = {}


def kept_runs(path: Path, plans: Mapping[str, Plan]) -> dict[str, Finished]:
    """The runs that a page keeps and whose plans have not changed. Empty if there is no page yet."""
    try:
        runs = msgspec.json.decode(path.read_bytes(), type=_Page).runs
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, msgspec.DecodeError) as fault:
        raise PageError(
            f"{path} cannot be read as a page: {fault}; move it away or give another --out, finished runs are not lost"
        ) from None
    asked = {name: plan.digest().hex() for name, plan in plans.items()}
    return {
        name: Finished(plans[name], run.summary, run.metrics, run.asked, run.origin)
        for name, run in runs.items()
        if run.asked == asked.get(name)
    }


Runs = Mapping[str, Finished]


def write(
    target: Target, scale: Scale, result: Result, runs: Runs, out: Path, origin: Origin, only: Sequence[str] = ()
) -> Path:
    """Write NAME-SCALE.md, .html, .json and .png. `only` names the rows on the page; it is empty if all are there."""
    stem = f"{target.name}-{scale}"
    about: dict[str, Any] = {
        **{"target": target.name, "scale": scale, "only": list(only), **asdict(origin), "version": __version__},
        "plans": {name: run.summary["plan_digest"] for name, run in runs.items()},
        "weights": {name: run.summary["weights_sha256"] for name, run in runs.items()},
    }
    content = {
        **about,
        "columns": list(result.columns),
        "rows": [list(row) for row in result.rows],
        "notes": list(result.notes),
        "data": result.data,
        "runs": {name: _kept(run) for name, run in runs.items()},
    }
    figures = [_png(result.draw, dark=dark) for dark in (False, True)] if result.draw else []
    figure = {"png": figures[0]} if figures else {}
    texts = {
        "json": json.dumps(content, indent=1) + "\n",
        "html": _html(target, result, about, runs, figures),
        "md": _markdown(target, result, about, runs, f"{stem}.png" if result.draw else ""),
    }
    try:
        out.mkdir(parents=True, exist_ok=True)
        for kind, data in (figure | {kind: text.encode() for kind, text in texts.items()}).items():
            files.replace(out / f"{stem}.{kind}", data)
    except OSError as fault:
        raise PageError(
            f"the page {stem} cannot be written to {out}: {fault.strerror or fault}; finished runs are not lost, so "
            "free some space or give another --out, then run the same command again"
        ) from None
    return out / f"{stem}.md"


def _kept(run: Finished) -> dict[str, Any]:
    evaluated = [line for line in run.metrics if "test_accuracy" in line]
    return {"asked": run.asked, "origin": asdict(run.origin), "summary": run.summary, "metrics": evaluated}


def made_by(about: Mapping[str, Any]) -> str:
    """The command that builds a page, its date, and the commit of the source."""
    only = "".join(f" --only {shlex.quote(name)}" for name in about.get("only", ()))
    command = f"baffle paper {about['target']} --scale {about['scale']}{only}"
    return f"`{command}`, {about['date']}, commit {about['commit']}"


def _markdown(target: Target, result: Result, about: Mapping[str, Any], runs: Runs, figure: str) -> str:
    lines = [f"# {target.name}: {about_page(target, about['scale'])}", "", table(result.columns, result.rows)]
    lines += ["", *(f"{note}\n" for note in result.notes)]
    lines += [f"![{target.about}]({figure})", ""] if figure else []
    lines += [f"{made_by(about)}.", ""]
    lines += [
        f"- `{name}`: plan {run.summary['plan_digest'][:16]}, {run.origin.date}, commit {run.origin.commit}"
        for name, run in runs.items()
    ]
    return "\n".join(lines).rstrip() + "\n"


def _html(target: Target, result: Result, about: Mapping[str, Any], runs: Runs, figures: Sequence[bytes]) -> str:
    """The page in the style of a run's report. It fetches nothing from the network. `figures` are drawn on a light and
    on a dark ground."""
    columns = range(1, len(result.columns))
    numeric = [place for place in columns if not any(isinstance(row[place], str) for row in result.rows)]
    cells = [[_cell(cell) for cell in row] for row in result.rows]
    pill = element("span", SCALES[about["scale"]], class_="pill")
    body: list[Content] = [
        element("h1", target.name),
        element("p", pill, about_page(target, about["scale"]), class_="lead"),
        element("h2", "Result"),
        html_table(result.columns, cells, target.about, numbers=numeric),
        *(element("p", note, class_="about") for note in result.notes),
    ]
    if figures:
        light, dark = (f"data:image/png;base64,{base64.b64encode(figure).decode()}" for figure in figures)
        at_night = element("source", srcset=dark, media="(prefers-color-scheme: dark)")
        picture = element("picture", at_night, element("img", src=light, alt=target.about, class_="picture"))
        body += [element("h2", "Figure"), element("figure", picture, class_="wide")]
    body.append(element("h2", "Origin"))
    if runs:
        plans = [
            [name, element("code", str(run.summary["plan_digest"])[:16]), run.origin.date, run.origin.commit]
            for name, run in runs.items()
        ]
        body.append(html_table(["run", "plan", "date", "commit"], plans, "The runs behind the table", numbers=(2,)))
    made = f"Made by BAFFLE {about['version']}: {made_by(about).replace('`', '')}."
    body.append(element("footer", element("p", made)))
    return document(f"{target.name} · BAFFLE", body, "default-src 'none'; style-src 'unsafe-inline'; img-src data:")


def about_page(target: Target, scale: Scale) -> str:
    """What a page shows, and on which data."""
    data = ", ".join(target.data(scale))
    return f"{target.about}; on {data}" if data else target.about


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


def _png(draw: Callable[[Any], None], *, dark: bool = False) -> bytes:
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
