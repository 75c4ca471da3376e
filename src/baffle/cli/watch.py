"""`baffle watch`: a run's page while the run goes on."""

from pathlib import Path

import click

from baffle.cli.options import data_option, path

PORT = 9095


@click.command()
@click.argument("folder", type=path, metavar="DIR")
@click.option("--port", type=click.IntRange(0, 65535), default=PORT, show_default=True, help="0: any free one.")
@data_option
def watch(folder: Path, port: int, data: Path | None) -> None:
    """Show a run while it goes on. The page is for browsers on this machine, and /metrics beside it for Prometheus. DIR
    is the folder of a run, simulated or over a network."""
    from baffle.report.live import LivePage, LiveRun

    live = LiveRun(folder, data)
    live.run()  # what is wrong with the folder is said at once
    with LivePage(live, port) as server:
        try:
            click.echo(f"watching {folder} at {server.address} (and {server.address}metrics); Ctrl-C ends it")
            server.serve_forever()
        except KeyboardInterrupt:
            click.echo("ended; the run goes on")
