"""keys, serve and join refuse bad input with one line."""

import fcntl
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Cli = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def keys(cli: Cli, tmp_path: Path) -> Path:
    done = cli("keys", tmp_path / "keys", "--clients", 2, "--host", "127.0.0.1")
    assert done.returncode == 0
    assert "client-0 … client-1" in done.stdout
    assert "Keep" in done.stdout
    return tmp_path / "keys"


def refused(done: subprocess.CompletedProcess[str], words: str) -> None:
    assert done.returncode == 2
    assert words in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert "Traceback" not in done.stderr


def test_keys_are_never_overwritten(cli: Cli, keys: Path) -> None:
    refused(cli("keys", keys, "--clients", 2), "not empty")


@pytest.mark.parametrize("command", ["serve", "join"])
def test_a_folder_without_keys_is_named(cli: Cli, tmp_path: Path, command: str) -> None:
    arguments = {"serve": ["digits", "--out", tmp_path / "run"], "join": ["127.0.0.1:1", "--state", tmp_path / "state"]}
    refused(cli(command, *arguments[command], "--keys", tmp_path / "none"), "expected a folder that `baffle keys` made")


def test_a_clients_folder_is_for_one_process(cli: Cli, keys: Path, tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    join = ("join", "127.0.0.1:1", "--keys", keys / "client-0", "--insecure")
    other = os.open(state, os.O_RDONLY)
    try:
        fcntl.flock(other, fcntl.LOCK_EX)
        refused(cli(*join, "--state", state), "in use by another client")
    finally:
        os.close(other)
    (tmp_path / "file").touch()
    refused(cli(*join, "--state", tmp_path / "file"), "cannot be used")


def test_a_malformed_address_is_refused(cli: Cli, keys: Path, tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    (state / "node").write_text("damaged")
    refused(cli("join", "nowhere", "--keys", keys / "client-0", "--state", state), "host:port")
