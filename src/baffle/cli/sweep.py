"""`baffle sweep`: a plan with several seeds and settings, as a grid of independent runs."""

import json
import shlex
import sys
from pathlib import Path

import click

from baffle.cli.options import (
    data_option,
    jobs_option,
    json_option,
    on_option,
    path,
    plan_argument,
    quiet_option,
    set_option,
)


@click.command()
@plan_argument
@set_option
@click.option(
    "--seeds", metavar="SEEDS", help="A range such as 0..4, or a list such as 0,3,7 (default: the plan's own)."
)
@click.option(
    "--grid",
    "axes",
    multiple=True,
    metavar="KEY=VALUE,VALUE",
    help="Values of a setting, e.g. update.rate=0.003,0.01. May be repeated: every combination is run.",
)
@click.option("--out", type=path, required=True, help="Folder of the runs. What has ended there is kept.")
@on_option
@jobs_option
@data_option
@json_option
@quiet_option
def sweep(
    plan: str | None,
    settings: tuple[str, ...],
    seeds: str | None,
    axes: tuple[str, ...],
    out: Path,
    on: str,
    jobs: int,
    data: Path | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Run a plan with several seeds and settings. Its table and its page show mean and range over the seeds, and which
    rows are equal. Started again, it keeps finished runs and resumes the others. PLAN is a TOML file or a preset's name
    (default: digits-head)."""
    from baffle.grid.plans import seeds_of
    from baffle.plan import DEFAULT, load

    chosen, wanted = load(plan or DEFAULT, settings), seeds_of(seeds) if seeds is not None else []
    from baffle.cli import show
    from baffle.grid.sweep import sweep as run_sweep
    from baffle.report.sweep import rows_of, table_of, write_sweep

    console, remarks = show.consoles()
    console.quiet = quiet or as_json
    command = shlex.join(["baffle", *sys.argv[1:]])
    try:
        with show.many_runs(console) as watch:
            swept = run_sweep(
                chosen, out, seeds=wanted, grid=axes, on=on, jobs=jobs, data=data, watch=watch, command=command
            )
    except KeyboardInterrupt:
        show.say(remarks, "stopped; the same command goes on")
        raise click.Abort from None
    if as_json:
        failed = {name: failure.words for name, failure in swept.failures.items()}
        click.echo(json.dumps({"folder": str(out), "rows": rows_of(swept), "failed": failed}))
    else:
        console.print(show.columns(*table_of(swept), leave_out=("scalars", "rounds", "forward passes", "bytes up")))
        if made := show.made_report(remarks, lambda: write_sweep(out)):
            show.say(console, f"report: {made}")
    swept.require_success()
