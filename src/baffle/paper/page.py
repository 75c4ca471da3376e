"""The page of a target: finishes its runs, then writes the result as Markdown and HTML to read, JSON to compute with,
and a figure. The JSON keeps the runs behind the rows, so that rows can be added later."""

import json
import subprocess
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from baffle import files
from baffle.client.abstaining import Tell
from baffle.errors import DataError, PageError, PlanError
from baffle.grid.job import Failure, Job, Player, Runner
from baffle.grid.plans import name_of, with_seeds
from baffle.grid.play import Watch, play_grid
from baffle.grid.spread import EQUAL
from baffle.grid.sweep import require_success
from baffle.journal.folder import RunFolder
from baffle.paper.rates import Search, search_rates
from baffle.paper.target import DRAWN, Estimator, Finished, Origin, Result, Rows, Scale, Target, row_of, with_drawn
from baffle.paper.text import html_of, markdown_of, png_of
from baffle.plan import Plan, change, load
from baffle.version import __version__


class Onlooker(NamedTuple):
    """Receives progress: of the runs of a page, and of what is measured after them."""

    watching: Callable[[], AbstractContextManager[Watch]]
    telling: Callable[[str], AbstractContextManager[Tell]]


@dataclass(frozen=True)
class Request:
    """What a page is asked to show. `only` chooses the rows whose names contain one of these texts. Each is run with so
    many seeds. With `trials`, its rate is chosen first, by trials of this part of a run. With the estimator "law", rows
    that probe get a twin whose scalars are drawn; both may be on the page."""

    only: Sequence[str] = ()
    estimator: Estimator = "probe"
    seeds: int = 1
    trials: float = 0.0

    def options(self) -> str:
        """The options of `baffle paper` that ask for it, without --only."""
        seeds = f" --seeds {self.seeds}" if self.seeds > 1 else ""
        trials = f" --choose-rates {self.trials:g}" if self.trials else ""
        return f"{' --estimator law' if self.estimator == 'law' else ''}{seeds}{trials}"


MOST_SEEDS = 100  # of a row

NOTE_ON_DRAWN = (
    "Rows whose scalars are drawn probed nothing: each estimate was drawn from the law of K Gaussian directions around "
    "a gradient by backpropagation, so σ, central differences and kinks count for nothing beyond K, and passes and "
    "seconds are those of backpropagation."
)
NOTE_ON_RATES = (
    "Each row's rate was chosen by the same search: runs with another seed, judged on training samples that were held "
    "out from its clients. The test set was not read for it."
)


def build_page(
    target: Target,
    scale: Scale,
    runs: Path,
    out: Path,
    onlooker: Onlooker,
    data: Path | None,
    request: Request | None = None,
    runner: Runner | None = None,
) -> Path:
    """Run a target and write NAME-SCALE.md, .html, .json and .png into `out`.

    What is on the page stays while its plan is the same, and is not run or searched again, even if its folder is gone.
    A finished run of the same plan under `runs` is used as it is, and a stopped one is resumed. A run that fails or
    whose data set is missing is left out, and the page says so; if nothing is left, there is no page.
    """
    request, runner, origin = request or Request(), runner or Player(data), _origin()
    rows = target.plans(scale)
    plans = with_drawn(rows)
    before = read_page(out / f"{target.name}-{scale}.json")
    chosen = _chosen(target.name, _asked(target.name, plans, request.estimator), request.only)

    def play(jobs: list[Job]) -> dict[str, Failure]:
        with onlooker.watching() as watch:
            return play_grid(jobs, runner, watch)

    def folder(plan: Plan) -> Path:
        return runs / f"{target.name}-{scale}-{plan.digest().hex()[:12]}"

    searches, failures = dict[str, Search](), dict[str, Failure]()
    if request.trials:
        searches = {row: search for row in chosen if (search := _known_search(before, row, plans[row], request.trials))}
        asked = {row: plans[row] for row in chosen if row not in searches}
        found, failures = search_rates(asked, partial(target.judged_by, scale), request.trials, folder, play)
        searches |= found
    stay = plans.keys() - (set(chosen) - failures.keys())
    searches |= {row: search for row, search in before.searches.items() if row in stay}
    planned = {row: _at_rate(plan, searches.get(row)) for row, plan in plans.items()}
    kept = {row: kept_runs(before, row, plan) for row, plan in planned.items()}
    jobs = {
        (row, seed): Job(_label(row, seed), plan, folder(plan))
        for row in chosen
        if row not in failures
        for seed, plan in with_seeds(planned[row], range(request.seeds)).items()
        if seed not in kept[row]
    }
    failures |= play([*{job.folder: job for job in jobs.values()}.values()])
    shown = dict[str, list[Finished]]()
    for row, by_seed in kept.items():
        by_seed |= {seed: _read(job, origin) for (of, seed), job in jobs.items() if of == row and job.is_done}
        if by_seed:
            shown[row] = [by_seed[seed] for seed in sorted(by_seed)]
    if not shown and (lacking := [failure for failure in failures.values() if failure.no_data]):
        raise DataError(lacking[0].words)
    if not shown:
        require_success(failures, len(jobs))
    rest = len(rows.keys() - {row_of(row) for row in (*shown, *chosen)})
    with onlooker.telling(target.name) as tell:
        result = target.result(shown, scale, data, tell)
    page = write(
        target,
        scale,
        replace(result, notes=[*result.notes, *_notes(shown, searches, failures, rest, len(rows))]),
        shown,
        out,
        origin,
        _options(shown, searches),
        searches,
        whole=not rest and len({row_of(row) for row in shown}) == len(shown),
    )
    require_success({name: failure for name, failure in failures.items() if not failure.no_data}, len(jobs))
    return page


