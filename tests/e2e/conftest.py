"""A network of four clients for every test that starts real processes."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from baffle.network.keys.authority import make_keys
from tests.support.networks import Network


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    """New keys, too: with them lie the marks of everything that a client has answered."""
    make_keys(tmp_path / "keys", 4, ["127.0.0.1"])
    network = Network(tmp_path, tmp_path / "keys", [])
    yield network
    network.stop()
