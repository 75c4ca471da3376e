"""Clients to attack, in the mode that promises most."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from baffle.plan import Plan
from tests.attacks.hostile_server import HostileServer, Victims, keys_of

MODES = ("on", "malicious-server")
CLIENTS = 5


def hostile_server(folder: Path, tiny: Callable[..., Plan], *settings: str, clients: int = CLIENTS) -> HostileServer:
    """A hostile server with its clients, which have pinned the plan; settings change it."""
    fixed = (
        f"federation.clients={clients}",
        "federation.batch=8",
        "federation.weighting=uniform",
        "rounds=6",
        "secure.mode=on",
    )
    return HostileServer(Victims(folder, keys_of(folder, clients), tiny(*fixed, *settings)))


@pytest.fixture
def attack(tmp_path: Path, tiny: Callable[..., Plan]) -> Callable[..., HostileServer]:
    return partial(hostile_server, tmp_path, tiny)
