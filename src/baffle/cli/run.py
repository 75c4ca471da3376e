"""`baffle run`: simulate a federation."""

import json
import sys
from datetime import datetime
from itertools import count
from pathlib import Path

import click

from baffle.cli.options import INTERRUPTED, data_option, json_option, path, quiet_option, set_option
from baffle.plan import load


@click.command()
@click.argument("plan", required=False)
@set_option
@click.option("--out", type=path, help="The run's folder (default: a new one under runs/).")
@click.option("--resume", "resumed", type=path, metavar="DIR", help="Go on with the run in DIR.")
@data_option
@click.option("--baseline", is_flag=True, help="Also train by backpropagation, into DIR/baseline, and compare.")
@json_option
@quiet_option
def run(
    plan: str | None,
    settings: tuple[str, ...],
    out: Path | None,
    resumed: Path | None,
    data: Path | None,
    baseline: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Simulate a federation. PLAN is a TOML file or a preset's name (default: digits, ten clients, under a minute)."""
    if resumed and (plan or out):
        raise click.UsageError(
            "--resume DIR goes on with the plan and folder of a run; give no PLAN and no --out with it"
        )
    chosen = None if resumed else load(plan or "digits", settings)
    folder = resumed or out or _new_folder(chosen.name if chosen else "run")
    from baffle.cli import show
    from baffle.simulation import add_baseline, baseline_of, resume, simulate

    if baseline and chosen:
        baseline_of(chosen)  # a plan that has no baseline is refused before it is run

    console, remarks = show.consoles()
    console.quiet = quiet or as_json

    def warn(advice: str) -> None:
        if not quiet:
            remarks.print(f"note: {advice}", soft_wrap=True)

    try:
        with show.watching(console, "probing") as watch:
            if chosen is None:
                summary = resume(folder, settings, data=data, watch=watch)
            else:
                summary = simulate(chosen, folder, data=data, watch=watch, warn=warn)
        if baseline:
            with show.watching(console, "backpropagation") as watch:
                summary = add_baseline(folder, data=data, watch=watch)
    except KeyboardInterrupt:
        if not quiet:
            go_on = f"go on with: baffle run --resume {folder}"
            remarks.print(
                f"stopped; {go_on if (folder / 'plan.toml').exists() else 'nothing was begun'}", soft_wrap=True
            )
        sys.exit(INTERRUPTED)
    if as_json:
        click.echo(json.dumps(summary))
    console.print(show.summary_table(summary))
    console.print(f"  folder            {folder}", soft_wrap=True)


def _new_folder(name: str) -> Path:
    stem = f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    candidates = (Path("runs") / (f"{stem}-{i}" if i else stem) for i in count())
    return next(path for path in candidates if not path.exists())
