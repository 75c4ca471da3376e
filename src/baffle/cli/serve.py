"""`baffle serve`: the server of a networked run."""

import json
from functools import partial
from pathlib import Path

import click

from baffle.cli import options
from baffle.cli.log import Log, Style
from baffle.cli.options import path

PORT = 9092


@click.command()
@options.plan_argument
@options.set_option
@click.option(
    "--keys", "keys_folder", type=path, required=True, help="The server's folder that `baffle keys new` made."
)
@click.option(
    "--out", type=path, required=True, help="The run's folder. If it holds a run, the server continues that run."
)
@click.option("--host", default="0.0.0.0", show_default=True, help="Where to listen.")
@click.option("--port", type=int, default=PORT, show_default=True)
@click.option(
    "--least",
    type=click.IntRange(1),
    help="Begin when this many clients are connected (default: as many as a round takes).",
)
@click.option(
    "--insecure", is_flag=True, help="Listen without TLS: only on a single machine, or behind a proxy that has TLS."
)
@options.engine_option
@options.log_option
@options.data_option
@options.json_option
def serve(
    plan: str | None,
    settings: tuple[str, ...],
    keys_folder: Path,
    out: Path,
    host: str,
    port: int,
    least: int | None,
    insecure: bool,
    log_style: Style,
    data: Path | None,
    as_json: bool,
) -> None:
    """Run a plan with clients that join over a network. If it is stopped, the same command continues the run. PLAN is a
    TOML file or a preset's name (default: digits-head). `baffle status` shows how the run goes."""
    from baffle.network.keys.authority import ServerKeys
    from baffle.plan import DEFAULT, load

    own = ServerKeys.load(keys_folder)
    chosen = load(plan or DEFAULT, settings)
    # These imports are slow, so errors in the keys or the plan are reported before them.
    from baffle.cli import show
    from baffle.network.link.server import Link, server_tls
    from baffle.network.server.board import Board
    from baffle.network.server.machine import require_open_files
    from baffle.network.server.serve import serve as serve_run
    from baffle.network.status import Pages

    console, _ = show.consoles()
    console.quiet = as_json or log_style == "json"
    log = Log(log_style, "server", out / "serve.log", quiet=as_json)
    require_open_files(len(own.roster.directory()), log)
    board, tls = Board(), None if insecure else server_tls(own)
    pages = Pages(own.token, board.status)
    play = partial(serve_run, least=least or 0, data=data, reread=own.rereading(), board=board, tell=log)
    with (
        options.stopped_by_sigterm(log, "the same command continues the run"),
        Link(own, host, port, tls, chosen.run.deadline_seconds, pages, log) as link,
    ):
        log(f"listening at {host}:{link.port}{' without TLS' if insecure else ''}")
        with show.watching(console, "probing") as watch:
            summary = play(chosen, out, link, own.roster, watch=watch)
    if as_json:
        click.echo(json.dumps(summary))
    show.result(console, summary, out)
