"""Commands that look at runs: `baffle report`, `baffle status`, `baffle verify` and `baffle watch`."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click
from msgspec import to_builtins

from baffle.cli.options import data_option, json_option, own_code_option, path, quiet_option
from baffle.errors import one_line

if TYPE_CHECKING:
    from baffle.network.status import Status

PORT = 9095
ONLY_A_SERVER = (
    *("server runs for", "clients", "connected", "taking part"),
    *("on the link", "late replies", "refused replies", "turned away"),
)
"""Rows that a run's folder does not tell."""


@click.command()
@click.argument("folders", type=path, nargs=-1, required=True, metavar="DIR...")
@click.option("--out", type=path, help="The page's file (default: report.html in DIR, or beside the first of several).")
@click.option("--standalone", is_flag=True, help="Make one file of 5 MB that includes its script, to send to somebody.")
@data_option
@own_code_option
@quiet_option
def report(
    folders: tuple[Path, ...], out: Path | None, standalone: bool, data: Path | None, own_code: bool, quiet: bool
) -> None:
    """Show what happened in a run, on one page. DIR is the folder of a run: finished, going on, stopped, or over a
    network. Several runs are shown side by side. The folder of a sweep is shown with mean and range over its seeds."""
    from baffle.grid.sweep import is_sweep
    from baffle.report.page import write_report
    from baffle.report.sweep import write_sweep

    if len(folders) == 1 and is_sweep(folders[0]):
        page = write_sweep(folders[0], out, standalone=standalone)
    else:
        page = write_report(folders, out, standalone=standalone, data=data, own_code=own_code)
    if not quiet:
        click.echo(f"report: {page}")


@click.command()
@click.argument("folder", type=path)
@own_code_option
@json_option
@quiet_option
def verify(folder: Path, own_code: bool, as_json: bool, quiet: bool) -> None:
    """Replay a run's journal and check every hash. It needs no machine-learning library."""
    from baffle.cli import show
    from baffle.core.freed_memory import keep_freed_memory
    from baffle.journal.audit import verify as replay

    console, _ = show.consoles()
    console.quiet = quiet or as_json
    keep_freed_memory()
    with show.counting(console, "replaying") as progress:
        found = replay(folder, progress, own_code=own_code)
    if as_json:
        click.echo(json.dumps(asdict(found)))
    weights = f"{found.n_weights:,} weights, sha256 {found.weights_sha256}"
    show.say(console, f"{found.rounds:,} rounds replayed, every hash right; {weights}")


@click.command()
@click.argument("folder", type=path, metavar="DIR")
@click.option("--port", type=click.IntRange(0, 65535), default=PORT, show_default=True, help="0: any free one.")
@data_option
def watch(folder: Path, port: int, data: Path | None) -> None:
    """Show a run while it goes on. It serves a page to browsers on this machine, and /metrics to Prometheus. DIR is the
    folder of a run, simulated or over a network."""
    from baffle.report.live import LivePage, LiveRun

    live = LiveRun(folder, data)
    live.run()  # fails at once if the folder holds no run
    with LivePage(live, port) as server:
        try:
            click.echo(f"watching {folder} at {server.address} (and {server.address}metrics); Ctrl-C ends it")
            server.serve_forever()
        except KeyboardInterrupt:
            click.echo("ended; the run goes on")


@click.command()
@click.argument("address", metavar="ADDRESS|DIR")
@click.option(
    "--keys", "keys_folder", type=path, help="The folder `operator` that `baffle keys new` made; for an ADDRESS."
)
@click.option(
    "--insecure",
    is_flag=True,
    help="Ask a server that was started with --insecure, without TLS: anybody on the way can read the token.",
)
@json_option
def status(address: str, keys_folder: Path | None, insecure: bool, as_json: bool) -> None:
    """Show how a server's run goes. The server is at ADDRESS (host:port). DIR, the folder of any run, shows what that
    run has recorded, and which messages were refused."""
    if (Path(address) / "plan.toml").is_file():
        _print_folder(Path(address), as_json=as_json)
        return
    if keys_folder is None:
        raise click.UsageError(f"{address} holds no run; to ask a server at that address, give --keys")
    from baffle.network.console import fetch_status
    from baffle.network.keys.folders import OperatorKeys

    found = fetch_status(address, OperatorKeys.load(keys_folder), tls=not insecure)
    if as_json:
        click.echo(json.dumps(to_builtins(found)))
    else:
        _print(rows(found))


