"""Whatever the umask, what a networked run leaves on disk is for its owner alone: folders, weights, marks, vectors."""

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from baffle.cli.join import _alone
from baffle.cli.log import Log
from tests.support.lines_in_memory import Federation


@pytest.fixture(autouse=True)
def _careless() -> Iterator[None]:
    """A user whose files everybody can read and change unless a program says otherwise."""
    before = os.umask(0)
    yield
    os.umask(before)


def modes(folder: Path, kind: Callable[[Path], bool]) -> dict[str, int]:
    paths = (folder, *folder.rglob("*"))
    return {str(path.relative_to(folder)): stat.S_IMODE(path.stat().st_mode) for path in paths if kind(path)}


def test_nothing_of_a_run_is_open_to_others(federate: Callable[..., Federation], tmp_path: Path) -> None:
    federation = federate(3)
    for number in range(3):
        with _alone(tmp_path / f"client-{number}", federation.keys[number].folder):
            pass
    federation.serve(federation.lines(3))
    for name in ("run", "client-0", "keys"):
        assert set(modes(tmp_path / name, Path.is_dir).values()) == {0o700}
        assert set(modes(tmp_path / name, Path.is_file).values()) == {0o600}
    run = {Path(name).name for name in modes(tmp_path / "run", Path.is_file)}
    assert run >= {"journal.sqlite", "kept", "plan.toml", "metrics.jsonl", "summary.json"}
    assert {Path(name).name for name in modes(tmp_path / "client-0", Path.is_file)} == {"replica"}
    # A log often comes first, and makes the folder
    Log("text", "server", tmp_path / "log" / "serve.log", quiet=True)("begins")
    assert modes(tmp_path / "log", Path.is_dir) == {".": 0o700}
