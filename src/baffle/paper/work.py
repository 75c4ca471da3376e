"""Carries a target out: runs what is not finished, then writes its table, its data and its figure."""

import json
import subprocess
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from baffle.app.features import Backbones
from baffle.app.recorder import Watch
from baffle.app.simulate import resume, simulate
from baffle.errors import DataError, PlanError
from baffle.paper.target import Cell, Finished, Result, Scale, Target
from baffle.plan import Plan, load
from baffle.version import __version__

Watching = Callable[[str], AbstractContextManager[Watch]]
"""A label → somebody who watches the run of that name."""


def carry_out(
    target: Target,
    scale: Scale,
    runs: Path,
    out: Path,
    watching: Watching,
    data: Path | None,
    only: Sequence[str] = (),
) -> Path:
    """Run a target and write NAME-SCALE.md, .json and .png into `out`. A run of the same plan that is there
    already is gone on with, or taken as it is if it is finished. One whose data is not there is skipped, and the page
    says so; where no run has its data, there is no page. With `only`, runs whose names hold one of these texts."""
    finished, faults, backbones = {}, dict[str, DataError](), Backbones()
    plans = target.plans(scale)
    asked = _asked(plans, only)
    if plans and not asked:
        raise PlanError(f"no row's name holds {' or '.join(only)}; expected a part of one of: {', '.join(plans)}")
    for name in asked:
        with watching(name) as watch:
            plan = plans[name]
            folder = f"{target.name}-{scale}-{plan.digest().hex()[:12]}"
            try:
                finished[name] = _run(runs / folder, plan, watch, data, backbones)
            except DataError as fault:
                faults[name] = fault
    if faults and not finished:
        raise next(iter(faults.values()))
    result = target.result(finished, scale, data)
    rest = [name for name in plans if name not in asked]
    notes = [*result.notes, *_skipped(faults), *([f"Not asked for: {', '.join(rest)}."] if rest else [])]
    return write(target, scale, replace(result, notes=notes), finished, out)


def _asked(names: Collection[str], only: Sequence[str]) -> list[str]:
    """The rows that somebody wants. A text that is the name of a row is that row alone, though other names hold it."""
    exact = {name.lower() for name in names}

    def is_wanted(name: str, text: str) -> bool:
        return text == name if text in exact else text in name

    return [name for name in names if not only or any(is_wanted(name.lower(), text.lower()) for text in only)]


def _skipped(faults: Mapping[str, DataError]) -> list[str]:
    """For each reason, a line that names the rows that are left out for it."""
    reasons = dict.fromkeys(str(fault) for fault in faults.values())
    return [
        f"Left out: {'; '.join(name for name, fault in faults.items() if str(fault) == reason)} ({reason})."
        for reason in reasons
    ]


def _run(path: Path, plan: Plan, watch: Watch, data: Path | None, backbones: Backbones) -> Finished:
    if not (path / "plan.toml").exists():
        simulate(plan, path, data=data, watch=watch, backbones=backbones)
    elif not (path / "summary.json").exists():
        resume(path, data=data, watch=watch)
    lines = (path / "metrics.jsonl").read_text().splitlines()
    summary = json.loads((path / "summary.json").read_text())
    return Finished(load(str(path / "plan.toml")), summary, [json.loads(line) for line in lines])


def write(target: Target, scale: Scale, result: Result, runs: Mapping[str, Finished], out: Path) -> Path:
    out.mkdir(parents=True, exist_ok=True)
    stem = f"{target.name}-{scale}"
    about: dict[str, Any] = {
        "target": target.name,
        "scale": scale,
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "version": __version__,
        "commit": _commit(),
        "plans": {name: run.summary["plan_digest"] for name, run in runs.items()},
        "weights": {name: run.summary["weights_sha256"] for name, run in runs.items()},
    }
    found = {"columns": list(result.columns), "rows": [list(row) for row in result.rows], "notes": list(result.notes)}
    text = json.dumps({**about, **found, "data": result.data}, indent=1)
    (out / f"{stem}.json").write_text(text + "\n")
    if result.draw:
        _draw(result.draw, out / f"{stem}.png")
    page = out / f"{stem}.md"
    page.write_text(markdown(target, result, about, f"{stem}.png" if result.draw else ""))
    return page


def markdown(target: Target, result: Result, about: Mapping[str, Any], figure: str) -> str:
    lines = [f"# {target.name}: {target.about}", "", table(result.columns, result.rows)]
    lines += ["", *(f"{note}\n" for note in result.notes)]
    lines += [f"![{target.about}]({figure})", ""] if figure else []
    made = f"`baffle paper {target.name} --scale {about['scale']}`, {about['date']}, commit {about['commit']}"
    lines += [f"{made}.", ""]
    lines += [f"- `{name}`: plan {digest[:16]}" for name, digest in about["plans"].items()]
    return "\n".join(lines).rstrip() + "\n"


def table(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """As Markdown."""
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


def _draw(draw: Callable[[Any], None], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    draw(figure)
    figure.savefig(path, dpi=120, metadata={"Software": None})


def _commit() -> str:
    """Of the source that runs, where it is a checkout."""
    here = Path(__file__).resolve().parent
    done = subprocess.run(
        ["git", "-C", str(here), "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"
