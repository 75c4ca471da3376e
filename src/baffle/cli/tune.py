"""`baffle tune`: choose σ, rate, K and batch by short trials, and say why."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from baffle.cli.options import data_option, json_option, path, plan_argument, quiet_option, set_option

if TYPE_CHECKING:
    from rich.console import Console


@click.command()
@plan_argument
@set_option
@click.option("--out", type=path, metavar="FILE", help="Write the tuned plan to FILE (default: print it).")
@data_option
@json_option
@quiet_option
def tune(
    plan: str | None,
    settings: tuple[str, ...],
    out: Path | None,
    data: Path | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Choose σ, rate, K and batch for a plan. Short trials on its own training data decide; they take about as long as
    the run, or less. PLAN is a TOML file or a preset's name (default: digits)."""
    from baffle.plan import load

    chosen = load(plan or "digits", settings)
    from baffle.cli import show
    from baffle.tune.tuning import tune as tune_plan

    console, remarks = show.consoles()
    remarks.quiet = quiet or as_json
    with _trying(remarks) as tell:
        tuned = tune_plan(chosen, data=data, tell=tell)
    if out:
        from baffle.files import replace

        replace(out, tuned.to_toml().encode())
    if as_json:
        click.echo(json.dumps(asdict(tuned) | {"plan": tuned.plan.to_toml()}))
    elif out:
        console.quiet = quiet
        for line in tuned.lines():
            console.print(line, soft_wrap=True)
        console.print(f"go on with: baffle run {out}", soft_wrap=True)
    else:
        click.echo(tuned.to_toml(), nl=False)


@contextmanager
def _trying(console: "Console") -> Iterator[Callable[[str, int, int], None]]:
    """A bar over the rounds of trials, with the present step in words; without a terminal, a line for each step."""
    if not console.is_terminal:
        yield lambda words, done, _of: console.print(f"round {done}  {words}", soft_wrap=True)
        return
    from rich.progress import BarColumn, Progress, TextColumn

    with Progress(TextColumn("trying"), BarColumn(24), TextColumn("{task.description}"), console=console) as bar:
        task = bar.add_task("", total=None)
        yield lambda words, done, of: bar.update(task, completed=done, total=max(of, done), description=words)
