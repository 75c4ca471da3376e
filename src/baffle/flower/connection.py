"""A connection to a Flower SuperLink: protobuf calls over HTTP on one connection that stays open, each signed with the
client's key."""

import http.client
import json
import re
import ssl
import time
from base64 import b64encode
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from baffle.errors import AwayError, MessageError, TransportError
from baffle.flower.wire import Wire, decode, encode

FLOWER = "1.41"
"""The version of Flower whose wire format this is."""

_REUSE_SIGNATURE = 60.0
"""Seconds for which a signed time is used again; SuperLink accepts it for five minutes."""

_HEADERS = {
    "content-type": "application/protobuf",
    "accept": "application/protobuf",
    "flwr-package-name": "flwr",
    "flwr-package-version": f"{FLOWER}.0",
    "flwr-component-name": "SuperNode",
}


class CallError(TransportError):
    """SuperLink answered a call with an error. Has the HTTP status and Flower's code (0 if the answer has none)."""

    def __init__(self, message: str, status: int, code: int) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class Identity:
    """A client's key, and its clock. A client proves to SuperLink who it is by signing the time of day."""

    def __init__(self, key: ec.EllipticCurvePrivateKey) -> None:
        self._key = key
        self.public = key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        self._ahead = 0.0  # seconds that the server's clock is ahead of ours
        self._signed: tuple[float, dict[str, str]] = (-_REUSE_SIGNATURE, {})

    def now(self) -> float:
        """The time of day by the server's clock."""
        return time.time() + self._ahead

    def headers(self) -> dict[str, str]:
        """The headers that sign a call."""
        signed_at, headers = self._signed
        if time.monotonic() - signed_at >= _REUSE_SIGNATURE:
            stamp = datetime.fromtimestamp(self.now(), UTC).isoformat()
            signature = self._key.sign(stamp.encode(), ec.ECDSA(hashes.SHA256()))
            headers = {
                "flwr-public-key": b64encode(self.public).decode(),
                "flwr-timestamp": stamp,
                "flwr-signature": b64encode(signature).decode(),
            }
            self._signed = time.monotonic(), headers
        return headers

    def set_clock(self, date: str | None) -> float:
        """Set the clock by a server's `Date`; returns the seconds it was off, or 0 if it was right to a few seconds."""
        offset = parsedate_to_datetime(date).timestamp() - self.now() if date else 0.0
        if abs(offset) < 3:
            return 0.0
        self._ahead += offset
        self._signed = (-_REUSE_SIGNATURE, {})
        return offset


class Connection:
    """Calls to one server, one at a time. Without a TLS context they are not encrypted."""

    def __init__(self, address: str, tls: ssl.SSLContext | None, identity: Identity, timeout: float) -> None:
        self.address = address
        self._identity = identity
        host, port = _split(address)
        self._connection = (
            http.client.HTTPSConnection(host, port, timeout=timeout, context=tls)
            if tls
            else http.client.HTTPConnection(host, port, timeout=timeout)
        )

    def call(self, path: str, request: Wire, answer: str) -> Wire:
        """SuperLink's answer. Raises `AwayError` if nobody answers or the server has an internal error, and
        `CallError` if it refuses."""
        body = encode(request)
        status, date, data = self._request("POST", f"/v1/fleet/{path}", body)
        if status == 401 and self._identity.set_clock(date):
            status, date, data = self._request("POST", f"/v1/fleet/{path}", body)
        if status == 200:
            try:
                return decode(answer, data)
            except MessageError as fault:
                raise TransportError(f"{self.address} does not answer {path} as Flower {FLOWER} does") from fault
        if status == 404 and b"code" not in data:
            raise TransportError(f"{self.address} does not know {path}: expected a Flower {FLOWER} SuperLink")
        code, detail = _error_in(data)
        if status >= 500:
            raise AwayError(f"{self.address} has an internal error ({status} {detail})")
        raise CallError(f"{self.address} refuses {path}: {detail} ({code or status})", status, code)

    def check_version(self) -> None:
        """Refuse a SuperLink of another version, if the server shows its version."""
        status, _, data = self._request("GET", "/openapi.json", b"")
        shown = re.search(rb'"title":"SuperLink API","version":"([^"]+)"', data[:1000])
        version = shown[1].decode() if status == 200 and shown else ""
        if version and not version.startswith(f"{FLOWER}."):
            raise TransportError(
                f"{self.address} runs Flower {version}, expected {FLOWER}: use that version on both sides"
            )

    def close(self) -> None:
        self._connection.close()

    def _request(self, method: str, path: str, body: bytes) -> tuple[int, str | None, bytes]:
        was_open = self._connection.sock is not None
        try:
            return self._send(method, path, body)
        except TimeoutError as fault:
            raise AwayError(f"{self.address} does not answer") from fault
        except (http.client.HTTPException, OSError) as fault:
            if not was_open:
                raise self._explain(fault) from fault
        try:  # the server closes a connection that was quiet for a few seconds
            return self._send(method, path, body)
        except (http.client.HTTPException, OSError) as fault:
            raise self._explain(fault) from fault

    def _send(self, method: str, path: str, body: bytes) -> tuple[int, str | None, bytes]:
        try:
            self._connection.request(method, path, body, _HEADERS | self._identity.headers())
            response = self._connection.getresponse()
            return response.status, response.headers["date"], response.read()
        except BaseException:
            self._connection.close()
            raise

    def _explain(self, fault: Exception) -> TransportError:
        """Our error for a request that failed."""
        if isinstance(fault, ssl.SSLCertVerificationError):
            return TransportError(
                f"the certificate of {self.address} was not issued by the given roots, or is for another address "
                f"({fault.verify_message}): check the address and the file of roots"
            )
        if isinstance(fault, ssl.SSLError) and fault.reason in {"WRONG_VERSION_NUMBER", "HTTP_REQUEST"}:
            return TransportError(f"{self.address} answers without TLS: expected TLS, as roots were given")
        if isinstance(fault, http.client.RemoteDisconnected | http.client.BadStatusLine | ConnectionResetError):
            return AwayError(f"{self.address} closed the connection (a server with TLS does so if no roots are given)")
        return AwayError(f"{self.address} cannot be reached ({getattr(fault, 'strerror', None) or fault})")


def _split(address: str) -> tuple[str, int]:
    """Host and port."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise TransportError(f"expected an address as host:port, got {address!r}")
    return host.strip("[]"), int(port)


def _error_in(data: bytes) -> tuple[int, str]:
    """Flower's code and detail, from the body of an error."""
    try:
        error = json.loads(data)
        return int(error.get("code", 0)), str(error.get("detail", ""))
    except (ValueError, AttributeError, TypeError):
        return 0, "no reason given"
