"""`baffle keys`: the keys of a networked federation."""

from pathlib import Path

import click

from baffle.cli.options import path


@click.command()
@click.argument("folder", type=path)
@click.option("--clients", type=click.IntRange(1), required=True, help="Number of clients in the federation.")
@click.option(
    "--host",
    "hosts",
    multiple=True,
    default=("localhost", "127.0.0.1"),
    help="A name or address of the server; may be repeated.",
)
def keys(folder: Path, clients: int, hosts: tuple[str, ...]) -> None:
    """Make the keys of a federation. FOLDER gets a CA, a folder for the server and one for each client."""
    from baffle.network.authority import make_keys

    # The server itself reaches its SuperLink at 127.0.0.1.
    make_keys(folder, clients, tuple(dict.fromkeys((*hosts, "127.0.0.1"))))
    click.echo(f"{folder}/server is for the server, {folder}/client-0 … client-{clients - 1} for the clients.")
    click.echo(f"Keep {folder}/ca.key offline: whoever has it can set up servers that these clients trust.")
