"""The commands of a networked run: keys, serve, join."""

import fcntl
import json
import os
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from threading import Event, Timer

import click

from baffle.errors import AwayError, RunFolderError, TransportError
from baffle.plan import load

PORT = 9092
MOST_RESTARTS = 5
"""A SuperLink that ends so often without a round in between is not started again."""

THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MALLOC_ARENA_MAX")
"""Each thread and arena would cost a small device megabytes; one of each is all that a client uses."""

LINGER = 3.0
"""Seconds for which a client that is done stays: a server that sees it leave before its last reply loses that."""

path = click.Path(path_type=Path)


@click.command()
@click.argument("folder", type=path)
@click.option("--clients", type=click.IntRange(1), required=True, help="How many clients the federation has.")
@click.option(
    "--host", "hosts", multiple=True, default=("localhost", "127.0.0.1"), help="A name or address of the server."
)
def keys(folder: Path, clients: int, hosts: tuple[str, ...]) -> None:
    """Make the keys of a federation in FOLDER: a CA, the server's certificate, and a folder for each client."""
    from baffle.network.authority import make_keys

    make_keys(folder, clients, tuple(dict.fromkeys((*hosts, "127.0.0.1"))))  # where the server reaches its SuperLink
    click.echo(f"{folder}/server is for the server, {folder}/client-0 … client-{clients - 1} for the clients.")
    click.echo(f"Keep {folder}/ca.key offline: it can make other servers that these clients trust.")


@click.command()
@click.argument("plan", required=False)
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Change a setting, e.g. probe.k=50.")
@click.option("--keys", "keys_folder", type=path, required=True, help="The server's folder that `baffle keys` made.")
@click.option(
    "--out", type=path, required=True, help="The run's folder. With a run in it, the server goes on with that."
)
@click.option("--host", default="0.0.0.0", show_default=True, help="Where to listen.")
@click.option("--port", type=int, default=PORT, show_default=True)
@click.option("--least", type=click.IntRange(1), help="Begin with so many clients (default: those of a round).")
@click.option("--insecure", is_flag=True, help="No TLS, and anybody may connect: for one machine alone.")
@click.option("--data", type=path, help="Folder of data sets (default: $BAFFLE_DATA).")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object at the end and nothing else.")
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
    from baffle.flower.grid_transport import FlowerNodes
    from baffle.flower.run import FlowerRun
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


@click.command()
@click.argument("address")
@click.option("--keys", "keys_folder", type=path, required=True, help="This client's folder that `baffle keys` made.")
@click.option("--state", type=path, required=True, help="Where it keeps what it must not forget.")
@click.option(
    "--data", type=path, help="Folder with its samples, in the formats of docs/data.md (default: $BAFFLE_DATA)."
)
@click.option("--part", is_flag=True, help="The folder holds everybody's samples; take this client's part of them.")
@click.option("--model", type=path, help="Run this exported model on ONNX Runtime (default: PyTorch).")
@click.option("--affords", type=click.IntRange(0), default=0, help="Directions a round at most (default: all).")
@click.option("--plan", "pinned", help="Take part in this plan alone.")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Change a setting of --plan.")
@click.option("--insecure", is_flag=True, help="The server has no TLS.")
@click.option("--stay", is_flag=True, help="Wait for the next run when one is over.")
def join(
    address: str,
    keys_folder: Path,
    state: Path,
    data: Path | None,
    part: bool,
    model: Path | None,
    affords: int,
    pinned: str | None,
    settings: tuple[str, ...],
    insecure: bool,
    stay: bool,
) -> None:
    """Take part, as one client, in the runs of the server at ADDRESS (host:port)."""
    if model and not all(name in os.environ for name in THREADS):
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **dict.fromkeys(THREADS, "1")})
    from baffle.flower.node import FlowerNode
    from baffle.network.equipment import count_samples, with_onnx, with_torch
    from baffle.network.keys import ClientKeys
    from baffle.network.member import Member

    own, leaving = ClientKeys.load(keys_folder), Event()

    def tell(words: str) -> None:
        if not leaving.is_set():  # a server that is gone is no news then
            click.echo(f"client {own.number}: {words}", err=True)

    equip = with_onnx(own.number, data, model, part=part) if model else with_torch(own.number, data, part=part)
    member = Member(
        own,
        state,
        count_samples(own.number, data, part=part),
        equip,
        affords,
        load(pinned, settings) if pinned else None,
        tell,
    )
    roots, key = (None, None) if insecure else (own.ca, own.node)
    with _alone(state), closing(member):
        known = _known_node(state)
        with FlowerNode(address, roots, key, tell, known=known) as node:
            for message in node.messages():
                if node.number != known:
                    known = node.number
                    _node_file(state).write_text(str(known))
                node.reply(message, member.answer(message.content))
                if member.over:
                    tell("the run is over")
                    member.over = False
                    if not stay:
                        leaving.set()
                        Timer(LINGER, node.stop).start()


@contextmanager
def _alone(state: Path) -> Iterator[None]:
    """A client's folder, for one process: two with the same marks could each be asked about the same weights."""
    try:
        state.mkdir(parents=True, exist_ok=True)
        lock = os.open(state, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise RunFolderError(f"{state} is in use by another client; each needs its own --state") from None
    except OSError as fault:
        raise RunFolderError(f"{state} cannot be used: {fault.strerror or fault}; give another --state") from None
    try:
        yield
    finally:
        os.close(lock)


def _node_file(state: Path) -> Path:
    return state / "node"


def _known_node(state: Path) -> int:
    """Which node this client was before; 0 where it is not known. To know it saves waiting, no more."""
    try:
        return int(_node_file(state).read_text())
    except (OSError, ValueError):
        return 0
