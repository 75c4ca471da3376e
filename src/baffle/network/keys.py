"""A client's keys: a node key, which admits it to Flower's SuperLink, and an identity, which signs its messages in
secure sums. The roster holds everybody's public keys.

authority.py makes the keys. Certificates are left to the TLS library here: a library that parses them takes memory that
a small client lacks.
"""

import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey, EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_private_key,
    load_ssh_private_key,
    load_ssh_public_key,
)

from baffle.errors import KeysError


class Participant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A client's public keys: its identity as 64 hexadecimal digits, its node key in OpenSSH's format."""

    identity: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
    node: str


class Roster(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All clients that may take part, in the order of their numbers."""

    clients: tuple[Participant, ...]

    def directory(self) -> dict[int, bytes]:
        """Client number → public identity."""
        return {number: bytes.fromhex(client.identity) for number, client in enumerate(self.clients)}

    def node_keys(self) -> list[bytes]:
        """The node keys as PEM, which Flower expects."""
        return [
            _node_key(number, client).public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
            for number, client in enumerate(self.clients)
        ]


@dataclass(frozen=True)
class ClientKeys:
    """A client's number, its two private keys, the certificate of the CA that it trusts, and the roster."""

    number: int
    identity: Ed25519PrivateKey
    node: EllipticCurvePrivateKey
    ca: bytes
    roster: Roster

    @classmethod
    def load(cls, folder: Path) -> "ClientKeys":
        roster = load_roster(folder)
        identity = load_private(folder / "identity.key", load_pem_private_key)
        node = load_private(folder / "node.key", load_ssh_private_key)
        if not isinstance(identity, Ed25519PrivateKey) or not isinstance(node, EllipticCurvePrivateKey):
            raise KeysError(f"{folder} holds keys of other types than `baffle keys` makes")
        own = identity.public_key().public_bytes_raw()
        numbers = [number for number, public in roster.directory().items() if public == own]
        if len(numbers) != 1:
            raise KeysError(f"{folder / 'roster.json'} names the identity in {folder} {len(numbers)} times, expected 1")
        if _node_key(numbers[0], roster.clients[numbers[0]]) != node.public_key():
            raise KeysError(
                f"{folder / 'node.key'} is not the one in {folder / 'roster.json'}; take both from the same folder"
            )
        return cls(numbers[0], identity, node, _certificate(folder / "ca.pem"), roster)


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as fault:
        raise KeysError(
            f"{path} cannot be read: {fault.strerror or fault}; expected a folder that `baffle keys` made"
        ) from None


def load_roster(folder: Path) -> Roster:
    path = folder / "roster.json"
    try:
        return msgspec.json.decode(read(path), type=Roster)
    except (msgspec.MsgspecError, UnicodeDecodeError) as fault:
        raise KeysError(f"{path} is not a roster: {fault}") from None


def _node_key(number: int, client: Participant) -> EllipticCurvePublicKey:
    try:
        key = load_ssh_public_key(client.node.encode())
    except (ValueError, UnsupportedAlgorithm) as fault:
        raise KeysError(f"the roster's node key of client {number} cannot be read: {fault}") from None
    if not isinstance(key, EllipticCurvePublicKey):
        raise KeysError(f"the roster's node key of client {number} is of another type than `baffle keys` makes")
    return key


def load_private(path: Path, load: Callable[[bytes, bytes | None], object]) -> object:
    try:
        return load(read(path), None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as fault:
        raise KeysError(f"{path} is not a private key: {str(fault).splitlines()[0]}") from None


def _certificate(path: Path) -> bytes:
    pem = read(path)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=pem.decode())
    except (ValueError, ssl.SSLError):
        raise KeysError(f"{path} is not a certificate; expected one that `baffle keys` made") from None
    return pem