def _print_folder(folder: Path, *, as_json: bool) -> None:
    from baffle.network.status import RECORDED
    from baffle.report.live import status_of
    from baffle.report.record import read_run, refusals

    run = read_run(folder, measure=False)
    found, refused = status_of(run), refusals(run.metrics)
    if as_json:
        recorded = {name: value for name, value in to_builtins(found).items() if name in RECORDED}
        words = [{"words": refusal.words, "rounds": refusal.rounds} for refusal in refused]
        click.echo(json.dumps({"run": found.run, "plan": found.plan, "state": run.state, **recorded, "refused": words}))
        return
    shown = rows(found) | {"now": run.state}
    _print({name: value for name, value in shown.items() if name not in ONLY_A_SERVER})
    for refusal in refused:
        _print({"refused": f"{refusal.words} ({refusal.count:,} times: round {refusal.shown_rounds})"})


def _print(shown: Mapping[str, str]) -> None:
    for name, value in shown.items():
        click.echo(f"{name:<18}{one_line(value, 2_500)}")


def rows(status: "Status") -> dict[str, str]:
    """A status as lines for people: name → text."""
    from baffle.cli.show import measure
    from baffle.report.words import duration, shown_loss, size

    def by_phase(what: str, counts: Mapping[str, int]) -> str:
        return f" ({what}: {', '.join(f'{n:,} in phase {phase}' for phase, n in counts.items())})" if counts else ""

    def those(count: int, numbers: str) -> str:
        return f"{count:,}: {numbers}" if count else "0"

    loss = "–" if status.loss is None else shown_loss(status.loss, 4)
    up, down = size(status.uplink_bytes), size(status.downlink_bytes)
    return {
        "run": f"{status.run}, plan {status.plan}",
        "secure sum": status.secure,
        "now": status.doing + (f": {status.waits_for}" if status.waits_for else ""),
        "server runs for": f"{duration(status.uptime_seconds)}, version {status.version}",
        "rounds": f"{status.rounds_done:,} of {status.rounds:,}, {status.skipped_rounds:,} skipped",
        "seconds a round": _pace(status),
        "clients": f"{status.clients_on_roster:,} on the roster, {status.clients_needed:,} needed",
        "connected": those(status.clients_connected, status.connected),
        "taking part": those(status.clients_taking_part, status.taking_part),
        "loss": loss if status.epsilon is None else "not measured: the run is private",
        f"test {status.metric}": "–" if status.value is None else measure(status.metric, status.value),
        "in rounds": f"{up} up, {down} down",
        "on the link": f"{size(status.received_bytes)} received, {size(status.sent_bytes)} sent",
        "dropouts": f"{status.dropouts:,}{by_phase('no answer', status.silent)}",
        "refusals": f"{status.refusals:,}{by_phase('clients abstained', status.abstained)}",
        "late replies": f"{status.late_replies:,}",
        "refused replies": f"{status.refused_replies:,}",
        "turned away": f"{status.turned_away:,} connections",
        "epsilon": "not counted: the run is not private" if status.epsilon is None else f"{status.epsilon:.3g}",
    }


def _pace(status: "Status") -> str:
    if status.recent_round_seconds is None or status.median_round_seconds is None:
        return "–"
    since = "" if status.seconds_since_round is None else f"; the last ended {status.seconds_since_round:.0f} s ago"
    return f"{status.recent_round_seconds:.2f} lately, median {status.median_round_seconds:.2f}{since}"
