"""A page as HTML, which looks like the reports of runs and asks the network for nothing."""

import base64
from collections.abc import Mapping, Sequence
from typing import Any

from baffle.paper.target import Finished, Result, Target
from baffle.report.markup import Html, element
from baffle.report.page import document
from baffle.report.sections import table


def html_page(
    target: Target,
    result: Result,
    rows: Sequence[Sequence[str]],
    made_by: str,
    runs: Mapping[str, Finished],
    figure: bytes | None,
) -> str:
    """The page of a target. `rows` is its table as people read it, and `figure` a PNG."""
    numbers = [place for place in range(1, len(result.columns)) if _is_numeric(result, place)]
    body = [
        element("h1", target.name),
        element("p", target.about, class_="lead"),
        element("section", table(list(result.columns), rows, target.about, numbers=numbers)),
        *(element("p", note) for note in result.notes),
        _figure(figure, target.about) if figure else "",
        element("h2", "Origin"),
        element("p", made_by),
        _runs(runs) if runs else "",
    ]
    return document(f"{target.name} · BAFFLE", body, "default-src 'none'; style-src 'unsafe-inline'; img-src data:")


def _is_numeric(result: Result, place: int) -> bool:
    return all(row[place] is None or isinstance(row[place], (int, float)) for row in result.rows)


def _figure(png: bytes, about: str) -> Html:
    source = f"data:image/png;base64,{base64.b64encode(png).decode()}"
    return element("figure", element("img", src=source, alt=about, class_="picture"), class_="wide")


def _runs(runs: Mapping[str, Finished]) -> Html:
    rows: list[list[Any]] = [
        [name, element("code", str(run.summary["plan_digest"])[:16]), run.origin.date, run.origin.commit]
        for name, run in runs.items()
    ]
    return table(["run", "plan", "date", "commit"], rows, "The runs behind the table")
