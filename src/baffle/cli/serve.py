"""`baffle serve`: the server of a networked run."""

import json
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING

import click

from baffle.cli.log import Log, Style
from baffle.cli.options import (
    data_option,
    engine_option,
    json_option,
    log_option,
    path,
    plan_argument,
    set_option,
    stopped_by_sigterm,
)

if TYPE_CHECKING:
    from baffle.network.authority import ServerKeys
    from baffle.network.board import Board
    from baffle.network.joining import Lines
    from baffle.network.rosters import Reread
    from baffle.plan import Plan
    from baffle.server.recorder import Progress, Summary

PORT = 9092


@click.command()
@plan_argument
@set_option
@click.option(
    "--keys", "keys_folder", type=path, required=True, help="The server's folder that `baffle keys new` made."
)
@click.option(
    "--out", type=path, required=True, help="The run's folder. If it holds a run, the server continues that run."
)
@click.option("--host", default="0.0.0.0", show_default=True, help="Where to listen.")
@click.option("--port", type=int, default=PORT, show_default=True)
@click.option(
    "--least", type=click.IntRange(1), help="Begin once this many clients are here (default: as many as a round takes)."
)
@click.option("--insecure", is_flag=True, help="No TLS: only on a single machine, or behind a proxy that has TLS.")
@engine_option
@log_option
@data_option
@json_option
def serve(
    plan: str | None,
    settings: tuple[str, ...],
    keys_folder: Path,
    out: Path,
    host: str,
    port: int,
    least: int | None,
    insecure: bool,
    engine: str,
    log_style: Style,
    data: Path | None,
    as_json: bool,
) -> None:
    """Run a plan with clients that join over a network. If it is stopped, the same command continues the run. PLAN is a
    TOML file or a preset's name (default: digits). `baffle status` shows how the run goes, but not with --engine
    flower."""
    from baffle.network.authority import ServerKeys
    from baffle.plan import load

    own = ServerKeys.load(keys_folder)
    chosen = load(plan or "digits", settings)
    # Imported only now, because it is slow: an error in the keys or the plan is reported at once.
    from baffle.cli import show
    from baffle.cli.progress import watching
    from baffle.network.board import Board
    from baffle.network.serve import serve as serve_run

    console, _ = show.consoles()
    console.quiet = as_json or log_style == "json"
    log = Log(log_style, "server", out / "serve.log", quiet=as_json)
    board, advanced = Board(), Event()

    def play(lines: "Lines", reread: "Reread" = lambda: None) -> "Summary":
        with watching(console, "probing") as watch:

            def watched(progress: "Progress") -> None:
                if progress.rounds_done:
                    advanced.set()
                watch(progress)

            return serve_run(
                chosen,
                out,
                lines,
                own.roster,
                least=least or 0,
                data=data,
                reread=reread,
                board=board,
                watch=watched,
                tell=log,
            )

    with stopped_by_sigterm(log, "the same command continues the run"):
        if engine == "flower":
            from baffle.flower.engine import play_over_flower

            summary = play_over_flower(own, chosen, host, port, play, log, advanced, out, insecure=insecure)
        else:
            summary = _play_over_link(own, chosen, host, port, play, log, board, insecure=insecure)
    if as_json:
        click.echo(json.dumps(summary))
    show.result(console, summary, out)


def _play_over_link(
    own: "ServerKeys",
    plan: "Plan",
    host: str,
    port: int,
    play: Callable[["Lines", "Reread"], "Summary"],
    tell: Callable[[str], None],
    board: "Board",
    *,
    insecure: bool,
) -> "Summary":
    from baffle.network.link.pages import Pages
    from baffle.network.link.server import Link, server_tls
    from baffle.network.open_files import require_open_files
    from baffle.network.succession import rereading

    require_open_files(len(own.roster.directory()), tell)
    tls = None if insecure else server_tls(own)
    with Link(own, host, port, tls, plan.run.deadline_seconds, Pages(own.token, board.status), tell) as link:
        tell(f"listening at {host}:{link.port}{' without TLS' if insecure else ''}")
        return play(link, rereading(own))
