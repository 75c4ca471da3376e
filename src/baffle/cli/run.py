"""`baffle run`: simulate a federation in this process."""

import json
from datetime import datetime
from functools import partial
from itertools import count
from pathlib import Path

import click

from baffle.cli.options import data_option, json_option, path, plan_argument, quiet_option, set_option
from baffle.errors import PlanError

LONGEST_NAME = 200
"""Bytes of a plan's name that a folder takes over: file systems allow 255, and the time is added to it."""

SHOWN_NAME = 60
"""Characters of a longer name that an error shows."""


@click.command()
@plan_argument
@set_option
@click.option("--out", type=path, help="The run's folder (default: a new one under runs/).")
@click.option("--resume", "resumed", type=path, metavar="DIR", help="Continue the run in DIR.")
@click.option(
    "--as",
    "original",
    type=path,
    metavar="DIR",
    help="Repeat the networked run in DIR: under its statements, with its dropouts, to the same weights.",
)
@data_option
@click.option("--baseline", is_flag=True, help="Also train by backpropagation, into DIR/baseline, and compare.")
@json_option
@quiet_option
def run(
    plan: str | None,
    settings: tuple[str, ...],
    out: Path | None,
    resumed: Path | None,
    original: Path | None,
    data: Path | None,
    baseline: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Simulate a federation. PLAN is a TOML file or a preset's name (default: digits, ten clients, under a minute)."""
    if resumed and (plan or out):
        raise click.UsageError(
            "--resume DIR uses the plan and the folder of that run; give no PLAN and no --out with it"
        )
    if original and (plan or settings or resumed or baseline):
        raise click.UsageError(
            "--as DIR repeats that run as it was; give no PLAN, --set, --resume or --baseline with it"
        )
    from baffle.plan import load

    chosen = None if resumed or original else load(plan or "digits", settings)
    folder = resumed or out or _new_folder(chosen.name if chosen else "run")
    from baffle.cli import show
    from baffle.repetition import repeat
    from baffle.simulation import add_baseline, baseline_of, resume, simulate

    if baseline and chosen:
        baseline_of(chosen)  # refuses a plan that has no baseline, before the run and not after it
    console, remarks = show.consoles()
    console.quiet = quiet or as_json
    remarks.quiet = quiet
    try:
        with show.watching(console, "probing") as watch:
            if original:
                summary = repeat(original, folder, data=data, watch=watch)
            elif chosen is None:
                summary = resume(folder, settings, data=data, watch=watch)
            else:
                summary = simulate(chosen, folder, data=data, watch=watch, warn=partial(show.note, remarks))
        if baseline:
            with show.watching(console, "backpropagation") as watch:
                summary = add_baseline(folder, data=data, watch=watch)
    except KeyboardInterrupt:
        begun = (folder / "plan.toml").exists() and not original
        remedy = f"go on with: baffle run --resume {folder}" if begun else "nothing was begun"
        remarks.print(f"stopped; {remedy}", soft_wrap=True)
        raise click.Abort from None
    if as_json:
        click.echo(json.dumps(summary))
    show.result(console, summary, folder)


def _new_folder(name: str) -> Path:
    """A folder under runs/ that does not exist yet, named after the plan and the time."""
    _require_folder_name(name)
    stem = f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    candidates = (Path("runs") / (f"{stem}-{i}" if i else stem) for i in count())
    return next(path for path in candidates if not path.exists())


def _require_folder_name(name: str) -> None:
    """Refuse a name that leads out of runs/, hides there, or does not fit a file system.

    A plan itself may have any name: the trajectory does not depend on it, and with --out no folder is named after it.
    """
    visible = name.strip() and name.isprintable() and not name.startswith(".")
    if visible and not set(name) & set("/\\") and len(name.encode()) <= LONGEST_NAME:
        return
    shown = repr(name) if len(name) <= SHOWN_NAME else f"{name[:SHOWN_NAME]!r}… ({len(name):,} characters)"
    raise PlanError(
        "name: expected one that can name a folder under runs/ (printable, without / or \\, not beginning with a dot, "
        f"at most {LONGEST_NAME} bytes), got {shown}; change it with --set name=NAME, or choose the folder with --out"
    )
