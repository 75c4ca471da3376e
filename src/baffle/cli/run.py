"""`baffle run`: simulate a federation in this process. `baffle paper`: the tables and figures of the paper."""

import json
import shlex
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from baffle.cli.options import (
    data_option,
    jobs_option,
    json_option,
    on_option,
    own_code_option,
    path,
    plan_argument,
    quiet_option,
    set_option,
)
from baffle.errors import DataError

if TYPE_CHECKING:
    from rich.console import Console

    from baffle.paper.target import Target


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
    help="Repeat the networked run in DIR in this process, with its dropouts, to the same weights.",
)
@data_option
@own_code_option
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
    own_code: bool,
    baseline: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Simulate a federation. PLAN is a TOML file or a preset's name (default: digits-head, under a minute)."""
    if resumed and (plan or out):
        raise click.UsageError(
            "--resume DIR uses the plan and the folder of that run; give no PLAN and no --out with it"
        )
    if original and (plan or resumed or baseline):
        raise click.UsageError("--as DIR repeats that run as it was; give no PLAN, --resume or --baseline with it")
    from baffle.journal.folder import new_folder
    from baffle.plan import DEFAULT, load
    from baffle.plan.functions import named_by

    chosen = None if resumed or original else load(plan or DEFAULT, settings)
    own_code = own_code or bool(chosen and named_by(chosen))  # a plan that the user names is the user's own word
    named = new_folder(chosen.name if chosen else "run")
    folder = resumed or out or click.get_current_context().with_resource(named)
    from baffle.cli import show
    from baffle.simulation import add_baseline, repeat, require_baseline, resume, simulate

    if baseline and chosen:
        require_baseline(chosen, data)  # refuse it before the run, not after it
    console, remarks = show.consoles()
    console.quiet = quiet or as_json
    remarks.quiet = quiet
    warn = partial(show.note, remarks)
    try:
        with show.watching(console, "probing") as watch:
            if original:
                summary = repeat(original, folder, settings, data=data, watch=watch, own_code=own_code)
            elif chosen is None:
                summary = resume(folder, settings, data=data, watch=watch, warn=warn, own_code=own_code)
            else:
                summary = simulate(chosen, folder, data=data, watch=watch, warn=warn)
        if baseline:
            with show.watching(console, "backpropagation") as watch:
                summary = add_baseline(folder, data=data, watch=watch, own_code=own_code)
    except KeyboardInterrupt:
        begun = (folder / "plan.toml").exists() and not original
        again = f"baffle run --resume {shlex.quote(str(folder))}{' --own-code' if own_code else ''}"
        resuming = f"; go on with: {again}" if begun else ""
        show.say(remarks, f"stopped{resuming}")
        raise click.Abort from None
    if as_json:
        click.echo(json.dumps(summary))
    else:
        from baffle.report.page import write_report

        report = show.made_report(remarks, lambda: write_report([folder], data=data, own_code=own_code))
        show.result(console, summary, folder, report)


def _print_durations(console: "Console", target: "Target", scale: str, data: Path | None) -> None:
    """How long each run of a target will take on this machine, by a few rounds of it."""
    from baffle.cli import show
    from baffle.measuring.duration import measure_duration
    from baffle.report.words import duration
    from baffle.task.load import load_task

    total, plans = 0.0, target.plans(cast(Any, scale))
    for row, plan in plans.items():
        try:
            seconds = measure_duration(load_task(plan, data)).total
        except DataError as fault:
            show.say(console, f"  {row}: {fault}")
            continue
        total += seconds
        show.say(console, f"  {row}: about {duration(seconds)}")
    words = f"about {duration(total)} here at scale {scale}" if plans else "a measurement: minutes, hours at full scale"
    show.say(console, f"  in all {words}")


@click.command()
@click.argument("name", required=False)
@click.option("--list", "list_targets", is_flag=True, help="List the tables and figures; with NAME, how long it takes.")
@click.option("--scale", type=click.Choice(["smoke", "short", "full"]), default="short", show_default=True)
@click.option(
    "--only",
    multiple=True,
    metavar="TEXT",
    help="Only the row of this name, or the rows whose names contain it; may be repeated. Other rows of the page stay.",
)
@click.option(
    "--estimator",
    type=click.Choice(["probe", "law"]),
    default="probe",
    show_default=True,
    help="law: draw estimates from the law of K directions, at the price of backpropagation; the page says for which "
    "rows.",
)
@click.option("--seeds", type=click.IntRange(1, 100), default=1, metavar="N", help="Run each row with N seeds (1).")
@click.option(
    "--choose-rates",
    "trials",
    type=click.FloatRange(0, 1, min_open=True),
    metavar="PART",
    help="First choose each row's rate by trials of this part of its run, on held-out training samples; 1: whole runs.",
)
@on_option
@jobs_option
@click.option("--runs", type=path, default=Path("runs"), help="Folder of the runs (runs/).")
@click.option("--out", type=path, default=Path("paper"), help="Folder of the page (paper/).")
@data_option
@quiet_option
def paper(
    name: str | None,
    list_targets: bool,
    scale: str,
    only: tuple[str, ...],
    estimator: str,
    seeds: int,
    trials: float | None,
    on: str,
    jobs: int,
    runs: Path,
    out: Path,
    data: Path | None,
    quiet: bool,
) -> None:
    """Reproduce a table or figure of the paper. Runs what is missing, continues what was stopped, and writes Markdown,
    HTML, JSON and PNG."""
    from baffle.cli import show
    from baffle.grid.play import runner_of
    from baffle.paper.page import Onlooker, Request, build_page
    from baffle.paper.registry import TARGETS, target
    from baffle.paper.target import SCALES

    console, _ = show.consoles()
    console.quiet = quiet
    if list_targets or not name:
        for listed in [target(name)] if name else TARGETS.values():
            show.say(console, f"{listed.name:19}{listed.about}")
            needs = {
                each: ", ".join(listed.data(each)) or "no data" for each in (SCALES if name else ("short", "full"))
            }
            show.say(console, f"{'':19}{'; '.join(f'{each}: {data}' for each, data in needs.items())}")
        if name:
            _print_durations(console, target(name), scale, data)
        return
    onlooker = Onlooker(partial(show.many_runs, console), partial(show.telling, console))
    request = Request(only, cast(Any, estimator), seeds, trials or 0.0)
    page = build_page(target(name), cast(Any, scale), runs, out, onlooker, data, request, runner_of(on, jobs, data))
    show.say(console, f"{page.read_text()}\nwritten to {page}")
