"""Arguments and options that several commands share, and how the long-running ones are stopped."""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click

path = click.Path(path_type=Path)

plan_argument = click.argument("plan", required=False)
set_option = click.option(
    "--set", "settings", multiple=True, metavar="KEY=VALUE", help="Change a setting, e.g. probe.k=50."
)
data_option = click.option("--data", type=path, help="Folder of data sets (default: $BAFFLE_DATA).")
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
quiet_option = click.option("--quiet", "-q", is_flag=True, help="Print nothing but errors.")
own_code_option = click.option(
    "--own-code", is_flag=True, help="Call functions that the plan in a run's folder names; only if you trust them."
)
on_option = click.option(
    "--on",
    default="local",
    show_default=True,
    metavar="local|ray|ray://ADDRESS",
    help="Where runs are played: in processes of this machine, or on a Ray cluster.",
)
jobs_option = click.option(
    "--jobs",
    type=click.IntRange(min=0),
    default=0,
    metavar="N",
    help="So many runs at the same time (default: one for each core; on Ray, as many as it has room for).",
)
log_option = click.option(
    "--log",
    "log_style",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="Log lines of text, or one JSON object a line.",
)


def _refuse_flower(_context: click.Context, _option: click.Parameter, engine: str) -> None:
    if engine == "flower":
        raise click.UsageError(
            "--engine flower is gone: leave the option out, or run BAFFLE as a Flower App, see docs/flower.md"
        )


engine_option = click.option(
    "--engine",
    type=click.Choice(["link", "flower"]),
    default="link",
    hidden=True,
    expose_value=False,
    callback=_refuse_flower,
)
"""For command lines that were written for version 0.2."""


@contextmanager
def stopped_by_sigterm(tell: Callable[[str], None], what_next: str) -> Iterator[None]:
    """SIGTERM ends the process in order, with exit code 0. `what_next` tells the reader of the log what to do.

    The line is logged after everything else has ended, because the signal may interrupt the log itself. A second
    SIGTERM is ignored: it would interrupt the orderly end."""
    stopped = False

    def stop(_signal: int, _frame: object) -> None:
        nonlocal stopped
        stopped = True
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sys.exit(0)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        if stopped:
            tell(f"stopped by SIGTERM; {what_next}")
