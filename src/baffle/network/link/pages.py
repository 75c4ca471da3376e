"""What the server's port answers besides the link: whether it is alive, for everybody; how the run goes, for whoever
has the operator's token. Everything else is not found."""

import hmac
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any

import msgspec
from websockets.datastructures import Headers
from websockets.http11 import Request, Response

Status = Mapping[str, Any]

HEALTH = "/health"
FOR_OPERATORS = ("/status", "/metrics")


class Pages:
    """Answers plain requests. `status` says how the run goes at the moment."""

    def __init__(self, token: str, status: Callable[[], Status] = dict) -> None:
        self._token, self._status = token, status

    def answer(self, request: Request) -> Response:
        if request.method not in ("GET", "HEAD"):
            return _page(HTTPStatus.NOT_FOUND, "not found\n")
        if request.path == HEALTH:
            return _page(HTTPStatus.OK, "ok\n")
        if request.path not in FOR_OPERATORS or not self._is_operator(request):
            return _page(HTTPStatus.NOT_FOUND, "not found\n")
        status = self._status()
        if request.path == "/status":
            return _page(HTTPStatus.OK, msgspec.json.encode(status).decode() + "\n", "application/json")
        return _page(HTTPStatus.OK, prometheus(status), "text/plain; version=0.0.4")

    def _is_operator(self, request: Request) -> bool:
        given = request.headers.get_all("Authorization")
        expected = f"Bearer {self._token}"
        return bool(self._token) and len(given) == 1 and hmac.compare_digest(given[0].encode(), expected.encode())


def prometheus(status: Status) -> str:
    """A status as Prometheus reads it: a line for each number, and one for each entry of a mapping of numbers."""
    lines: list[str] = []
    for name, value in status.items():
        metric = f"baffle_{name}"
        if isinstance(value, bool | int | float):
            lines.append(f"{metric} {float(value):g}")
        elif isinstance(value, Mapping):
            numbers = {key: number for key, number in value.items() if isinstance(number, int | float)}
            lines += [f'{metric}{{of="{key}"}} {float(number):g}' for key, number in numbers.items()]
    return "\n".join(lines) + "\n"


def _page(status: HTTPStatus, text: str, kind: str = "text/plain") -> Response:
    body = text.encode()
    headers = Headers(
        [("Connection", "close"), ("Content-Length", str(len(body))), ("Content-Type", f"{kind}; charset=utf-8")]
    )
    return Response(status.value, status.phrase, headers, body)
