"""`baffle serve --engine flower`: a run whose messages Flower's SuperLink carries. SuperLink is started here, and
started again when it is lost."""

from collections.abc import Callable
from pathlib import Path
from threading import Event

from baffle.errors import TransportError
from baffle.flower.lines import FlowerLines
from baffle.flower.run import FlowerRun
from baffle.flower.superlink import SuperLink
from baffle.network.authority import ServerKeys
from baffle.network.joining import Lines
from baffle.network.node_keys import public_node_keys
from baffle.plan import Plan
from baffle.server.recorder import Summary

MOST_RESTARTS = 5
"""After this many failures of the SuperLink without a round in between, the server gives up."""


def play_over_flower(
    own: ServerKeys,
    plan: Plan,
    host: str,
    port: int,
    play: Callable[[Lines], Summary],
    tell: Callable[[str], None],
    advanced: Event,
    out: Path,
    *,
    insecure: bool,
) -> Summary:
    """Play a run over a SuperLink, and again from the run's folder `out` whenever the SuperLink is lost. The run sets
    `advanced` after each round."""
    tell(
        "over Flower's SuperLink: whoever reaches the port can disturb or stop the run, and messages are not signed; "
        "without --engine flower they are"
    )
    certificates = None if insecure else (own.ca, own.certificate, own.key)
    superlink = SuperLink(host, port, out.with_name(f"{out.name}.flower"), own.secret, certificates)
    roots = None if insecure else own.ca.read_bytes()
    public = [] if insecure else public_node_keys(own.roster)
    failures = 0
    while True:
        advanced.clear()
        try:
            with superlink, FlowerRun(superlink.address, own.secret.read_bytes(), roots, public) as run:
                tell(f"listening at {host}:{port}{' without TLS' if insecure else ''}")
                return play(FlowerLines(run, own.roster.directory(), plan.run.deadline_seconds, tell))
        except TransportError as fault:
            failures = 0 if advanced.is_set() else failures + 1
            if failures >= MOST_RESTARTS or not (out / "plan.toml").exists():
                raise
            tell(f"{fault}; starting Flower's SuperLink again")
