"""A network of four clients for every test that starts real processes."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from baffle.network.authority import make_keys
from tests.support.networks import Network


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys") / "keys"
    make_keys(folder, 4, ["127.0.0.1"])
    return folder


@pytest.fixture
def network(keys: Path, tmp_path: Path) -> Iterator[Network]:
    network = Network(tmp_path, keys, [])
    yield network
    network.stop()
