"""`baffle report`: what happened in a run, on one page."""

from pathlib import Path

import click

from baffle.cli.options import data_option, path, quiet_option


@click.command()
@click.argument("folders", type=path, nargs=-1, required=True, metavar="DIR...")
@click.option("--out", type=path, help="The page's file (default: report.html in DIR; of several, beside the first).")
@click.option("--standalone", is_flag=True, help="One file of 5 MB that holds its script, to send to somebody.")
@click.option(
    "--own-data",
    is_flag=True,
    help="Show the partition of data that a plan names as module:function, too. This runs that function.",
)
@data_option
@quiet_option
def report(
    folders: tuple[Path, ...], out: Path | None, standalone: bool, own_data: bool, data: Path | None, quiet: bool
) -> None:
    """Show what happened in a run, on one page. DIR is the folder of a run: finished, going on, stopped, or over a
    network. Several runs are shown side by side."""
    from baffle.report.writing import write_report

    page = write_report(folders, out, standalone=standalone, data=data, own_code=own_data)
    if not quiet:
        click.echo(f"report: {page}")
