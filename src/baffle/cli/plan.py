"""`baffle plan`: what a run will cost, known before it starts."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from baffle.cli.options import data_option, json_option, plan_argument, set_option

if TYPE_CHECKING:
    from baffle.duration import Duration
    from baffle.plan import Plan


@click.command()
@plan_argument
@set_option
@data_option
@click.option("--list", "list_presets", is_flag=True, help="List the plans that come with BAFFLE.")
@click.option("--toml", is_flag=True, help="Print the whole resolved plan, as a start for your own.")
@click.option("--show-partition", is_flag=True, help="Only draw how much of which class each client holds.")
@click.option(
    "--prices/--no-prices",
    default=True,
    help="Measure what a scalar costs along each kind of directions (default: yes).",
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
    """Show what a run will cost. Bytes, forward passes, memory, expected alignment, ε, which directions are the
    quickest to a scalar, and advice on σ. PLAN is a TOML file or a preset's name (default: digits)."""
    from baffle.plan import load, presets

    if list_presets:
        click.echo("\n".join(presets()))
        return
    chosen = load(plan or "digits", settings)
    if show_partition:
        _print_partition(chosen, data, as_json)
    elif toml:
        _print_toml(chosen, data)
    else:
        _print_costs(chosen, data, prices, as_json)


def _print_partition(chosen: "Plan", data: Path | None, as_json: bool) -> None:
    from baffle.cli import show
    from baffle.cli.holdings import partition_view
    from baffle.data.holdings import holdings
    from baffle.data.partition import share_out
    from baffle.data.sources import load as load_data

    source = load_data(chosen.task.data, data, chosen.task.pixels)
    held = holdings(source, share_out(chosen, source))
    if as_json:
        click.echo(json.dumps({"clients": [asdict(holding) for holding in held]}))
        return
    console, _ = show.consoles()
    console.print(partition_view(held))


def _print_toml(chosen: "Plan", data: Path | None) -> None:
    from baffle.task.load import load_task
    from baffle.task.privacy import with_clip

    task, _ = with_clip(load_task(chosen, data))
    click.echo(task.plan.to_toml(), nl=False)


def _print_costs(chosen: "Plan", data: Path | None, with_prices: bool, as_json: bool) -> None:
    from baffle.cli import show
    from baffle.duration import measure_duration
    from baffle.task.choice import advice_on_prices, seconds_of, told
    from baffle.task.costs import costs
    from baffle.task.load import load_task
    from baffle.task.privacy import with_clip
    from baffle.task.settling import prices_of

    task, proposed = with_clip(load_task(chosen, data))
    estimate = costs(task)
    duration = measure_duration(task)
    priced = with_prices and task.plan.estimator == "probe"
    prices = prices_of(task.server, max(map(len, task.shares)), given=True) if priced else {}
    if as_json:
        measured = {"prices": seconds_of(prices)} if with_prices else {}
        click.echo(json.dumps(asdict(estimate) | {"seconds": round(duration.total, 2)} | measured))
        return
    console, remarks = show.consoles()
    rows = show.costs_rows(estimate) | {"time": _shown_duration(chosen, duration)}
    if prices:
        rows["CPU a scalar"] = told(seconds_of(prices))
    console.print(show.aligned(rows), soft_wrap=True)
    priced_advice = advice_on_prices(task.plan.probe, prices) if prices else []
    for advice in (*([proposed] if proposed else []), *estimate.advice, *priced_advice):
        show.note(remarks, advice)


def _shown_duration(chosen: "Plan", duration: "Duration") -> str:
    """How long a simulation takes here, and what of a round is clients' work."""
    from baffle.report.words import duration as shown

    work = 1 - duration.overhead * chosen.rounds / duration.total
    return f"about {shown(duration.total)} for a simulation on this machine, {work:.0%} of it clients' work"
