"""An operator's console: asks a server how its run goes."""

import ssl
from contextlib import closing
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPSConnection, RemoteDisconnected

import msgspec

from baffle.errors import AwayError, TransportError, one_line
from baffle.network.keys.folders import OperatorKeys
from baffle.network.link.client import client_tls, split
from baffle.network.status import Status

SECONDS = 10.0  # how long a server may take for each step of an answer
MOST_BYTES = 1 << 20  # a longer answer is no status


def fetch_status(address: str, keys: OperatorKeys, *, tls: bool = True, seconds: float = SECONDS) -> Status:
    """The status of the server at an address (host:port). The token is sent only once the server has shown a
    certificate of the operator's CA for this host, unless `tls` is off."""
    host, port = split(address)
    try:
        code, body = _ask(host, port, keys, seconds, tls=tls)
    except (OSError, HTTPException, ValueError) as fault:
        raise _error(address, fault, tls=tls) from None
    if code == HTTPStatus.NOT_FOUND:
        raise TransportError(
            f"{address} does not show its status: either the token in this folder is not that server's, or it is no "
            "BAFFLE server; take the folder `operator` from the `baffle keys new` that made the server's keys"
        )
    if code != HTTPStatus.OK:
        raise _no_server(address, f"expected status code 200, got {code}")
    if len(body) > MOST_BYTES:
        raise _no_server(address, f"expected at most {MOST_BYTES:,} bytes")
    try:
        return msgspec.json.decode(body, type=Status)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as fault:
        raise _no_server(address, f"expected a status: {fault}") from None


def _ask(host: str, port: int, keys: OperatorKeys, seconds: float, *, tls: bool) -> tuple[int, bytes]:
    connection = HTTPConnection(host, port, timeout=seconds)
    if tls:
        connection = HTTPSConnection(host, port, timeout=seconds, context=client_tls(keys))
    with closing(connection):
        connection.request("GET", "/status", headers={"Authorization": f"Bearer {keys.token}", "Connection": "close"})
        with connection.getresponse() as response:
            return response.status, response.read(MOST_BYTES + 1)


def _no_server(address: str, why: str) -> TransportError:
    return TransportError(
        f"{address} does not answer as a BAFFLE server does ({one_line(why)}); give the host:port of a `baffle serve`"
    )


def _error(address: str, fault: Exception, *, tls: bool) -> TransportError:
    if isinstance(fault, ssl.SSLCertVerificationError):
        return TransportError(
            f"the certificate of {address} was not issued by the CA in this folder, or is for another host "
            f"({fault.verify_message}); take the folder `operator` from the `baffle keys new` that made the server's "
            "keys, and give a host that the server's certificate is for"
        )
    if isinstance(fault, RemoteDisconnected | ConnectionResetError | ssl.SSLError):
        other = "with --insecure if the server runs with it" if tls else "without --insecure if the server has TLS"
        return TransportError(
            f"{address} ends the connection without an answer; try again {other}, or in a minute if many attempts have "
            "failed"
        )
    if isinstance(fault, OSError | UnicodeError):
        why = getattr(fault, "strerror", None) or str(fault) or "no answer in time"
        return AwayError(f"{address} cannot be reached ({why}); start the server, or give its host:port")
    return _no_server(address, str(fault) or type(fault).__name__)
