"""The page of a sweep: each row's mean and range over its seeds, and their course."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from baffle.errors import one_line
from baffle.grid.spread import EQUAL, Spread, letters_of
from baffle.grid.sweep import Sweep, read_sweep
from baffle.report import sections
from baffle.report.charts import AXES, Column, line_charts, series_of
from baffle.report.page import REPORT, Scripts, drawn_document, write_page
from baffle.report.record import RunRecord, number, read_run
from baffle.report.sections import Content, element
from baffle.report.words import SCALARS, duration, measured, metric_name, size

COLUMNS = ("", "scalars", "seeds", "least – most", "equal", "rounds", "forward passes", "bytes up", "time")
LONGEST_NAME = 200

Summaries = Mapping[int, Mapping[str, Any]]  # of one row's finished runs, by seed


def rows_of(sweep: Sweep) -> list[dict[str, Any]]:
    """What each row came to, for programs: its finished seeds, its metric with every seed, and means of its costs."""
    rows, wanted = sweep.summaries(), sweep.rows()
    spreads = {row: _spread(runs) for row, runs in rows.items()}
    letters = dict(zip(rows, letters_of([spread or Spread(()) for spread in spreads.values()]), strict=True))
    return [
        {
            **{"row": row, "seeds": sorted(runs), "asked": len(wanted[row]), "metric": metric_of(runs)},
            **_figures(spreads[row]),
            **{"equal": letters[row], "estimator": _first(runs, "estimator")},
            **{key: _mean(runs, key) for key in ("rounds", "forwards", "uplink_bytes_per_client_round", "seconds")},
        }
        for row, runs in rows.items()
    ]


def metric_of(runs: Summaries) -> str:
    """The most important metric on the test set, such as `test_accuracy`."""
    names = _first(runs, "metrics")
    return f"test_{one_line(str(names[0]), 80)}" if isinstance(names, list) and names else "test_accuracy"


def _first(runs: Summaries, key: str) -> Any:
    return next((summary[key] for summary in runs.values() if key in summary), None)


def _spread(runs: Summaries) -> Spread | None:
    metric = metric_of(runs)
    values = [number(summary.get(metric)) for summary in runs.values()]
    known = tuple(value for value in values if value is not None)
    return Spread(known) if known else None


def _figures(spread: Spread | None) -> dict[str, Any]:
    if spread is None:
        return {"values": [], "mean": None, "least": None, "most": None}
    return {"values": list(spread.values), "mean": spread.mean, "least": spread.least, "most": spread.most}


def _mean(runs: Summaries, key: str) -> float | None:
    values = [number(summary.get(key)) for summary in runs.values()]
    return fmean(known) if (known := [value for value in values if value is not None]) else None


def table_of(sweep: Sweep) -> tuple[list[str], list[list[str]]]:
    """The same for people: columns, and rows of texts."""
    rows = rows_of(sweep)
    metrics = dict.fromkeys(row["metric"] for row in rows if row["values"])
    title = metric_name(next(iter(metrics))) if len(metrics) == 1 else "test metric"
    return [*COLUMNS[:3], f"{title}, mean", *COLUMNS[3:]], [_cells(row) for row in rows]


def _cells(row: Mapping[str, Any]) -> list[str]:
    def shown(value: float | None) -> str:
        return measured(row["metric"], value)

    def count(key: str) -> str:
        return "–" if row[key] is None else f"{row[key]:,.0f}"

    several, up, seconds = len(row["values"]) > 1, row["uplink_bytes_per_client_round"], row["seconds"]
    return [
        one_line(row["row"], LONGEST_NAME),
        SCALARS.get(str(row["estimator"]), "–"),
        f"{len(row['seeds'])}" + (f" of {row['asked']}" if len(row["seeds"]) < row["asked"] else ""),
        shown(row["mean"]),
        f"{shown(row['least'])} – {shown(row['most'])}" if several else "–",
        row["equal"] or "–",
        *(count("rounds"), count("forwards")),
        *("–" if up is None else size(up), "–" if seconds is None else duration(seconds)),
    ]


def write_sweep(folder: Path, out: Path | None = None, *, standalone: bool = False) -> Path:
    """Write the page of the sweep in a folder: `report.html` there, unless `out` names a file."""
    sweep = read_sweep(folder)
    return write_page(out or folder / REPORT, lambda scripts: render(sweep, scripts), standalone=standalone)


def render(sweep: Sweep, scripts: Scripts) -> str:
    columns, cells = table_of(sweep)
    marked = [[sections.named(place, name), *rest] for place, (name, *rest) in enumerate(cells)]
    runs = {row: _finished(folders.values()) for row, folders in sweep.rows().items()}
    lines = [
        {"run": place, "name": cells[place][0], "dash": False, **mean_columns(of_row)}
        for place, of_row in enumerate(runs.values())
        if of_row
    ]
    charts = line_charts(every) if (every := [run for of_row in runs.values() for run in of_row]) else []
    shade = "Means over the seeds; the shade goes from the least to the most."
    name = one_line(sweep.folder.resolve().name)
    body: list[Content] = [
        element("h1", name),
        element("p", _state(sweep, len(every)), class_="lead"),
        element("section", sections.table(columns, marked, "Rows of the sweep", numbers=range(2, len(columns)))),
        element("p", EQUAL),
        element("h2", "Course"),
        sections.axis_switch({axis for axis in AXES if any(axis in line for line in lines)}),
        element(
            "div", [sections.figure(chart | {"about": f"{chart['about']} {shade}"}) for chart in charts], class_="grid"
        ),
        element("h2", "Origin"),
        element("dl", _origin(sweep), class_="facts"),
    ]
    data = {"charts": charts, "lines": lines, "axes": AXES, "over": True}
    return drawn_document(f"{name} · BAFFLE sweep", body, data, scripts)


def _finished(folders: Iterable[Path]) -> list[RunRecord]:
    return [read_run(path, measure=False) for path in folders if (path / "summary.json").is_file()]


def _state(sweep: Sweep, finished: int) -> str:
    rows, runs = len(sweep.rows()), len(sweep.runs)
    ended = "all of them finished" if finished == runs else f"{finished:,} of them finished"
    return f"{rows:,} rows, {runs:,} runs, {ended}"


def _origin(sweep: Sweep) -> Iterator[Content]:
    """The command of the sweep, and the folder of each run."""
    if sweep.command:
        yield [element("dt", "made by"), element("dd", element("code", one_line(sweep.command, 1_000)))]
    for row, folders in sweep.rows().items():
        links = [element("div", element("code", path.name)) for path in folders.values()]
        yield [element("dt", one_line(row, LONGEST_NAME)), element("dd", links)]


def mean_columns(runs: Sequence[RunRecord]) -> dict[str, Column]:
    """The course of one row: at the rounds that all its runs show, the mean of each column; of columns that are
    measured also the least and the most."""
    series = [series_of(run).columns for run in runs]
    places = [{at: place for place, at in enumerate(columns["rounds"])} for columns in series]
    rounds = [at for at in series[0]["rounds"] if all(at in place for place in places)]
    found: dict[str, Column] = {"rounds": rounds}
    for name in series[0]:
        if name == "rounds" or not all(name in columns for columns in series):
            continue
        by_round = [[columns[name][place[at]] for columns, place in zip(series, places, strict=True)] for at in rounds]
        whole = [[value for value in values if value is not None] for values in by_round]
        whole = [values if len(values) == len(runs) else [] for values in whole]
        found[name] = [fmean(values) if values else None for values in whole]
        if name not in AXES and not name.endswith("_last") and len(runs) > 1:
            found[f"{name}_least"] = [min(values, default=None) for values in whole]
            found[f"{name}_most"] = [max(values, default=None) for values in whole]
    return found
