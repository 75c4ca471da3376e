"""`baffle plan`: what a run will cost."""

import json
from dataclasses import asdict
from pathlib import Path

import click

from baffle.cli.options import data_option, json_option, set_option
from baffle.plan import load, presets


@click.command("plan")
@click.argument("plan", required=False)
@set_option
@data_option
@click.option("--list", "list_presets", is_flag=True, help="List the plans that come with BAFFLE.")
@click.option("--toml", is_flag=True, help="Print the whole resolved plan, to start one of your own from.")
@click.option("--show-partition", is_flag=True, help="Draw which client holds how much of which class, and no more.")
@json_option
def plan_command(
    plan: str | None,
    settings: tuple[str, ...],
    data: Path | None,
    list_presets: bool,
    toml: bool,
    show_partition: bool,
    as_json: bool,
) -> None:
    """What a run of PLAN will cost: bytes, forward passes, memory, expected alignment, advice on σ."""
    if list_presets:
        for name in presets():
            click.echo(name)
        return
    from baffle.cli import show

    console, remarks = show.consoles()
    chosen = load(plan or "digits", settings)
    if show_partition:
        from baffle.cli.holdings import holdings, partition_view
        from baffle.data.partition import share_out
        from baffle.data.sources import load as load_data

        source = load_data(chosen.task.data, data, chosen.task.pixels)
        held = holdings(source, share_out(chosen, source))
        if as_json:
            click.echo(json.dumps({"clients": [asdict(one) for one in held]}))
        else:
            console.print(partition_view(held))
        return
    from baffle.task.costs import costs
    from baffle.task.load import load_task

    task = load_task(chosen, data)
    if toml:
        click.echo(task.plan.to_toml(), nl=False)
        return
    found = costs(task)
    if as_json:
        click.echo(json.dumps(asdict(found)))
        return
    console.print(show.costs_table(found))
    for advice in found.advice:
        remarks.print(f"note: {advice}", soft_wrap=True)
