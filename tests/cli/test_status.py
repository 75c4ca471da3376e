"""`baffle status`, with real servers: what it shows, and what it says when it cannot."""

import json
import shutil
import signal
import sqlite3
import ssl
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from baffle.cli.results import rows
from baffle.errors import one_line
from baffle.network.link.server import Link
from baffle.network.status import Status
from tests.support.command_line import Cli, loaded_by, refused, setting
from tests.support.links import Keys, link_with_pages, new_keys
from tests.support.prometheus import parse

Start = Callable[..., "subprocess.Popen[str]"]

PATIENCE = 120.0


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return new_keys(tmp_path_factory.mktemp("keys") / "keys")


@pytest.fixture(scope="module")
def keys(served: Keys) -> Path:
    return served.folder


@pytest.fixture
def link(served: Keys) -> Iterator[Link]:
    with link_with_pages(served) as link:
        yield link


def test_it_shows_a_table_or_one_object(cli: Cli, link: Link, keys: Path) -> None:
    done = cli("status", f"localhost:{link.port}", "--keys", keys / "operator")
    assert (done.returncode, done.stderr) == (0, "")
    shown = {line[:18].strip(): line[18:] for line in done.stdout.splitlines()}
    assert shown["now"] == "starting"
    assert shown["epsilon"] == "not counted: the run is not private"
    assert shown["connected"] == "0"
    assert shown["seconds a round"] == shown["loss"] == shown["test accuracy"] == "–"
    done = cli("status", f"127.0.0.1:{link.port}", "--keys", keys / "operator", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    status = msgspec.json.decode(done.stdout, type=Status)
    assert json.loads(done.stdout).keys() == set(Status.__struct_fields__)
    assert (status.doing, status.epsilon) == ("starting", None)


def test_errors_are_one_line(cli: Cli, link: Link, keys: Path, tmp_path: Path) -> None:
    address, operator = f"127.0.0.1:{link.port}", keys / "operator"
    other, mixed = new_keys(tmp_path / "other", 1).folder / "operator", tmp_path / "mixed"
    shutil.copytree(operator, mixed)
    shutil.copy(other / "operator.token", mixed)
    for arguments, words in (
        ([address, "--keys", other], "was not issued by the CA in this folder"),
        ([address, "--keys", mixed], "either the token in this folder is not that server's"),
        ([address, "--keys", operator, "--insecure"], "try again without --insecure"),
        (["127.0.0.1:1", "--keys", operator], "cannot be reached (Connection refused)"),
        (["nowhere", "--keys", operator], "host:port"),
        ([address, "--keys", tmp_path / "none"], "expected a folder that `baffle keys new` made"),
        ([tmp_path / "none"], "holds no run; to ask a server at that address, give --keys"),
    ):
        refused(cli("status", *arguments), words)


def test_a_servers_words_are_shown_without_control_characters() -> None:
    status = Status("\x1b[2J", "a\nb", "\x07", "on", "waiting", waits_for="\r\x1b]0;x\x07", silent={"\x1b": 1})
    full = msgspec.structs.replace(
        status, loss=1e308, accuracy=0.5, epsilon=1.25, recent_round_seconds=1e15, median_round_seconds=0.25
    )
    for value in (*rows(status).values(), *rows(full).values()):
        assert one_line(value, 2_500).isprintable()


def test_it_imports_nothing_heavy(link: Link, keys: Path) -> None:
    _, loaded = loaded_by("status", f"127.0.0.1:{link.port}", "--keys", keys / "operator")
    heavy = {"torch", "sklearn", "scipy", "flwr", "onnxruntime", "sqlite3", "baffle.plan", "baffle.network.server"}
    assert not loaded & heavy


@pytest.mark.slow
def test_a_server_is_watched_from_its_start_to_its_end(
    cli: Cli, start: Start, keys: Path, tiny_toml: Path, tmp_path: Path
) -> None:
    """A server and three clients as processes of their own. One of them is stopped, and the server waits for it."""
    settings = setting("secure.mode=on", "rounds=10000", "run.evaluate_every=5")
    folders = ("--keys", keys / "server", "--out", tmp_path / "first")
    server = start("serve", tiny_toml, *settings, *folders, "--host", "127.0.0.1", "--port", 0)
    assert server.stderr
    address = next(line for line in server.stderr if "listening at" in line).split()[-1]
    operator = keys / "operator"

    def status_when(so: Callable[[Status], bool]) -> Status:
        limit = time.monotonic() + PATIENCE
        while time.monotonic() < limit:
            done = cli("status", address, "--keys", operator, "--json")
            if done.returncode == 0 and so(status := msgspec.json.decode(done.stdout, type=Status)):
                return status
            time.sleep(0.1)
        pytest.fail(f"waited in vain: {done}")

    waiting = status_when(lambda status: status.doing == "waiting")
    assert (waiting.run, waiting.plan, waiting.secure) == ("first", "tiny", "on")
    assert waiting.waits_for == "0 clients are here, 3 are needed to begin"
    assert (waiting.clients_on_roster, waiting.clients_needed, waiting.clients_connected) == (3, 3, 0)

    own = [("--keys", keys / f"client-{number}", "--state", tmp_path / str(number), "--part") for number in range(3)]
    clients = [start("join", address, *options) for options in own]
    playing = status_when(lambda status: status.rounds_done > 20)
    assert (playing.doing, playing.connected, playing.taking_part) == ("playing", "0-2", "0-2")
    assert playing.waits_for is None
    assert None not in (playing.accuracy, playing.loss)
    assert playing.received_bytes > playing.uplink_bytes > 0
    assert playing.sent_bytes > playing.downlink_bytes > 0
    assert 0 < (playing.median_round_seconds or 0) < playing.uptime_seconds
    table = cli("status", address, "--keys", operator).stdout
    assert "3: 0-2" in table
    assert "first, plan tiny" in table

    token = {"Authorization": f"Bearer {(operator / 'operator.token').read_text().strip()}"}
    trust = ssl.create_default_context(cafile=operator / "ca.pem")
    metrics = urllib.request.Request(f"https://{address}/metrics", headers=token)
    with urllib.request.urlopen(metrics, context=trust) as answer:
        shown = parse(answer.read().decode())
    assert shown["baffle_rounds_done_total"].value > 20
    assert shown["baffle_clients_connected"].value == 3

    clients[1].send_signal(signal.SIGTERM)
    alone = status_when(lambda status: status.doing == "waiting")
    assert (alone.connected, alone.taking_part) == ("0, 2", "0, 2")
    assert alone.waits_for == "2 clients are here, 3 are needed"
    assert alone.rounds_done >= playing.rounds_done


def test_the_folder_of_a_run_tells_how_it_went_and_what_was_refused(cli: Cli, finished_run: Path) -> None:
    with sqlite3.connect(finished_run / "journal.sqlite") as db:
        record = json.loads(db.execute("SELECT record FROM metrics WHERE round = 2").fetchone()[0])
        record |= {"refusals": 1, "refused": ["client 1: a vector of 3 values, \x1b[31mexpected 4"]}
        db.execute("UPDATE metrics SET record = ? WHERE round = 2", (json.dumps(record),))
    db.close()
    done = cli("status", finished_run)
    assert (done.returncode, done.stderr) == (0, "")
    shown = {line[:18].strip(): line[18:] for line in done.stdout.splitlines()}
    assert shown["now"] == "finished"
    assert shown["rounds"] == "6 of 6, 0 skipped"
    assert shown["refused"] == "client 1: a vector of 3 values, [31mexpected 4 (1 times: round 3)"
    assert "connected" not in shown
    told = json.loads(cli("status", finished_run, "--json").stdout)
    assert told["refused"] == [{"words": "client 1: a vector of 3 values, [31mexpected 4", "rounds": [3]}]
    assert told["rounds_done"] == 6
