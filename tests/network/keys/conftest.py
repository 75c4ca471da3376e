"""The keys of a federation, and a copy that a test may change."""

import shutil
from pathlib import Path

import pytest

from baffle.network.keys.authority import make_keys


@pytest.fixture(scope="session")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys") / "keys"
    make_keys(folder, 3, ["localhost", "127.0.0.1", "::1"])
    return folder


@pytest.fixture
def keys(federation: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(federation, tmp_path / "keys"))
