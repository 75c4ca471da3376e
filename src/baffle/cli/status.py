"""`baffle status`: how a server's run goes."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from baffle.cli.options import json_option, path
from baffle.errors import one_line

if TYPE_CHECKING:
    from baffle.network.status import Status


ONLY_A_SERVER = ("connected", "taking part", "on the link", "late replies", "refused replies", "turned away")
"""Rows that a run's folder does not tell."""


@click.command()
@click.argument("address", metavar="ADDRESS|DIR")
@click.option(
    "--keys", "keys_folder", type=path, help="The folder `operator` that `baffle keys new` made; for an ADDRESS."
)
@click.option(
    "--insecure",
    is_flag=True,
    help="Ask without TLS a server that was started with --insecure. Whoever listens learns the token.",
)
@json_option
def status(address: str, keys_folder: Path | None, insecure: bool, as_json: bool) -> None:
    """Show how a server's run goes. The server is at ADDRESS (host:port); with --engine flower it has no status. DIR,
    the folder of any run, shows what that run has recorded, with what was refused."""
    from msgspec import to_builtins

    if (Path(address) / "plan.toml").is_file():
        _print_folder(Path(address), as_json=as_json)
        return
    if keys_folder is None:
        raise click.UsageError(f"{address} holds no run; to ask a server at that address, give --keys")
    from baffle.network.console import fetch_status
    from baffle.network.keys import OperatorKeys

    found = fetch_status(address, OperatorKeys.load(keys_folder), tls=not insecure)
    if as_json:
        click.echo(json.dumps(to_builtins(found)))
        return
    for name, value in rows(found).items():
        click.echo(f"{name:<18}{one_line(value, 2_500)}")


def _print_folder(folder: Path, *, as_json: bool) -> None:
    from msgspec import to_builtins

    from baffle.report.attendance import refusals
    from baffle.report.live import READ_FROM_FOLDER, status_of
    from baffle.report.record import read_run
    from baffle.report.words import ranges

    run = read_run(folder, measure=False)
    found, refused = status_of(run), refusals(run.metrics)
    if as_json:
        told = {name: value for name, value in to_builtins(found).items() if name in READ_FROM_FOLDER}
        words = [{"words": refusal.words, "rounds": refusal.rounds} for refusal in refused]
        click.echo(json.dumps({"run": found.run, "plan": found.plan, "state": run.state, **told, "refused": words}))
        return
    shown = rows(found) | {"now": run.state}
    for name in ("server runs for", "clients", *ONLY_A_SERVER):
        del shown[name]
    for name, value in shown.items():
        click.echo(f"{name:<18}{one_line(value, 2_500)}")
    for refusal in refused:
        click.echo(f"{'refused':<18}{refusal.words} ({refusal.count:,} times: round {ranges(refusal.rounds)})")


def rows(status: "Status") -> dict[str, str]:
    """What a person reads, line by line."""
    from baffle.cli.show import measure
    from baffle.report.words import duration, size

    silent, abstained = _by_phase(status.silent), _by_phase(status.abstained)
    up, down = size(status.uplink_bytes), size(status.downlink_bytes)
    return {
        "run": f"{status.run}, plan {status.plan}",
        "secure sum": status.secure,
        "now": status.doing + (f": {status.waits_for}" if status.waits_for else ""),
        "server runs for": f"{duration(status.uptime_seconds)}, version {status.version}",
        "rounds": f"{status.rounds_done:,} of {status.rounds:,}, {status.skipped_rounds:,} skipped",
        "seconds a round": _pace(status),
        "clients": f"{status.clients_on_roster:,} on the roster, {status.clients_needed:,} needed",
        "connected": _those(status.clients_connected, status.connected),
        "taking part": _those(status.clients_taking_part, status.taking_part),
        "loss": _loss(status),
        f"test {status.metric}": "–" if status.value is None else measure(status.metric, status.value),
        "in rounds": f"{up} up, {down} down",
        "on the link": f"{size(status.received_bytes)} received, {size(status.sent_bytes)} sent",
        "dropouts": f"{status.dropouts:,}" + (f" (no answer: {silent})" if silent else ""),
        "refusals": f"{status.refusals:,}" + (f" (clients abstained: {abstained})" if abstained else ""),
        "late replies": f"{status.late_replies:,}",
        "refused replies": f"{status.refused_replies:,}",
        "turned away": f"{status.turned_away:,} connections",
        "epsilon": "not counted: the run is not private" if status.epsilon is None else f"{status.epsilon:.3g}",
    }


def _loss(status: "Status") -> str:
    from baffle.report.words import shown_loss

    if status.epsilon is not None:
        return "not measured: the run is private"
    return "–" if status.loss is None else shown_loss(status.loss, 4)


def _pace(status: "Status") -> str:
    if status.recent_round_seconds is None or status.median_round_seconds is None:
        return "–"
    since = "" if status.seconds_since_round is None else f"; the last ended {status.seconds_since_round:.0f} s ago"
    return f"{status.recent_round_seconds:.2f} lately, median {status.median_round_seconds:.2f}{since}"


def _by_phase(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} in phase {phase}" for phase, count in counts.items())


def _those(count: int, numbers: str) -> str:
    return f"{count:,}: {numbers}" if count else "0"
