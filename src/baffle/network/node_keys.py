"""The keys that admit clients to Flower's SuperLink: one for each client, beside its identity; for Flower alone."""

from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey, EllipticCurvePublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_ssh_private_key,
    load_ssh_public_key,
)

from baffle.errors import KeysError, first_line
from baffle.network.key_files import read_private
from baffle.network.keys import ClientKeys
from baffle.network.rosters import Participant, Roster


def public_node_keys(roster: Roster) -> list[bytes]:
    """The node keys of all clients as PEM, which Flower expects."""
    return [
        _node_key(number, client).public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        for number, client in roster.participants().items()
    ]


def load_node_key(folder: Path, own: ClientKeys) -> EllipticCurvePrivateKey:
    """A client's private node key, which must be the one that the roster names."""
    path = folder / "node.key"
    try:
        node = load_ssh_private_key(read_private(path), None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as fault:
        raise KeysError(f"{path} is not a private key: {first_line(fault)}") from None
    if not isinstance(node, EllipticCurvePrivateKey):
        raise KeysError(f"{path} is of another type than `baffle keys new` makes")
    if _node_key(own.number, own.roster.participants()[own.number]) != node.public_key():
        raise KeysError(f"{path} is not the one in {folder / 'roster.json'}; take both from the same folder")
    return node


def _node_key(number: int, client: Participant) -> EllipticCurvePublicKey:
    try:
        key = load_ssh_public_key(client.node.encode())
    except (ValueError, UnsupportedAlgorithm) as fault:
        raise KeysError(f"the roster's node key of client {number} cannot be read: {fault}") from None
    if not isinstance(key, EllipticCurvePublicKey):
        raise KeysError(f"the roster's node key of client {number} is of another type than `baffle keys new` makes")
    return key
