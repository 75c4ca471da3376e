"""keys, serve and join refuse bad input with one line."""

import fcntl
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from baffle.cli.keys import keys as commands
from baffle.network.authority import DAYS, ServerKeys

Cli = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def keys(cli: Cli, tmp_path: Path) -> Path:
    done = cli("keys", "new", tmp_path / "keys", "--clients", 2, "--host", "127.0.0.1")
    assert done.returncode == 0
    assert "client-0 … client-1" in done.stdout
    assert "authority.key" in done.stdout.splitlines()[-1]
    return tmp_path / "keys"


def refused(done: subprocess.CompletedProcess[str], words: str) -> None:
    assert done.returncode == 2
    assert words in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert "Traceback" not in done.stderr


def test_keys_are_never_overwritten(cli: Cli, keys: Path) -> None:
    refused(cli("keys", "new", keys, "--clients", 2), "not empty")


def test_a_new_certificate_is_for_the_same_hosts_or_for_those_given(cli: Cli, keys: Path) -> None:
    done = cli("keys", "certificate", keys)
    assert (done.returncode, done.stderr) == (0, "")
    assert "for 127.0.0.1 and valid until" in done.stdout
    assert f"Copy {keys}/server/server.pem and {keys}/server/server.key to the server" in done.stdout
    assert "restart the server" in done.stdout
    done = cli("keys", "certificate", keys, "--host", "fl.example.org", "--days", 7)
    assert "for fl.example.org, 127.0.0.1 and valid until" in done.stdout
    assert ServerKeys.load(keys / "server").hosts == ("fl.example.org", "127.0.0.1")


def test_what_keys_are_made_for_is_checked(cli: Cli, keys: Path, tmp_path: Path) -> None:
    refused(cli("keys", "certificate", tmp_path), "expected a folder that `baffle keys new` made")
    refused(cli("keys", "certificate", keys, "--host", "fl.example.org:9092"), "no port")
    refused(cli("keys", "new", tmp_path / "long", "--clients", 2, "--days", 36_501), "expected 1 to 36,500 days")
    refused(cli("keys", tmp_path / "keys", "--clients", 2), "No such command")


def test_days_have_one_default() -> None:
    for name in ("new", "certificate", "renew"):
        assert [option.default for option in commands.commands[name].params if option.name == "days"] == [DAYS]


@pytest.mark.parametrize("command", ["serve", "join"])
def test_a_folder_without_keys_is_named(cli: Cli, tmp_path: Path, command: str) -> None:
    arguments = {"serve": ["digits", "--out", tmp_path / "run"], "join": ["127.0.0.1:1", "--state", tmp_path / "state"]}
    refused(
        cli(command, *arguments[command], "--keys", tmp_path / "none"), "expected a folder that `baffle keys new` made"
    )


def test_a_plan_whose_clients_are_stacked_is_for_simulations_alone(cli: Cli, keys: Path, tmp_path: Path) -> None:
    serve = ("serve", "digits-crowd", "--keys", keys / "server", "--host", "127.0.0.1", "--port", 0)
    join = ("join", "127.0.0.1:1", "--keys", keys / "client-0", "--state", tmp_path / "state", "--plan", "digits-crowd")
    for command in ((*serve, "--out", tmp_path / "run"), join):
        done = cli(*command)
        assert done.returncode == 2
        assert "error: probe.stacked: each client of a network has a machine of its own; leave it out" in done.stderr
        assert "--set probe.stacked=false" in done.stderr
    assert not (tmp_path / "run" / "plan.toml").exists()


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
    other = os.open(keys / "client-0", os.O_RDONLY)
    try:
        fcntl.flock(other, fcntl.LOCK_EX)
        refused(cli(*join, "--state", state), "in use by another client; each needs its own --keys")
    finally:
        os.close(other)
    (tmp_path / "file").touch()
    refused(cli(*join, "--state", tmp_path / "file"), "cannot be used")


def test_a_malformed_address_is_refused(cli: Cli, keys: Path, tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    (state / "node").write_text("damaged")
    refused(cli("join", "nowhere", "--keys", keys / "client-0", "--state", state), "host:port")


def test_a_policy_that_cannot_be_read_is_refused(cli: Cli, keys: Path, tmp_path: Path) -> None:
    """A client must not join with the defaults because its own file has a mistake."""
    join = ("join", "127.0.0.1:1", "--keys", keys / "client-0", "--state", tmp_path / "state")
    refused(cli(*join, "--policy", tmp_path / "none.toml"), "none.toml cannot be read")
    (tmp_path / "policy.toml").write_text("flor = 4")
    refused(cli(*join, "--policy", tmp_path / "policy.toml"), "did you mean floor?")


def test_who_belongs_is_changed_by_three_commands(cli: Cli, keys: Path) -> None:
    done = cli("keys", "add", keys, "--count", 2)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"{keys}/client-2 is for the new client 2." in done.stdout
    assert f"{keys}/client-3 is for the new client 3." in done.stdout
    assert "Roster 2 has 4 clients and is valid until" in done.stdout
    assert f"Copy {keys}/server/roster.json to the server's folder of keys." in done.stdout
    assert "before its next round and hands it on to its clients; nobody needs a restart." in done.stdout
    done = cli("keys", "revoke", keys, 3, 1)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Revoked: 1, 3. `baffle keys add` gives their places to others." in done.stdout
    assert "Roster 3 has 2 clients" in done.stdout
    done = cli("keys", "add", keys)
    assert f"{keys}/client-1 is for the new client 1." in done.stdout
    done = cli("keys", "renew", keys, "--days", 9000)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Roster 5 has 3 clients" in done.stdout
    assert list(ServerKeys.load(keys / "server").roster.directory()) == [0, 1, 2]


def test_who_belongs_is_changed_only_with_the_authoritys_key(cli: Cli, keys: Path) -> None:
    refused(cli("keys", "revoke", keys, 5), "there is no client 5 in roster 1; it has 0, 1")
    refused(cli("keys", "revoke", keys, 0, 1), "one must be left")
    refused(cli("keys", "renew", keys, "--days", 3), "give more --days")
    (keys / "authority.key").chmod(0o644)
    for command in (("add", keys), ("revoke", keys, 1), ("renew", keys, "--days", 9000)):
        refused(cli("keys", *command), f"chmod 600 {keys / 'authority.key'}")
    (keys / "authority.key").unlink()
    for command in (("add", keys), ("revoke", keys, 1), ("renew", keys, "--days", 9000)):
        refused(cli("keys", *command), "authority.key is missing; put the authority's key there")


def test_a_client_whose_key_is_open_or_whose_marks_are_lost_does_not_start(
    cli: Cli, keys: Path, tmp_path: Path
) -> None:
    join = ("join", "127.0.0.1:1", "--keys", keys / "client-0", "--state", tmp_path / "state", "--insecure")
    (keys / "client-0" / "identity.key").chmod(0o644)
    refused(cli(*join), f"make it private: chmod 600 {keys / 'client-0' / 'identity.key'}")
    (keys / "client-0" / "identity.key").chmod(0o600)
    (keys / "client-0" / "marks").unlink()
    refused(cli(*join), "without its marks this key could be asked twice")
