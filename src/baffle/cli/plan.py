"""`baffle plan`: what a run will cost. `baffle tune`: choose σ, rate, K and batch by trials, and explain the choice."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from errno import EISDIR
from pathlib import Path
from typing import TYPE_CHECKING

import click

from baffle.cli.options import data_option, json_option, path, plan_argument, quiet_option, set_option

if TYPE_CHECKING:
    from baffle.plan import Plan


@click.command()
@plan_argument
@set_option
@data_option
@click.option("--list", "list_presets", is_flag=True, help="List the plans that come with BAFFLE.")
@click.option("--toml", is_flag=True, help="Print the plan with all its settings, to start your own from.")
@click.option("--show-partition", is_flag=True, help="Only draw how many samples of each class each client holds.")
@click.option(
    "--prices/--no-prices",
    default=True,
    help="Measure the CPU time of a scalar for each kind of directions (default: yes).",
)
@json_option
def plan(
    plan: str | None,
    settings: tuple[str, ...],
    data: Path | None,
    list_presets: bool,
    toml: bool,
    show_partition: bool,
    prices: bool,
    as_json: bool,
) -> None:
    """Show what a run will cost. The table has bytes, forward passes, memory, expected alignment, ε and the CPU time of
    a scalar for each kind of directions; below it is advice. PLAN is a TOML file or a preset's name (default:
    digits-head)."""
    from baffle.plan import DEFAULT, load, presets

    if list_presets:
        click.echo("\n".join(presets()))
        return
    chosen = load(plan or DEFAULT, settings)
    if show_partition:
        _print_partition(chosen, data, as_json)
        return
    from baffle.measuring.privacy import with_clip
    from baffle.task.load import load_task

    task, proposed = with_clip(load_task(chosen, data))
    if toml:
        click.echo(task.plan.to_toml(), nl=False)
        return
    from baffle.cli import show
    from baffle.measuring.costs import costs
    from baffle.measuring.duration import measure_duration
    from baffle.report.words import duration as shown
    from baffle.task.prices import advice_on_prices, in_words, seconds_of
    from baffle.task.settle import prices_of

    estimate, duration = costs(task), measure_duration(task)
    priced = prices_of(task, task.largest) if prices and task.plan.estimator == "probe" else {}
    if as_json:
        measured = {"prices": seconds_of(priced)} if prices else {}
        click.echo(json.dumps(asdict(estimate) | {"seconds": round(duration.total, 2)} | measured))
        return
    console, remarks = show.consoles()
    time, work = shown(duration.total), duration.work * chosen.rounds / duration.total
    rows = show.costs_rows(estimate)
    rows["time"] = f"about {time} for a simulation on this machine, {work:.0%} of it clients' work"
    if priced:
        rows["CPU a scalar"] = in_words(seconds_of(priced))
    show.say(console, show.aligned(rows))
    priced_advice = advice_on_prices(task.plan.probe, priced) if priced else []
    for advice in (*([proposed] if proposed else []), *estimate.advice, *priced_advice):
        show.note(remarks, advice)


def _print_partition(chosen: "Plan", data: Path | None, as_json: bool) -> None:
    from baffle.cli import show
    from baffle.data.partition import holdings, share_out
    from baffle.data.sources import source_of

    source = source_of(chosen.task, data)
    held = holdings(source, share_out(chosen, source))
    if as_json:
        click.echo(json.dumps({"clients": [asdict(holding) for holding in held]}))
    else:
        show.consoles()[0].print(show.partition_view(held))


@contextmanager
def _writing(out: Path) -> Iterator[None]:
    try:
        if out.is_dir():
            raise IsADirectoryError(EISDIR, "it is a folder")
        yield
    except OSError as fault:
        raise click.UsageError(f"{out} cannot be written: {fault.strerror or fault}; give another --out") from None


@click.command()
@plan_argument
@set_option
@click.option("--out", type=path, metavar="FILE", help="Write the tuned plan to FILE (default: print it).")
@data_option
@json_option
@quiet_option
def tune(
    plan: str | None, settings: tuple[str, ...], out: Path | None, data: Path | None, as_json: bool, quiet: bool
) -> None:
    """Choose σ, rate, K and batch for a plan. It compares short trials on the plan's training data, which together take
    about as long as the run, or less. PLAN is a TOML file or a preset's name (default: digits-head)."""
    from baffle.plan import DEFAULT, load

    chosen = load(plan or DEFAULT, settings)
    from baffle.cli import show
    from baffle.files import replace, require_room
    from baffle.tune.tuning import tune as tune_plan

    if out:
        with _writing(out):  # before the trials, which take a while
            require_room(out)
    console, remarks = show.consoles()
    remarks.quiet = quiet or as_json
    with show.trying(remarks) as tell:
        tuned = tune_plan(chosen, data=data, tell=tell)
    if out:
        with _writing(out):
            replace(out, tuned.to_toml().encode())
    if as_json:
        click.echo(json.dumps(asdict(tuned) | {"plan": tuned.plan.to_toml()}))
    elif out:
        console.quiet = quiet
        show.say(console, "\n".join([*tuned.lines(), *([f"go on with: baffle run {out}"] if tuned.learnt else [])]))
    else:
        click.echo(tuned.to_toml(), nl=False)