def _label(row: str, seed: int) -> str:
    """The name of a run: that of its row alone for the first seed."""
    return name_of(row, seed) if seed else row


def _known_search(page: "Page", row: str, plan: Plan, part: float) -> Search | None:
    """The page's search of a row, if it had trials of this length and the row's plan has not changed."""
    search = page.searches.get(row)
    return search if search and search.part == part and kept_runs(page, row, _at_rate(plan, search)) else None


def _at_rate(plan: Plan, search: Search | None) -> Plan:
    return change(plan, [f"update.rate={search.rate!r}"]) if search else plan


def _options(rows: Rows, searches: Mapping[str, Search]) -> dict[str, str]:
    """The options that bring each row onto a page. Those of the law bring backpropagation, too."""
    probed = any(run.plan.scalars == "probed" for runs in rows.values() for run in runs)
    options = dict[str, str]()
    for row, runs in rows.items():
        estimator: Estimator = "law" if row.endswith(DRAWN) or not (runs[0].plan.scalars or probed) else "probe"
        part = searches[row].part if row in searches else 0.0
        options[row] = Request((), estimator, len(runs), part).options()
    return options


def _notes(
    shown: Rows, searches: Mapping[str, Search], failures: Mapping[str, Failure], rest: int, rows: int
) -> Iterator[str]:
    """The notes below a table that follow from its runs."""
    for reason in dict.fromkeys(failure.words for failure in failures.values()):
        left_out = [name for name, failure in failures.items() if failure.words == reason]
        yield f"Left out: {'; '.join(left_out)} ({reason})."
    if rest:
        yield f"Not asked for: {rest} of {rows} rows."
    if any(len(runs) > 1 for runs in shown.values()):
        yield f"Figures are means over seeds, from 0 on. {EQUAL}"
    if any(run.plan.scalars == "drawn" for runs in shown.values() for run in runs):
        yield NOTE_ON_DRAWN
    if searches.keys() & shown.keys():
        yield NOTE_ON_RATES


def _asked(target: str, plans: Mapping[str, Plan], estimator: Estimator) -> list[str]:
    """The rows of an estimator, and those of backpropagation."""
    left_out = {"probe": "drawn", "law": "probed"}[estimator]
    asked = [name for name, plan in plans.items() if plan.scalars != left_out]
    if estimator == "law" and not any(plan.scalars == "drawn" for plan in plans.values()):
        raise PlanError(
            f"{target} has no row of Gaussian directions at this scale, so none can be drawn; leave --estimator out"
        )
    return asked


