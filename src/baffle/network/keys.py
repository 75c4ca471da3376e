"""What a client, or an operator's console, reads from a folder that authority.py made.

A client's identity signs its messages. The roster holds the public keys of all clients and of the server. An authority,
whose private key stays offline, signs it; its public key lies in each folder as authority.pub. Clients on Flower have a
second key (node_keys.py).

Certificates are left to the TLS library here, and the one kind of private key is read by hand: libraries that parse
them take memory that a small client lacks.
"""

import re
import ssl
from base64 import b64decode
from dataclasses import dataclass, field
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Annotated

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from baffle.aggregation.context import length_prefixed, signed
from baffle.errors import KeysError
from baffle.files import read_file

_PRIVATE_PEM = re.compile(rb"-----BEGIN PRIVATE KEY-----\s+([A-Za-z0-9+/=\s]+)-----END PRIVATE KEY-----")
_ED25519 = bytes.fromhex("302e020100300506032b657004220420")
"""What stands before the 32 bytes of an Ed25519 key in PKCS #8."""

MOST_CLIENTS = 100_000
MOST_NODE_KEY_LETTERS = 300
MOST_ROSTER_BYTES = 1_000 + MOST_CLIENTS * (MOST_NODE_KEY_LETTERS + 200)
MOST_KEY_FILE_BYTES = 100_000
"""Of any file but the roster: a key, a certificate, a secret."""

