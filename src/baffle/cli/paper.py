"""`baffle paper`: the tables and figures of the paper."""

from functools import partial
from pathlib import Path
from typing import Any, cast

import click

from baffle.cli.options import data_option, path, quiet_option


@click.command()
@click.argument("name", required=False)
@click.option("--list", "list_targets", is_flag=True, help="List the tables and figures.")
@click.option("--scale", type=click.Choice(["smoke", "short", "full"]), default="short", show_default=True)
@click.option(
    "--only",
    multiple=True,
    metavar="TEXT",
    help="Only the row of this name, or the rows whose names contain it; may be repeated. Other rows of the page stay.",
)
@click.option("--runs", type=path, default=Path("runs"), help="Folder of the runs (runs/).")
@click.option("--out", type=path, default=Path("paper"), help="Folder of the page (paper/).")
@data_option
@quiet_option
def paper(
    name: str | None,
    list_targets: bool,
    scale: str,
    only: tuple[str, ...],
    runs: Path,
    out: Path,
    data: Path | None,
    quiet: bool,
) -> None:
    """Reproduce a table or figure of the paper. Runs what is missing, continues what was stopped, and writes Markdown,
    HTML, JSON and PNG."""
    from baffle.cli import show
    from baffle.cli.progress import telling, watching
    from baffle.paper.build_page import Onlooker, build_page
    from baffle.paper.registry import TARGETS, target

    console, _ = show.consoles()
    console.quiet = quiet
    if list_targets or not name:
        for listed in TARGETS.values():
            console.print(f"{listed.name:19}{listed.about}", soft_wrap=True)
        return
    onlooker = Onlooker(partial(watching, console), partial(telling, console))
    page = build_page(target(name), cast(Any, scale), runs, out, onlooker, data, only)
    console.print(page.read_text(), soft_wrap=True)
    console.print(f"written to {page}", soft_wrap=True)
