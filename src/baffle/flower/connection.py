"""One line to a Flower SuperLink: protobuf calls over one HTTP connection that is kept open, each signed by the
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
"""The version of Flower whose wire this is."""

_FRESH = 60.0
"""Seconds for which a signed time is used again; SuperLink takes it for five minutes."""

_HEADERS = {
    "content-type": "application/protobuf",
    "accept": "application/protobuf",
    "flwr-package-name": "flwr",
    "flwr-package-version": f"{FLOWER}.0",
    "flwr-component-name": "SuperNode",
}


class CallError(TransportError):
    """SuperLink answered a call with a fault: the status of HTTP, and Flower's code (0 where there is none)."""

    def __init__(self, message: str, status: int, code: int) -> None:
        super().__init__(message)
        self.status, self.code = status, code


class Identity:
    """A client's key, and its clock. SuperLink knows a client by the time of day, signed."""

    def __init__(self, key: ec.EllipticCurvePrivateKey) -> None:
        self._key = key
        self.public = key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        self._ahead = 0.0  # of the server's clock before ours, in seconds
        self._signed: tuple[float, dict[str, str]] = (-_FRESH, {})

    def now(self) -> float:
        """The time of day by the server's clock."""
        return time.time() + self._ahead

    def headers(self) -> dict[str, str]:
        made, headers = self._signed
        if time.monotonic() - made >= _FRESH:
            stamp = datetime.fromtimestamp(self.now(), UTC).isoformat()
            signature = self._key.sign(stamp.encode(), ec.ECDSA(hashes.SHA256()))
            headers = {
                "flwr-public-key": b64encode(self.public).decode(),
                "flwr-timestamp": stamp,
                "flwr-signature": b64encode(signature).decode(),
            }
            self._signed = time.monotonic(), headers
        return headers

    def follow(self, date: str | None) -> float:
        """Sets the clock by a server's `Date`; gives by how much, or 0 where it went right to a few seconds."""
        wrong = parsedate_to_datetime(date).timestamp() - self.now() if date else 0.0
        if abs(wrong) < 3:
            return 0.0
        self._ahead += wrong
        self._signed = (-_FRESH, {})
        return wrong


class Connection:
    """Calls to one server, one at a time. Without a context for TLS they are in the clear."""

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
        """What SuperLink answers; `AwayError` if nobody does or the server is in trouble, `CallError` if it says no."""
        body = encode(request)
        status, date, data = self._ask("POST", f"/v1/fleet/{path}", body)
        if status == 401 and self._identity.follow(date):
            status, date, data = self._ask("POST", f"/v1/fleet/{path}", body)
        if status == 200:
            try:
                return decode(answer, data)
            except MessageError as fault:
                raise TransportError(f"{self.address} answers {path} in another way than Flower {FLOWER}") from fault
        if status == 404 and b"code" not in data:
            raise TransportError(f"{self.address} does not know {path}: expected a Flower {FLOWER} SuperLink")
        code, detail = _fault(data)
        if status >= 500:
            raise AwayError(f"{self.address} is in trouble ({status} {detail})")
        raise CallError(f"{self.address} refuses {path}: {detail} ({code or status})", status, code)

    def check_version(self) -> None:
        """Refuses a SuperLink of another version, if the server shows which it is."""
        status, _, data = self._ask("GET", "/openapi.json", b"")
        shown = re.search(rb'"title":"SuperLink API","version":"([^"]+)"', data[:1000])
        version = shown[1].decode() if status == 200 and shown else ""
        if version and not version.startswith(f"{FLOWER}."):
            raise TransportError(
                f"{self.address} runs Flower {version}, expected {FLOWER}: use that version on both sides"
            )

    def close(self) -> None:
        self._connection.close()

    def _ask(self, method: str, path: str, body: bytes) -> tuple[int, str | None, bytes]:
        kept = self._connection.sock is not None
        try:
            return self._once(method, path, body)
        except TimeoutError as fault:
            raise AwayError(f"{self.address} does not answer") from fault
        except (http.client.HTTPException, OSError) as fault:
            if not kept:
                raise self._explain(fault) from fault
        try:  # a server closes a connection that was quiet for some seconds
            return self._once(method, path, body)
        except (http.client.HTTPException, OSError) as fault:
            raise self._explain(fault) from fault

    def _once(self, method: str, path: str, body: bytes) -> tuple[int, str | None, bytes]:
        try:
            self._connection.request(method, path, body, _HEADERS | self._identity.headers())
            response = self._connection.getresponse()
            return response.status, response.headers["date"], response.read()
        except BaseException:
            self._connection.close()
            raise

    def _explain(self, fault: Exception) -> TransportError:
        if isinstance(fault, ssl.SSLCertVerificationError):
            return TransportError(
                f"the certificate of {self.address} is not one that the given roots vouch for "
                f"({fault.verify_message}): check the address and the file of roots"
            )
        if isinstance(fault, ssl.SSLError) and fault.reason in {"WRONG_VERSION_NUMBER", "HTTP_REQUEST"}:
            return TransportError(f"{self.address} answers without TLS: expected TLS, as roots were given")
        if isinstance(fault, http.client.RemoteDisconnected | http.client.BadStatusLine | ConnectionResetError):
            return AwayError(f"{self.address} closed the connection (a server with TLS does, if no roots are given)")
        return AwayError(f"{self.address} cannot be reached ({getattr(fault, 'strerror', None) or fault})")


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise TransportError(f"expected an address as host:port, got {address!r}")
    return host.strip("[]"), int(port)


def _fault(data: bytes) -> tuple[int, str]:
    """Flower's code and words, from the body of an answer that is none."""
    try:
        said = json.loads(data)
        return int(said.get("code", 0)), str(said.get("detail", ""))
    except (ValueError, AttributeError, TypeError):
        return 0, "no reason given"
