"""`baffle keys`: the keys of a networked federation, and who belongs to it."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from baffle.cli.options import path

if TYPE_CHECKING:
    from baffle.network.keys.rosters import Roster

DAYS = 3650
HOST = "A name or address of the server"
LOOPBACK = "127.0.0.1"  # processes on the server's own machine reach it here, so every certificate is also for it
days_option = click.option(
    "--days", type=click.IntRange(1), default=DAYS, show_default=True, help="How long certificate or roster are valid."
)


@click.group()
def keys() -> None:
    """Make the keys of a federation, or change who belongs to it."""


@keys.command()
@click.argument("folder", type=path)
@click.option("--clients", type=click.IntRange(1), required=True, help="Number of clients in the federation.")
@click.option("--host", "hosts", multiple=True, default=("localhost", LOOPBACK), help=f"{HOST}; may be repeated.")
@days_option
def new(folder: Path, clients: int, hosts: tuple[str, ...], days: int) -> None:
    """Make the keys of a federation. FOLDER gets the keys of an authority and of a CA, and a folder for the server, for
    each client and for operators. The server's certificate and the roster are valid for --days."""
    from baffle.network.keys.authority import make_keys

    make_keys(folder, clients, _with_loopback(hosts), days)
    click.echo(f"{folder}/server is for the server, {folder}/client-0 … client-{clients - 1} for the clients.")
    click.echo(f"{folder}/operator is for operators, who may see which clients are connected.")
    click.echo(
        f"Keep {folder}/authority.key and {folder}/ca.key offline: "
        "anybody who has them can add clients, and set up servers that these clients trust."
    )


@keys.command()
@click.argument("folder", type=path)
@click.option(
    "--host",
    "hosts",
    multiple=True,
    help=f"{HOST}; may be repeated (default: those of the present certificate).",
)
@days_option
def certificate(folder: Path, hosts: tuple[str, ...], days: int) -> None:
    """Make a new certificate for the server. FOLDER is the one that `baffle keys new` made, with ca.key. Identities and
    roster stay the same, and clients need nothing new."""
    from baffle.network.keys.authority import renew_certificate
    from baffle.network.keys.certificates import hosts_in

    made = renew_certificate(folder, _with_loopback(hosts) if hosts else (), days)
    names = ", ".join(hosts_in(made))
    click.echo(f"The new certificate is for {names} and valid until {made.not_valid_after_utc:%Y-%m-%d}.")
    click.echo(
        f"Copy {folder}/server/server.pem and {folder}/server/server.key to the server's folder of keys, "
        "then restart the server."
    )


@keys.command()
@click.argument("folder", type=path)
@click.option("--count", type=click.IntRange(1), default=1, show_default=True, help="Number of new clients.")
def add(folder: Path, count: int) -> None:
    """Make the keys of new clients. FOLDER is the one that `baffle keys new` made, with authority.key. New clients get
    the numbers of revoked ones, or new numbers. All others keep their keys and numbers."""
    from baffle.network.keys.authority import add_clients

    added = add_clients(folder, count)
    for number in added.numbers:
        click.echo(f"{folder}/client-{number} is for the new client {number}.")
    _say_where(folder, added.roster)


@keys.command()
@click.argument("folder", type=path)
@click.argument("numbers", type=click.IntRange(0), nargs=-1, required=True, metavar="NUMBER...")
def revoke(folder: Path, numbers: tuple[int, ...]) -> None:
    """Take clients off the roster, by their numbers: because they leave, or because their keys were stolen or lost.
    FOLDER is the one that `baffle keys new` made, with authority.key. All others keep their keys and numbers."""
    from baffle.network.keys.authority import revoke_clients

    roster = revoke_clients(folder, numbers)
    click.echo(f"Revoked: {', '.join(map(str, sorted(set(numbers))))}. `baffle keys add` gives their places to others.")
    _say_where(folder, roster)


@keys.command()
@click.argument("folder", type=path)
@days_option
def renew(folder: Path, days: int) -> None:
    """Sign the same roster again, valid for --days from now. FOLDER is the one that `baffle keys new` made, with
    authority.key."""
    from baffle.network.keys.authority import renew_roster

    _say_where(folder, renew_roster(folder, days))


def _say_where(folder: Path, roster: "Roster") -> None:
    """Say what to do with a new roster."""
    click.echo(
        f"Roster {roster.number} has {len(roster.directory())} clients and is valid until {roster.expiry:%Y-%m-%d}."
    )
    click.echo(
        f"Copy {folder}/server/roster.json to the server's folder of keys. A server that runs takes it before its next "
        "round and hands it on to its clients; nobody needs a restart."
    )


def _with_loopback(hosts: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*hosts, LOOPBACK)))
