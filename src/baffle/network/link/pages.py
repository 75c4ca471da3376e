"""What the server's port answers besides the link: whether it is alive, for everybody; how the run goes, for whoever
has the operator's token. Everything else is not found."""

import hmac
from collections.abc import Callable
from http import HTTPStatus

import msgspec
from websockets.datastructures import Headers
from websockets.http11 import Request, Response

from baffle.network.status import LinkCounts, Status, as_metrics

HEALTH, STATUS, METRICS = "/health", "/status", "/metrics"


class Pages:
    """Answers plain requests. `report` says how the run goes; without one, or without a token, nobody is told."""

    def __init__(self, token: str, report: Callable[[LinkCounts], Status] | None = None) -> None:
        self._token, self._report = token, report

    def answer(self, request: Request, count: Callable[[], LinkCounts]) -> Response:
        """`count` gives the link's own numbers."""
        if request.method not in ("GET", "HEAD"):
            return _not_found()
        if request.path == HEALTH:
            return _page(request, "ok\n", "text/plain")
        if request.path not in (STATUS, METRICS) or self._report is None or not self._is_operator(request):
            return _not_found()
        status = self._report(count())
        if request.path == STATUS:
            return _page(request, msgspec.json.encode(status).decode() + "\n", "application/json")
        return _page(request, as_metrics(status), "text/plain; version=0.0.4")

    def _is_operator(self, request: Request) -> bool:
        given = request.headers.get_all("Authorization")
        expected = f"Bearer {self._token}"
        return bool(self._token) and len(given) == 1 and hmac.compare_digest(given[0].encode(), expected.encode())


def _page(request: Request, text: str, kind: str) -> Response:
    body = text.encode()
    headers = _headers(len(body), kind)
    return Response(200, "OK", headers, body if request.method == "GET" else b"")


def _not_found() -> Response:
    return Response(404, HTTPStatus.NOT_FOUND.phrase, _headers(0, "text/plain"), b"")


def _headers(length: int, kind: str) -> Headers:
    return Headers(
        [
            ("Connection", "close"),
            ("Content-Length", str(length)),
            ("Content-Type", f"{kind}; charset=utf-8"),
            ("Cache-Control", "no-store"),
        ]
    )
