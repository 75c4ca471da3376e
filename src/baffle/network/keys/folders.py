"""What a client, or an operator's console, reads from a folder that authority.py made.

A client's identity signs its messages. The roster holds the public keys of all clients and of the server. An authority,
whose private key stays offline, signs it; its public key lies in each folder as authority.pub. A later roster takes its
place (rosters.py). A client's marks, which it must not forget, lie beside its identity.

Certificates are left to the TLS library here, and the one kind of private key is read by hand: libraries that parse
them take memory that a small client lacks.
"""

import re
import ssl
from base64 import b64decode
from dataclasses import dataclass, field, replace
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from baffle.errors import KeysError
from baffle.network.keys.rosters import Roster, load_authority, load_roster, only_line, read

_PRIVATE_PEM = re.compile(rb"-----BEGIN PRIVATE KEY-----\s+([A-Za-z0-9+/=\s]+)-----END PRIVATE KEY-----")
_ED25519 = bytes.fromhex("302e020100300506032b657004220420")  # stands before the 32 bytes of the key in PKCS #8
MARKS_FILE = "marks"  # beside a client's identity.key, holds what this key must not forget; made empty, with the key


@dataclass(frozen=True)
class ClientKeys:
    """A client's number, its private key, the certificate of the CA that it trusts, the roster, the public key of the
    authority that signs rosters, and the folder of all this."""

    number: int
    identity: Ed25519PrivateKey
    ca: bytes
    roster: Roster
    authority: bytes
    folder: Path

    @classmethod
    def load(cls, folder: Path) -> "ClientKeys":
        roster, authority = load_roster(folder), load_authority(folder)
        identity = load_identity(folder / "identity.key")
        number = roster.number_of(identity.public_key().public_bytes_raw())
        if number is None:
            raise KeysError(
                f"{folder / 'identity.key'} is not a client's in {folder / 'roster.json'}; if it was not revoked, take"
                " both from the same folder"
            )
        keys = cls(number, identity, _certificate(folder / "ca.pem"), roster, authority, folder)
        if not keys.marks.is_file():
            raise KeysError(
                f"{keys.marks} is missing, and without its marks this key could be asked twice; the federation's "
                "authority must make a new key: `baffle keys revoke`, then `baffle keys add`"
            )
        return keys

    @property
    def marks(self) -> Path:
        return self.folder / MARKS_FILE

    def under(self, roster: Roster) -> "ClientKeys":
        number = roster.number_of(self.identity.public_key().public_bytes_raw())
        if number is None:
            raise KeysError(f"this client's key is not in roster {roster.number}: it was revoked")
        return replace(self, number=number, roster=roster)


@dataclass(frozen=True)
class OperatorKeys:
    """The certificate of the CA that an operator's console trusts, and the token that it shows to the server."""

    ca: bytes
    token: str = field(repr=False)

    @classmethod
    def load(cls, folder: Path) -> "OperatorKeys":
        return cls(_certificate(folder / "ca.pem"), load_token(folder))


def load_identity(path: Path) -> Ed25519PrivateKey:
    """The Ed25519 key in a PEM file (PKCS #8, not encrypted)."""
    match = _PRIVATE_PEM.fullmatch(read(path, private=True).strip())
    try:
        der = b64decode(match[1]) if match else b""
    except ValueError:
        der = b""
    if not der.startswith(_ED25519) or len(der) != len(_ED25519) + 32:
        raise KeysError(f"{path} is not a private key; expected an Ed25519 key that `baffle keys new` made")
    return Ed25519PrivateKey.from_private_bytes(der[len(_ED25519) :])


def load_token(folder: Path) -> str:
    """The operator's token. A server shows its status to everybody who has it."""
    path = folder / "operator.token"
    what = "a token: expected 32 to 256 printable ASCII characters"
    return only_line(path, read(path, private=True), rb"[!-~]{32,256}", what)


def _certificate(path: Path) -> bytes:
    pem = read(path)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=pem.decode())
    except (ValueError, TypeError, ssl.SSLError):  # text that is not ASCII is a TypeError
        raise KeysError(f"{path} is not a certificate; expected one that `baffle keys new` made") from None
    return pem
