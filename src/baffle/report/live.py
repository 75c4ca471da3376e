"""A run's page while the run goes on: a small server for this machine alone, which only reads the run's folder.

/             the page
/data.json    the content of the page, which it fetches every two seconds
/metrics      the same counts for Prometheus
"""

import json
import sys
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from threading import Lock
from typing import Any

import msgspec

from baffle.core.ports import MISSING
from baffle.errors import BaffleError, PageError
from baffle.network.server.board import Board
from baffle.network.status import PROMETHEUS, RECENT, REMEMBERED, LinkCounts, Status, as_metrics
from baffle.report.charts import Partition, partition_of
from baffle.report.page import Scripts, Shown, content_of, drawing_script, render, script_name
from baffle.report.record import RunRecord, read_run

LOOPBACK = "127.0.0.1"

HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
}


class LiveRun:
    """A run's folder, read again when its files have changed. Threads may share it."""

    def __init__(self, folder: Path, data: Path | None = None) -> None:
        self._folder, self._data = folder, data
        self._lock = Lock()
        self._seen: object = None
        self._run: RunRecord | None = None
        self._partition: Partition | None = None

    def run(self) -> RunRecord:
        """The current state of the run. Its alignment takes a while, so it is measured when the run has ended."""
        with self._lock:
            seen = self._files()
            if self._run is None or seen != self._seen or self._run.state == "going on":
                self._run = read_run(self._folder, measure=(self._folder / "summary.json").is_file())
                self._seen = seen
            return self._run

    def content(self) -> Shown:
        run = self.run()
        with self._lock:
            self._partition = self._partition or partition_of(run, self._data)
        return content_of([run], [self._partition])

    def page(self) -> bytes:
        return render([self.run()], self.content(), Scripts(script_name(), source="/plotly.js"), "/data.json").encode()

    def news(self) -> bytes:
        content = self.content()
        return json.dumps(content.data() | {"parts": content.parts}, allow_nan=False).encode()

    def metrics(self) -> bytes:
        return as_metrics(status_of(self.run()), recorded=True).encode()

    def _files(self) -> list[tuple[str, int, int]]:
        found = []
        for file in sorted([*self._folder.glob("*.*"), *self._folder.glob("baseline/*.*")]):
            with suppress(OSError):  # it has just been removed or replaced
                found.append((str(file), file.stat().st_mtime_ns, file.stat().st_size))
        return found


def status_of(run: RunRecord) -> Status:
    """The run's status, counted as its server would count it."""
    board = Board()
    board.begin(run.folder.resolve().name, run.plan, run.attendance.clients)
    dropouts = sum(ways.get(MISSING, 0) for ways in run.attendance.by_client.values())
    board.open(run.plan, run.metrics, dropouts)
    ends = [0.0, *(metrics.seconds for metrics in run.rounds)]
    paces = [max(0.0, after - before) for before, after in pairwise(ends)][-REMEMBERED:]
    return msgspec.structs.replace(
        board.status(LinkCounts()),
        doing="playing" if run.state == "going on" else "ending",
        seconds_since_round=round(run.quiet_seconds, 3),
        recent_round_seconds=round(fmean(paces[-RECENT:]), 3) if paces else None,
        median_round_seconds=round(median(paces), 3) if paces else None,
    )


class LivePage(ThreadingHTTPServer):
    """Serves a live run on this machine's own address."""

    daemon_threads = True

    def __init__(self, live: LiveRun, port: int) -> None:
        drawing = drawing_script().read_bytes()
        self.pages: dict[str, tuple[str, Callable[[], bytes]]] = {
            "/": ("text/html", live.page),
            "/data.json": ("application/json", live.news),
            "/metrics": (PROMETHEUS, live.metrics),
            "/plotly.js": ("text/javascript", lambda: drawing),
        }
        try:
            super().__init__((LOOPBACK, port), _Answer)
        except OSError as fault:
            raise PageError(
                f"port {port} cannot be used: {fault.strerror or fault}; give another with --port, or 0 for a free one"
            ) from None

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore browsers that disconnect while they are answered."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)

    @property
    def address(self) -> str:
        return f"http://{LOOPBACK}:{self.server_port}/"

    def is_own(self, host: str) -> bool:
        """Whether a request names this server as its host. A request from a web page by DNS rebinding names another."""
        return host in (f"{LOOPBACK}:{self.server_port}", f"localhost:{self.server_port}")


class _Answer(BaseHTTPRequestHandler):
    """The answer to one request."""

    server: LivePage
    server_version, sys_version = "baffle", ""
    timeout = 10.0

    def do_GET(self) -> None:
        if not self.server.is_own(self.headers.get("Host", "")):
            self._send(HTTPStatus.MISDIRECTED_REQUEST, "text/plain", b"this page is for this machine alone\n")
            return
        kind, make = self.server.pages.get(self.path.partition("?")[0], ("", None))
        if make is None:
            self._send(HTTPStatus.NOT_FOUND, "text/plain", b"no such page\n")
            return
        try:
            self._send(HTTPStatus.OK, kind, make())
        except BaffleError as fault:
            self._send(HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", f"{fault}\n".encode())

    do_HEAD = do_GET  # noqa: N815

    def _refuse(self) -> None:
        self._send(HTTPStatus.METHOD_NOT_ALLOWED, "text/plain", b"this page can only be read\n", {"Allow": "GET, HEAD"})

    do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = do_TRACE = do_CONNECT = _refuse  # noqa: N815

    def _send(self, status: HTTPStatus, kind: str, body: bytes, more: dict[str, str] | None = None) -> None:
        self.send_response(status)
        about = {"Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(body))}
        for name, value in (HEADERS | about | (more or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: the page asks every two seconds."""