PublicKey = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
Signature = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{128}\Z")]
Moment = Annotated[str, msgspec.Meta(pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z\Z")]


class Participant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A client's public keys: its identity as 64 hexadecimal digits, its node key in OpenSSH's format."""

    identity: PublicKey
    node: Annotated[str, msgspec.Meta(max_length=MOST_NODE_KEY_LETTERS)]


class Roster(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The server, and all clients that may take part in the order of their numbers.

    A later roster of the same federation has a higher number. `signature` is the authority's, and empty until
    `authority.sign_roster` has signed.
    """

    number: Annotated[int, msgspec.Meta(ge=1, le=2**53)]
    expires: Moment
    server: PublicKey
    clients: Annotated[tuple[Participant, ...], msgspec.Meta(min_length=1, max_length=MOST_CLIENTS)]
    signature: Signature

    @property
    def server_key(self) -> bytes:
        """The server's public identity."""
        return bytes.fromhex(self.server)

    @property
    def expiry(self) -> datetime:
        return datetime.fromisoformat(self.expires)

    def directory(self) -> dict[int, bytes]:
        """Client number → public identity."""
        return {number: bytes.fromhex(client.identity) for number, client in enumerate(self.clients)}

    def signed_text(self) -> bytes:
        """What the authority signs: every field but the signature."""
        head = (str(self.number).encode(), self.expires.encode(), self.server_key)
        clients = (key for client in self.clients for key in (bytes.fromhex(client.identity), client.node.encode()))
        return b"baffle/roster/2" + length_prefixed(*head, *clients)

    def hash(self) -> bytes:
        """One hash for everything that the authority signed."""
        return sha256(self.signed_text()).digest()

    def encode(self) -> bytes:
        """The roster as its file holds it."""
        return msgspec.json.encode(self)


class _RosterOfVersion1(msgspec.Struct, forbid_unknown_fields=True):
    clients: tuple[Participant, ...]


@dataclass(frozen=True)
class ClientKeys:
    """A client's number, its private key, the certificate of the CA that it trusts, and the roster."""

    number: int
    identity: Ed25519PrivateKey
    ca: bytes
    roster: Roster

    @classmethod
    def load(cls, folder: Path) -> "ClientKeys":
        roster = load_roster(folder)
        identity = load_identity(folder / "identity.key")
        own = identity.public_key().public_bytes_raw()
        number = next((number for number, public in roster.directory().items() if public == own), None)
        if number is None:
            raise KeysError(
                f"{folder / 'identity.key'} is not a client's in {folder / 'roster.json'};"
                " take both from the same folder"
            )
        return cls(number, identity, _certificate(folder / "ca.pem"), roster)


@dataclass(frozen=True)
class OperatorKeys:
    """The certificate of the CA that an operator's console trusts, and the token that it shows to the server."""

    ca: bytes
    token: str = field(repr=False)

    @classmethod
    def load(cls, folder: Path) -> "OperatorKeys":
        return cls(_certificate(folder / "ca.pem"), load_token(folder))


def read(path: Path, most: int = MOST_KEY_FILE_BYTES) -> bytes:
    try:
        return read_file(path, most)
    except OSError as fault:
        raise KeysError(
            f"{path} cannot be read: {fault.strerror or fault}; expected a folder that `baffle keys new` made"
        ) from None


def load_roster(folder: Path) -> Roster:
    """The roster in a folder, if the authority whose key lies beside it signed it and it has not expired."""
    path, beside = folder / "roster.json", folder / "authority.pub"
    data = read(path, MOST_ROSTER_BYTES)
    roster = _decode_roster(path, data)
    if not signed(_public_key(beside), bytes.fromhex(roster.signature), roster.signed_text()):
        raise KeysError(f"{path} is not signed by the authority of {beside}; take both from the same `baffle keys new`")
    if roster.encode() != data:
        raise KeysError(f"{path} is not written as `baffle keys new` writes it; take the original file")
    _require_no_key_twice(path, roster)
    _require_not_expired(path, roster)
    return roster


def _decode_roster(path: Path, data: bytes) -> Roster:
    try:
        return msgspec.json.decode(data, type=Roster)
    except (msgspec.MsgspecError, UnicodeDecodeError) as fault:
        if _is_of_version_1(data):
            raise KeysError(
                f"{path} was made by an earlier version of BAFFLE, which did not sign it; make new keys with"
                " `baffle keys new`"
            ) from None
        raise KeysError(f"{path} is not a roster: {fault}") from None


def _is_of_version_1(data: bytes) -> bool:
    try:
        msgspec.json.decode(data, type=_RosterOfVersion1)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return False
    return True


def _require_no_key_twice(path: Path, roster: Roster) -> None:
    holders = {roster.server: "the server"}
    for number, client in enumerate(roster.clients):
        if client.identity in holders:
            raise KeysError(
                f"{path} gives client {number} the identity of {holders[client.identity]}; expected one for each:"
                " make new keys with `baffle keys new`"
            )
        holders[client.identity] = f"client {number}"


def _require_not_expired(path: Path, roster: Roster) -> None:
    try:
        expiry = roster.expiry
    except ValueError:
        raise KeysError(
            f"{path} expires at {roster.expires}, which is no moment; make new keys with `baffle keys new`"
        ) from None
    now = datetime.now(UTC)
    if now >= expiry:
        raise KeysError(
            f"{path} expired at {roster.expires}, and this machine's clock says {now:%Y-%m-%dT%H:%M:%SZ};"
            " set the clock if it is wrong, else make new keys with `baffle keys new`"
        )


def load_identity(path: Path) -> Ed25519PrivateKey:
    """The Ed25519 key in a PEM file (PKCS #8, not encrypted)."""
    match = _PRIVATE_PEM.fullmatch(read(path).strip())
    try:
        der = b64decode(match[1]) if match else b""
    except ValueError:
        der = b""
    if not der.startswith(_ED25519) or len(der) != len(_ED25519) + 32:
        raise KeysError(f"{path} is not a private key; expected an Ed25519 key that `baffle keys new` made")
    return Ed25519PrivateKey.from_private_bytes(der[len(_ED25519) :])


def load_token(folder: Path) -> str:
    """The operator's token: whoever shows it to a server may see who is connected."""
    path = folder / "operator.token"
    return _matching(path, rb"[!-~]{32,256}", "a token: expected 32 to 256 printable ASCII characters").decode()


def _public_key(path: Path) -> bytes:
    digits = _matching(path, rb"[0-9a-f]{64}", "a public key: expected 64 hexadecimal digits")
    return bytes.fromhex(digits.decode())


def _matching(path: Path, pattern: bytes, expected: str) -> bytes:
    """A file of one line that matches the pattern, without the line's end."""
    line = read(path).removesuffix(b"\n")
    if not re.fullmatch(pattern, line):
        raise KeysError(f"{path} is not {expected}, as `baffle keys new` writes")
    return line


def _certificate(path: Path) -> bytes:
    pem = read(path)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=pem.decode())
    except (ValueError, ssl.SSLError):
        raise KeysError(f"{path} is not a certificate; expected one that `baffle keys new` made") from None
    return pem
