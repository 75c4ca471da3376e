"""`baffle run`: simulate a federation in this process."""

import json
import shlex
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from baffle.cli.options import data_option, json_option, path, plan_argument, quiet_option, set_option
from baffle.errors import BaffleError

if TYPE_CHECKING:
    from rich.console import Console


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
    if original and (plan or resumed or baseline):
        raise click.UsageError("--as DIR repeats that run as it was; give no PLAN, --resume or --baseline with it")
    from baffle.journal.naming import new_folder
    from baffle.plan import load

    chosen = None if resumed or original else load(plan or "digits", settings)
    folder = resumed or out or new_folder(chosen.name if chosen else "run")
    from baffle.cli import show
    from baffle.cli.progress import watching
    from baffle.repetition import repeat
    from baffle.simulation import add_baseline, require_baseline, resume, simulate

    if baseline and chosen:
        require_baseline(chosen, data)  # before the run and not after it
    console, remarks = show.consoles()
    console.quiet = quiet or as_json
    remarks.quiet = quiet
    try:
        with watching(console, "probing") as watch:
            if original:
                summary = repeat(original, folder, settings, data=data, watch=watch)
            elif chosen is None:
                summary = resume(folder, settings, data=data, watch=watch, warn=partial(show.note, remarks))
            else:
                summary = simulate(chosen, folder, data=data, watch=watch, warn=partial(show.note, remarks))
        if baseline:
            with watching(console, "backpropagation") as watch:
                summary = add_baseline(folder, data=data, watch=watch)
    except KeyboardInterrupt:
        begun = (folder / "plan.toml").exists() and not original
        remedy = f"go on with: baffle run --resume {shlex.quote(str(folder))}" if begun else "nothing was begun"
        remarks.print(f"stopped; {remedy}", soft_wrap=True)
        raise click.Abort from None
    if as_json:
        click.echo(json.dumps(summary))
    else:
        show.result(console, summary, folder, _report(remarks, folder, data))


def _report(remarks: "Console", folder: Path, data: Path | None) -> Path | None:
    """Write the run's report. Without one the run is no less finished."""
    from baffle.report.writing import write_report

    try:
        return write_report([folder], data=data, own_code=True)
    except ModuleNotFoundError as fault:
        if fault.name != "plotly":
            raise
        remarks.print("no report was made: it needs plotly: pip install 'baffle[report]'", soft_wrap=True)
    except BaffleError as fault:
        remarks.print(f"no report was made: {fault}", soft_wrap=True)
    return None
