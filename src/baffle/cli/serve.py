"""`baffle serve`: the server of a networked run."""

import json
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING

import click

from baffle.cli.options import data_option, json_option, path, plan_argument, set_option
from baffle.errors import TransportError

if TYPE_CHECKING:
    from baffle.server.recorder import Progress, Summary

PORT = 9092
MOST_RESTARTS = 5
"""After this many failures of the SuperLink without a round in between, the server gives up."""


@click.command()
@plan_argument
@set_option
@click.option("--keys", "keys_folder", type=path, required=True, help="The server's folder that `baffle keys` made.")
@click.option(
    "--out", type=path, required=True, help="The run's folder. If it holds a run, the server continues that run."
)
@click.option("--host", default="0.0.0.0", show_default=True, help="Where to listen.")
@click.option("--port", type=int, default=PORT, show_default=True)
@click.option(
    "--least", type=click.IntRange(1), help="Begin once this many clients are here (default: as many as a round takes)."
)
@click.option("--insecure", is_flag=True, help="No TLS, and anybody may connect: only for use on a single machine.")
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
    data: Path | None,
    as_json: bool,
) -> None:
    """Run a plan with clients that join over a network. If it is killed, the same command continues the run. PLAN is a
    TOML file or a preset's name (default: digits)."""
    from baffle.network.authority import ServerKeys
    from baffle.plan import load

    own = ServerKeys.load(keys_folder)
    chosen = load(plan or "digits", settings)
    # Imported only now, because it is slow: an error in the keys or the plan is reported at once.
    from baffle.cli import show
    from baffle.flower.grid_transport import FlowerNodes
    from baffle.flower.run import FlowerRun
    from baffle.flower.superlink import SuperLink
    from baffle.network.serve import serve as serve_run

    console, remarks = show.consoles()
    console.quiet = as_json
    remarks.quiet = as_json

    def tell(words: str) -> None:
        remarks.print(words, soft_wrap=True)

    certificates = None if insecure else (own.ca, own.certificate, own.key)
    link = SuperLink(host, port, out.with_name(f"{out.name}.flower"), own.secret, certificates)
    roots = None if insecure else own.ca.read_bytes()
    public = [] if insecure else own.roster.node_keys()

    def attempt(played: Event) -> "Summary":
        with link, FlowerRun(link.address, own.secret.read_bytes(), roots, public) as run:
            tell(f"listening at {host}:{port}{' without TLS' if insecure else ''}")
            nodes = FlowerNodes(run, chosen.run.deadline_seconds, lambda node, why: tell(f"node {node} failed: {why}"))
            with show.watching(console, "probing") as watch:

                def watched(progress: "Progress") -> None:
                    if progress.rounds_done:
                        played.set()
                    watch(progress)

                return serve_run(chosen, out, nodes, own.roster, least=least or 0, data=data, watch=watched, tell=tell)

    summary = _restarted(attempt, out, tell)
    if as_json:
        click.echo(json.dumps(summary))
    show.result(console, summary, out)


def _restarted(attempt: Callable[[Event], "Summary"], out: Path, tell: Callable[[str], None]) -> "Summary":
    """Attempt the run again whenever its SuperLink is lost. An attempt sets its event once a round was played; only
    failures without a round in between count towards the limit."""
    failures = 0
    while True:
        played = Event()
        try:
            return attempt(played)
        except TransportError as fault:
            failures = 0 if played.is_set() else failures + 1
            if failures >= MOST_RESTARTS or not (out / "plan.toml").exists():
                raise
            tell(f"{fault}; starting Flower's SuperLink again")
