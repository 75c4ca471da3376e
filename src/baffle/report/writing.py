"""Where reports lie: a page in its run's folder, and the script that draws its charts once beside many of them."""

from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from baffle.errors import PageError
from baffle.files import make_folder, replace
from baffle.report.page import Scripts, content_of, render
from baffle.report.partition import partition_of
from baffle.report.record import read_run, read_runs

REPORT, COMPARISON = "report.html", "comparison.html"

RUNS = "runs"
"""The folder under which `baffle run` puts runs. The script lies there once, for all of them."""


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
    try:
        make_folder(page.parent)
        scripts = _inside() if standalone else _beside(page)
        replace(page, render(runs, content_of(runs, partitions), scripts).encode())
    except OSError as fault:
        raise PageError(
            f"the report {page} cannot be written: {fault.strerror or fault}; name another file with --out"
        ) from None
    return page


def drawing_script() -> Path:
    """The script that draws, as its package has it. The package itself is not imported."""
    found = find_spec("plotly")
    if found is None or found.origin is None:
        raise ModuleNotFoundError("No module named 'plotly'", name="plotly")
    return Path(found.origin).parent / "package_data" / "plotly.min.js"


def script_name() -> str:
    """The script's name beside reports: each version has its own, so that older reports find theirs."""
    return f"plotly-{version('plotly')}.min.js"


def _inside() -> Scripts:
    text = drawing_script().read_text()
    return Scripts(script_name(), inline=lambda: text)


def _beside(page: Path) -> Scripts:
    """Write the script, if it is not there yet: into `runs` for a page in one of the folders there, and else beside the
    page, because nobody expects a file above the folder that he named."""
    source, name = drawing_script(), script_name()
    above = page.resolve().parent.parent
    place = above if above.name == RUNS else page.parent
    target = place / name
    if not target.is_file() or target.stat().st_size != source.stat().st_size:
        replace(target, source.read_bytes())
    return Scripts(name, source=f"../{name}" if place == above else name)