def _chosen(target: str, names: Collection[str], only: Sequence[str]) -> list[str]:
    """The rows to run. A text that is a row's whole name chooses that row alone, even if other names contain it."""
    if only and not names:
        raise PlanError(f"{target} is measured as a whole; expected no --only")
    whole = {row_of(name).lower() for name in names}

    def is_chosen(name: str, text: str) -> bool:
        return text == name if text in whole else text in name

    chosen = [name for name in names if not only or any(is_chosen(row_of(name).lower(), text.lower()) for text in only)]
    if names and not chosen:
        raise PlanError(f"no row's name contains {' or '.join(only)}; expected a part of one of: {'; '.join(names)}")
    return chosen


def _origin() -> Origin:
    """Today's date, and the commit of the running source, or "unknown" outside a checkout."""
    command = ["git", "-C", str(Path(__file__).resolve().parent), "rev-parse", "--short=12", "HEAD"]
    git = subprocess.run(command, capture_output=True, text=True, check=False)
    return Origin(f"{datetime.now(UTC):%Y-%m-%d}", git.stdout.strip() or "unknown")


def _read(job: Job, origin: Origin) -> Finished:
    """A finished run from its folder."""
    folder = RunFolder(job.folder)
    metrics = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    return Finished(load(str(folder.plan)), folder.read_summary(), metrics, job.plan.digest().hex(), origin)


class _Run(msgspec.Struct, frozen=True):
    """A run as a page keeps it, with metrics of evaluated rounds alone."""

    asked: str
    origin: Origin
    summary: dict[str, Any]
    metrics: list[dict[str, Any]]


class Page(msgspec.Struct, frozen=True):
    """The part of a page's JSON that is read back. Old pages, and those of measurements, keep no runs."""

    runs: dict[str, _Run] = {}
    searches: dict[str, Search] = {}


def read_page(path: Path) -> Page:
    """The runs and searches that a page keeps; none if there is no page yet."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Page)
    except (FileNotFoundError, NotADirectoryError):
        return Page()
    except (OSError, msgspec.DecodeError) as fault:
        raise PageError(
            f"{path} cannot be read as a page: {fault}; move it away or give another --out, finished runs are not lost"
        ) from None


def kept_runs(page: Page, row: str, plan: Plan) -> dict[int, Finished]:
    """The runs that a page keeps of a row, by seed, if the row's plan has not changed."""
    kept = dict[int, Finished]()
    for seed in range(MOST_SEEDS):
        run = page.runs.get(_label(row, seed))
        if run and run.asked == (asked := change(plan, [f"seed={seed}"])).digest().hex():
            kept[seed] = Finished(asked, run.summary, run.metrics, run.asked, run.origin)
    return kept


def write(
    target: Target,
    scale: Scale,
    result: Result,
    rows: Rows,
    out: Path,
    origin: Origin,
    options: Mapping[str, str],
    searches: Mapping[str, Search],
    *,
    whole: bool,
) -> Path:
    """Write NAME-SCALE.md, .html, .json and .png. `options` brings each row onto the page; `whole` says whether these
    are all rows of the target."""
    stem = f"{target.name}-{scale}"
    runs = {_label(row, run.plan.seed): run for row, of_row in rows.items() for run in of_row}
    content: dict[str, Any] = {
        **{
            "target": target.name,
            "about": about_page(target, scale),
            "scale": scale,
            "only": [] if whole else list(rows),
        },
        **{**asdict(origin), "version": __version__, "options": dict(options)},
        "plans": {name: run.summary["plan_digest"] for name, run in runs.items()},
        "weights": {name: run.summary["weights_sha256"] for name, run in runs.items()},
        "columns": list(result.columns),
        "rows": [list(row) for row in result.rows],
        "notes": list(result.notes),
        "data": result.data,
        "runs": {name: _kept(run) for name, run in runs.items()},
        "searches": {row: msgspec.to_builtins(search) for row, search in searches.items() if row in rows},
    }
    figures = [png_of(result.draw, dark=dark) for dark in (False, True)] if result.draw else []
    figure = {"png": figures[0]} if figures else {}
    texts = {
        "json": json.dumps(content, indent=1) + "\n",
        "html": html_of(content, figures),
        "md": markdown_of(content, f"{stem}.png" if figure else ""),
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
    about = {"asked": run.asked, "origin": asdict(run.origin), "scalars": run.scalars}
    return {**about, "summary": run.summary, "metrics": evaluated}


def about_page(target: Target, scale: Scale) -> str:
    """What a page shows, and on which data."""
    data = ", ".join(target.data(scale))
    return f"{target.about}; on {data}" if data else target.about
