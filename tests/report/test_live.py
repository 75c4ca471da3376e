"""A live page is read-only, serves this machine alone, and does not affect the run."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPResponse
from itertools import product
from pathlib import Path
from threading import Thread

import pytest

from baffle.journal.audit import verify
from baffle.plan import Plan
from baffle.report.live import LivePage, LiveRun, status_of
from baffle.report.record import read_run
from baffle.simulation import simulate
from tests.support.lines_in_memory import Federation, new_keys
from tests.support.prometheus import parse


@contextmanager
def _served(folder: Path) -> Iterator[LivePage]:
    with LivePage(LiveRun(folder), 0) as server:
        thread = Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def _ask(server: LivePage, path: str, method: str = "GET", host: str = "") -> tuple[HTTPResponse, bytes]:
    connection = HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    try:
        connection.putrequest(method, path, skip_host=bool(host))
        if host:
            connection.putheader("Host", host)
        connection.endheaders()
        answer = connection.getresponse()
        return answer, answer.read()
    finally:
        connection.close()


def test_it_shows_the_page_its_news_and_metrics_as_a_server_would_count_them(finished_run: Path) -> None:
    with _served(finished_run) as server:
        answer, page = _ask(server, "/")
        assert answer.status == 200
        assert b'data-live="/data.json"' in page
        assert b"connect-src &#x27;self&#x27;" in page
        news = json.loads(_ask(server, "/data.json")[1])
        assert news["over"] is True
        assert "6" in news["parts"]["overview"]
        assert [line["name"] for line in news["lines"]] == ["tiny"]
        answer, script = _ask(server, "/plotly.js?v=1")
        assert answer.status == 200
        assert len(script) > 1_000_000
        assert _ask(server, "/", "HEAD")[1] == b""
        found = parse(_ask(server, "/metrics")[1].decode())
    run = read_run(finished_run)
    assert found["baffle_rounds_done_total"].value == 6
    assert found["baffle_uplink_bytes_total"].value == sum(metrics.uplink_bytes for metrics in run.rounds)
    assert found["baffle_accuracy_ratio"].value == run.summary["test_accuracy"]
    assert not [name for name in found if "connected" in name or "uptime" in name]
    assert status_of(run).rounds_done == 6


HOSTS = ("evil.example", "evil.example:9095", "127.0.0.1", "127.0.0.1:1", "[::1]:9095", " ")


def test_it_answers_only_to_its_own_name_and_address_and_gives_no_file_away(finished_run: Path) -> None:
    """Otherwise any web page could read the run by DNS rebinding."""
    with _served(finished_run) as server:
        assert server.server_address[0] == "127.0.0.1"
        for host, path in product(HOSTS, ("/", "/data.json", "/metrics")):
            answer, body = _ask(server, path, host=host)
            assert (answer.status, b"tiny" in body) == (421, False), (host, path)
        for path in ("/plan.toml", "/../plan.toml", "/journal.sqlite", "/%2e%2e/plan.toml"):
            assert _ask(server, path)[0].status == 404, path
        for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"):
            answer, _ = _ask(server, "/", method)
            assert (answer.status, answer.headers["Allow"]) == (405, "GET, HEAD"), method


def test_a_folder_that_cannot_be_read_and_a_port_that_is_taken_are_said(
    cli: Callable[..., subprocess.CompletedProcess[str]], finished_run: Path, tmp_path: Path
) -> None:
    journal = finished_run / "journal.sqlite"
    kept = journal.read_bytes()
    with _served(finished_run) as server:
        assert _ask(server, "/data.json")[0].status == 200
        journal.write_bytes(b"damaged" * 1000)
        answer, why = _ask(server, "/data.json")
        assert answer.status == 503
        assert b"cannot be read" in why
        journal.write_bytes(kept)
        assert _ask(server, "/data.json")[0].status == 200
        done = cli("watch", finished_run, "--port", server.server_port)
    assert done.returncode == 2
    assert "give another with --port" in done.stderr
    assert "holds no run" in cli("watch", tmp_path / "nothing", "--port", "0").stderr


def test_a_networked_run_is_shown_too(tiny: Callable[..., Plan], tmp_path: Path) -> None:
    federation = Federation(new_keys(tmp_path, 4), tmp_path, tiny("federation.clients=4", 'secure.mode="on"'))
    federation.serve(federation.lines(4))
    with _served(federation.run) as server:
        news = json.loads(_ask(server, "/data.json")[1])
    assert "over a network" in news["parts"]["state"]
    assert "does not know it" in news["parts"]["partition-0"]
    assert "baffle run --as" in news["parts"]["origins"]


@pytest.mark.slow
def test_watching_does_not_disturb_a_run_in_another_process(
    start: Callable[..., "subprocess.Popen[str]"], tiny: Callable[..., Plan], tiny_toml: Path, tmp_path: Path
) -> None:
    settings = ("rounds=400", "secure.mode=on", "probe.k=32", "run.commit_seconds=0")
    alone = simulate(tiny(*settings), tmp_path / "alone")
    folder = tmp_path / "my run"
    options = [part for setting in settings for part in ("--set", setting)]
    process = start("run", tiny_toml, "--out", folder, *options, "--json")
    limit = time.monotonic() + 120
    while not (folder / "plan.toml").exists():
        assert time.monotonic() < limit
        time.sleep(0.01)
    seen = list[int]()
    with _served(folder) as server:
        while process.poll() is None:
            assert time.monotonic() < limit
            answer, data = _ask(server, "/data.json")
            assert answer.status == 200, data
            lines = json.loads(data)["lines"]
            seen.append(lines[0]["rounds"][-1] if lines[0]["rounds"] else 0)
        stdout, stderr = process.communicate()
        assert process.returncode == 0, stderr
        assert json.loads(_ask(server, "/data.json")[1])["over"] is True
    assert len(set(seen)) > 1
    assert seen == sorted(seen)
    assert json.loads(stdout)["weights_sha256"] == alone["weights_sha256"]
    assert verify(folder).weights_sha256 == alone["weights_sha256"]
    assert {file.name for file in folder.iterdir()} == {"journal.sqlite", "metrics.jsonl", "plan.toml", "summary.json"}


@pytest.mark.slow
def test_the_command_serves_until_it_is_interrupted(
    start: Callable[..., "subprocess.Popen[str]"], finished_run: Path
) -> None:
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONPATH": ":".join(sys.path)}
    process = start("watch", finished_run, "--port", "0", env=environment)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith(f"watching {finished_run} at http://127.0.0.1:")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (0, "ended; the run goes on\n", "")
