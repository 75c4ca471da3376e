"""A page: a target's result as Markdown and HTML to read, JSON to compute with, and a figure. The JSON keeps the runs
behind the rows, so that rows can be added later."""

import io
import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from baffle.errors import PageError
from baffle.files import replace
from baffle.paper.html_page import html_page
from baffle.paper.target import Cell, Finished, Origin, Result, Scale, Target
from baffle.plan import Plan
from baffle.version import __version__


class _Run(msgspec.Struct, frozen=True):
    """A run as a page keeps it. Of its metrics, only rounds with a test accuracy are kept."""

    asked: str
    origin: Origin
    summary: dict[str, Any]
    metrics: list[dict[str, Any]]


class _Page(msgspec.Struct, frozen=True):
    """The part of a page's JSON that is read again. Pages of targets that only measure keep no runs."""

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


def write(
    target: Target,
    scale: Scale,
    result: Result,
    runs: Mapping[str, Finished],
    out: Path,
    origin: Origin,
    only: Sequence[str] = (),
) -> Path:
    """Write NAME-SCALE.md, .html, .json and .png. `only` names the rows on the page; it is empty if all are there."""
    stem = f"{target.name}-{scale}"
    about: dict[str, Any] = {
        "target": target.name,
        "scale": scale,
        "only": list(only),
        **asdict(origin),
        "version": __version__,
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
    text = json.dumps(content, indent=1) + "\n"
    page = _markdown(target, result, about, runs, f"{stem}.png" if result.draw else "")
    figure = {"png": _png(result.draw)} if result.draw else {}
    cells = [[_cell(cell) for cell in row] for row in result.rows]
    html = html_page(target, result, cells, made_by(about).replace("`", ""), runs, figure.get("png"))
    try:
        out.mkdir(parents=True, exist_ok=True)
        for kind, data in {"json": text.encode(), **figure, "html": html.encode(), "md": page.encode()}.items():
            replace(out / f"{stem}.{kind}", data)
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
    """The command that builds a page, the date on which it did, and the commit of the source."""
    only = "".join(f" --only {shlex.quote(name)}" for name in about.get("only", ()))
    command = f"baffle paper {about['target']} --scale {about['scale']}{only}"
    return f"`{command}`, {about['date']}, commit {about['commit']}"


def _markdown(
    target: Target, result: Result, about: Mapping[str, Any], runs: Mapping[str, Finished], figure: str
) -> str:
    lines = [f"# {target.name}: {target.about}", "", table(result.columns, result.rows)]
    lines += ["", *(f"{note}\n" for note in result.notes)]
    lines += [f"![{target.about}]({figure})", ""] if figure else []
    lines += [f"{made_by(about)}.", ""]
    lines += [
        f"- `{name}`: plan {run.summary['plan_digest'][:16]}, {run.origin.date}, commit {run.origin.commit}"
        for name, run in runs.items()
    ]
    return "\n".join(lines).rstrip() + "\n"


def table(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """A Markdown table."""
    return "\n".join([_row(columns), "|" + "---|" * len(columns), *map(_row, rows)])


def _row(cells: Sequence[Cell]) -> str:
    return "| " + " | ".join(_cell(cell) for cell in cells) + " |"


def _cell(cell: Cell) -> str:
    match cell:
        case None:
            return "–"
        case float():
            return f"{cell:.2f}"
        case int():
            return f"{cell:,}"
        case _:
            return cell


def _png(draw: Callable[[Any], None]) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    draw(figure)
    data = io.BytesIO()
    figure.savefig(data, dpi=120, metadata={"Software": None})
    return data.getvalue()
