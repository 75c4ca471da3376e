"""keys, serve and join: what they say, and bad input that they refuse with one line."""

import fcntl
import os
from pathlib import Path

import pytest

from baffle.cli.keys import keys as commands
from baffle.network.keys.authority import DAYS, ServerKeys
from tests.support.command_line import Cli, refused


@pytest.fixture
def keys(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder `keys` in the working directory, for two clients."""
    monkeypatch.chdir(tmp_path)
    done = cli("keys", "new", "keys", "--clients", 2, "--host", "127.0.0.1")
    assert done.returncode == 0
    assert "client-0 … client-1" in done.stdout
    assert "authority.key" in done.stdout.splitlines()[-1]
    return tmp_path / "keys"


SERVE = "serve digits --keys keys/server --out run --host 127.0.0.1 --port 0"
JOIN = "join 127.0.0.1:1 --keys keys/client-0 --state state"

MISTAKES = {
    "keys new keys --clients 2": "not empty",
    "keys new long --clients 2 --days 36501": "expected 1 to 36,500 days",
    "keys keys --clients 2": "No such command",
    "keys certificate .": "expected a folder that `baffle keys new` made",
    "keys certificate keys --host fl.example.org:9092": "no port",
    "keys revoke keys 5": "there is no client 5 in roster 1; it has 0, 1",
    "keys revoke keys 0 1": "one must be left",
    "keys renew keys --days 3": "give more --days",
    f"{SERVE} --keys none": "expected a folder that `baffle keys new` made",
    f"{SERVE} --engine flower": "or run BAFFLE as a Flower App, see docs/flower.md",
    f"{JOIN} --keys none": "expected a folder that `baffle keys new` made",
    f"{JOIN} --engine flower": "or run BAFFLE as a Flower App, see docs/flower.md",
    f"{JOIN} --plan digits-crowd": "probe.stacked: each client of a network has a machine of its own; leave it out",
    f"{JOIN} --state file": "cannot be used",
    f"{JOIN} --policy none.toml": "none.toml cannot be read",
    f"{JOIN} --policy policy.toml": "did you mean floor?",
    f"{JOIN} --model file --runtime torch": "--model runs on ONNX Runtime; give no --runtime with it",
    f"{JOIN} --model-hash 00": "--model-hash belongs to --model",
    "join nowhere --keys keys/client-0 --state state": "host:port",
    "join nowhere --keys keys/client-0 --state state --engine link": "host:port",
}


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake(cli: Cli, keys: Path, tmp_path: Path, line: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "policy.toml").write_text("flor = 4")
    before = {path: path.read_bytes() for path in keys.rglob("*") if path.is_file()}
    refused(cli(*line.split()), MISTAKES[line])
    assert not (tmp_path / "run").exists()
    assert before == {path: path.read_bytes() for path in keys.rglob("*") if path.is_file()}


@pytest.mark.usefixtures("keys")
def test_a_plan_whose_clients_are_stacked_is_for_simulations_alone(cli: Cli, tmp_path: Path) -> None:
    done = cli(*SERVE.replace("digits", "digits-crowd").split())
    assert done.returncode == 2
    assert "error: probe.stacked: each client of a network has a machine of its own; leave it out" in done.stderr
    assert "--set probe.stacked=false" in done.stderr
    assert not (tmp_path / "run" / "plan.toml").exists()


@pytest.mark.parametrize(("locked", "option"), [("state", "--state"), ("keys/client-0", "--keys")])
def test_a_clients_folder_is_for_one_process(cli: Cli, keys: Path, tmp_path: Path, locked: str, option: str) -> None:
    """It is refused before it has read the marks: those of a process that is about to end would be old ones."""
    (tmp_path / "state").mkdir()
    (keys / "client-0" / "marks").write_bytes(b"no marks\n")
    other = os.open(tmp_path / locked, os.O_RDONLY)
    try:
        fcntl.flock(other, fcntl.LOCK_EX)
        refused(cli(*JOIN.split(), "--insecure"), f"in use by another client; each needs its own {option}")
    finally:
        os.close(other)


def test_a_client_whose_key_is_open_or_whose_marks_are_lost_does_not_start(cli: Cli, keys: Path) -> None:
    (keys / "client-0" / "identity.key").chmod(0o644)
    refused(cli(*JOIN.split()), "make it private: chmod 600 keys/client-0/identity.key")
    (keys / "client-0" / "identity.key").chmod(0o600)
    (keys / "client-0" / "marks").unlink()
    refused(cli(*JOIN.split()), "without its marks this key could be asked twice")


def test_a_new_certificate_is_for_the_same_hosts_or_for_those_given(cli: Cli, keys: Path) -> None:
    done = cli("keys", "certificate", keys)
    assert (done.returncode, done.stderr) == (0, "")
    assert "for 127.0.0.1 and valid until" in done.stdout
    assert f"Copy {keys}/server/server.pem and {keys}/server/server.key to the server" in done.stdout
    assert "restart the server" in done.stdout
    done = cli("keys", "certificate", keys, "--host", "fl.example.org", "--days", 7)
    assert "for fl.example.org, 127.0.0.1 and valid until" in done.stdout
    assert ServerKeys.load(keys / "server").hosts == ("fl.example.org", "127.0.0.1")


def test_days_have_one_default() -> None:
    for name in ("new", "certificate", "renew"):
        assert [option.default for option in commands.commands[name].params if option.name == "days"] == [DAYS]


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
    changes = (("add", keys), ("revoke", keys, 1), ("renew", keys, "--days", 9000))
    (keys / "authority.key").chmod(0o644)
    for command in changes:
        refused(cli("keys", *command), f"chmod 600 {keys / 'authority.key'}")
    (keys / "authority.key").unlink()
    for command in changes:
        refused(cli("keys", *command), "authority.key is missing; put the authority's key there")
