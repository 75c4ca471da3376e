"""`baffle verify`: replay a run's journal."""

import json
from dataclasses import asdict
from pathlib import Path

import click

from baffle.cli.options import json_option, path, quiet_option


@click.command()
@click.argument("folder", type=path)
@json_option
@quiet_option
def verify(folder: Path, as_json: bool, quiet: bool) -> None:
    """Replay a run's journal and check every hash. Of the libraries, it needs only NumPy."""
    from baffle.cli import show
    from baffle.cli.progress import counting
    from baffle.core.freed_memory import keep_freed_memory
    from baffle.journal.audit import verify as replay

    console, _ = show.consoles()
    console.quiet = quiet or as_json
    keep_freed_memory()
    with counting(console, "replaying") as progress:
        verified = replay(folder, progress)
    if as_json:
        click.echo(json.dumps(asdict(verified)))
    console.print(
        f"{verified.rounds:,} rounds replayed, every hash right; "
        f"{verified.n_weights:,} weights, sha256 {verified.weights_sha256}",
        soft_wrap=True,
    )
