"""`baffle keys`: the keys of a networked federation."""

from pathlib import Path

import click

from baffle.cli.options import path

DAYS = 3650
LOOPBACK = "127.0.0.1"
"""Every certificate is also for this address: there the server itself reaches Flower's SuperLink."""

days_option = click.option(
    "--days", type=click.IntRange(1), default=DAYS, show_default=True, help="How long what is made is valid."
)


@click.group()
def keys() -> None:
    """Make the keys of a federation, or a new certificate for its server."""


@keys.command()
@click.argument("folder", type=path)
@click.option("--clients", type=click.IntRange(1), required=True, help="Number of clients in the federation.")
@click.option(
    "--host",
    "hosts",
    multiple=True,
    default=("localhost", LOOPBACK),
    help="A name or address of the server; may be repeated.",
)
@days_option
def new(folder: Path, clients: int, hosts: tuple[str, ...], days: int) -> None:
    """Make the keys of a federation. FOLDER gets an authority, a CA, and a folder for the server, for each client and
    for operators. The server's certificate and the roster are valid for --days."""
    from baffle.network.authority import make_keys

    make_keys(folder, clients, _with_loopback(hosts), days)
    click.echo(f"{folder}/server is for the server, {folder}/client-0 … client-{clients - 1} for the clients.")
    click.echo(f"{folder}/operator is for whoever may see who is connected.")
    click.echo(
        f"Keep {folder}/authority.key and {folder}/ca.key offline: "
        "whoever has them can add clients, and set up servers that these clients trust."
    )


@keys.command()
@click.argument("folder", type=path)
@click.option(
    "--host",
    "hosts",
    multiple=True,
    help="A name or address of the server; may be repeated (default: those of the present certificate).",
)
@days_option
def certificate(folder: Path, hosts: tuple[str, ...], days: int) -> None:
    """Make a new certificate for the server. FOLDER is the one that `baffle keys new` made, with ca.key. Identities and
    roster stay, and clients need nothing new."""
    from baffle.network.authority import renew_certificate
    from baffle.network.certificates import hosts_in

    made = renew_certificate(folder, _with_loopback(hosts) if hosts else (), days)
    names = ", ".join(hosts_in(made))
    click.echo(f"The new certificate is for {names} and valid until {made.not_valid_after_utc:%Y-%m-%d}.")
    click.echo(
        f"Copy {folder}/server/server.pem and {folder}/server/server.key to the server's folder of keys, "
        "then restart the server."
    )


def _with_loopback(hosts: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*hosts, LOOPBACK)))
