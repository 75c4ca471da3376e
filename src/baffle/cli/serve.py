"""`baffle serve`: the server of a networked run."""

import json
from pathlib import Path

import click

from baffle.cli.options import data_option, json_option, path, set_option
from baffle.errors import AwayError, TransportError
from baffle.plan import load

PORT = 9092
MOST_RESTARTS = 5
"""A SuperLink that ends so often without a round in between is not started again."""


@click.command()
@click.argument("plan", required=False)
@set_option
@click.option("--keys", "keys_folder", type=path, required=True, help="The server's folder that `baffle keys` made.")
@click.option(
    "--out", type=path, required=True, help="The run's folder. With a run in it, the server goes on with that."
)
@click.option("--host", default="0.0.0.0", show_default=True, help="Where to listen.")
@click.option("--port", type=int, default=PORT, show_default=True)
@click.option("--least", type=click.IntRange(1), help="Begin with so many clients (default: those of a round).")
@click.option("--insecure", is_flag=True, help="No TLS, and anybody may connect: for one machine alone.")
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
    """Run PLAN with clients that join over a network. Killed and started again, it goes on."""
    from baffle.network.authority import ServerKeys

    own, chosen = ServerKeys.load(keys_folder), load(plan or "digits", settings)  # faults in these are told at once
    from baffle.cli import show
    from baffle.flower.grid import FlowerNodes, FlowerRun
    from baffle.flower.superlink import SuperLink
    from baffle.network.serve import serve as serve_run
    from baffle.server.recorder import Progress, Watch

    console, remarks = show.consoles()
    console.quiet = as_json

    def tell(words: str) -> None:
        if not as_json:
            remarks.print(words, soft_wrap=True)

    certificates = None if insecure else (own.ca, own.certificate, own.key)
    link = SuperLink(host, port, out.with_name(f"{out.name}.flower"), own.secret, certificates)
    roots = None if insecure else own.ca.read_bytes()
    public = [] if insecure else own.roster.node_keys()
    failures = 0
    while True:
        played = 0.0
        try:
            with link, FlowerRun(link.address, own.secret.read_bytes(), roots, public) as run:
                tell(f"listening at {host}:{port}{' without TLS' if insecure else ''}")
                nodes = FlowerNodes(
                    run, chosen.run.deadline_seconds, lambda node, why: tell(f"node {node} failed: {why}")
                )
                with show.watching(console, "probing") as watch:

                    def watched(progress: Progress, watch: Watch = watch) -> None:
                        nonlocal played
                        played = progress.rounds_done
                        watch(progress)

                    summary = serve_run(
                        chosen, out, nodes, own.roster, least=least or 0, data=data, watch=watched, tell=tell
                    )
                break
        except (AwayError, TransportError) as fault:
            failures = 0 if played else failures + 1
            if failures >= MOST_RESTARTS or not (out / "plan.toml").exists():
                raise
            tell(f"{fault}; starting Flower's SuperLink again")
    if as_json:
        click.echo(json.dumps(summary))
    console.print(show.summary_table(summary))
    console.print(f"  folder            {out}", soft_wrap=True)
