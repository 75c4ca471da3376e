"""Makes the keys of a federation: once, on a trusted machine, to be handed out.

    keys/authority.key                   signs rosters                  } not needed by any running
    keys/ca.key, keys/ca.pem             issue server certificates      } process: keep them offline
    keys/server/…                        the server's identity, its certificate and key for TLS, the operator's token,
                                         a secret between Flower's processes, the roster and the authority's public
                                         key; in nodes/ the clients' public node keys, for a SuperLink of your own
    keys/client-0/, keys/client-1/ …     one folder for each client: its two private keys, an empty file for its marks,
                                         the CA's certificate, the roster and the authority's public key
    keys/operator/                       for whoever watches the server: the CA's certificate and the operator's token

Each client gets the roster from here and not from the server, so the server cannot add clients that it made up.
membership.py makes later rosters.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import (
    SECP256R1,
    SECP384R1,
    EllipticCurvePrivateKey,
    generate_private_key,
)
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)

from baffle.errors import KeysError, first_line
from baffle.files import make_folder
from baffle.network.certificates import hosts_in, load_certificate, new_ca, new_certificate
from baffle.network.key_files import read_private
from baffle.network.keys import MARKS_FILE, load_identity, load_token
from baffle.network.node_keys import public_node_keys
from baffle.network.rosters import MOST_CLIENTS, Participant, Roster, load_authority, load_roster

DAYS = 3650
"""How long certificates and rosters are valid if nobody says otherwise."""

MOST_DAYS = 36_500
SECRET_BYTES = 32


@dataclass(frozen=True)
class ServerKeys:
    """The server's identity, the files that TLS and Flower's processes read, the hosts that its certificate is for, the
    operator's token, the roster, the public key of the authority that signs rosters, and the folder of all this."""

    identity: Ed25519PrivateKey
    ca: Path
    certificate: Path
    key: Path
    hosts: tuple[str, ...]
    secret: Path
    token: str
    roster: Roster
    authority: bytes
    folder: Path

    @classmethod
    def load(cls, folder: Path) -> "ServerKeys":
        roster = load_roster(folder)
        public_node_keys(roster)  # raises if one of them cannot be read
        identity = load_identity(folder / "identity.key")
        if identity.public_key().public_bytes_raw() != roster.server_key:
            raise KeysError(
                f"{folder / 'identity.key'} is not the server's in {folder / 'roster.json'};"
                " take both from the same `baffle keys new`"
            )
        ca, certificate, key, secret = (folder / name for name in ("ca.pem", "server.pem", "server.key", "secret"))
        hosts = hosts_in(_checked_certificate(ca, certificate, key))
        if len(read_private(secret)) < SECRET_BYTES:
            raise KeysError(f"{secret} is shorter than {SECRET_BYTES} bytes; expected one that `baffle keys new` made")
        token, authority = load_token(folder), load_authority(folder)
        return cls(identity, ca, certificate, key, hosts, secret, token, roster, authority, folder)

    def under(self, roster: Roster) -> "ServerKeys":
        """The same keys under a later roster of the same authority."""
        public_node_keys(roster)
        if self.identity.public_key().public_bytes_raw() != roster.server_key:
            raise KeysError(f"roster {roster.number} names another server than this one")
        return replace(self, roster=roster)


@dataclass(frozen=True)
class NewClient:
    """The private keys of a new client."""

    identity: Ed25519PrivateKey
    node: EllipticCurvePrivateKey

    @classmethod
    def generate(cls) -> "NewClient":
        return cls(Ed25519PrivateKey.generate(), generate_private_key(SECP384R1()))

    def participant(self) -> Participant:
        public = self.node.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
        return Participant(_public(self.identity), public.decode())

    def files(self) -> dict[str, bytes]:
        """The files that are this client's alone."""
        node = self.node.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
        return {"identity.key": _pem(self.identity), "node.key": node, MARKS_FILE: b""}


def make_keys(folder: Path, clients: int, hosts: Sequence[str], days: int = DAYS) -> None:
    """Write the keys of a new federation into a new folder. `hosts` are the names or addresses at which clients will
    reach the server, `days` is how long its certificate and the roster are valid."""
    try:
        occupied = folder.exists() and any(folder.iterdir())
    except OSError as fault:
        raise KeysError(f"{folder} cannot be used: {fault.strerror or fault}; give a new folder") from None
    if occupied:
        raise KeysError(f"{folder} is not empty; keys are made only once: give a new folder")
    if not 1 <= clients <= MOST_CLIENTS:
        raise KeysError(f"expected 1 to {MOST_CLIENTS:,} clients, got {clients}")
    expiry = in_days(days)
    authority, server = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
    members = [NewClient.generate() for _ in range(clients)]
    participants = tuple(member.participant() for member in members)
    roster = sign_roster(Roster(1, moment(expiry), _public(server), participants, ""), authority)
    ca_key = generate_private_key(SECP256R1())
    ca = new_ca(ca_key)
    tls_key = generate_private_key(SECP256R1())
    certificate = new_certificate(tls_key, ca, ca_key, hosts, expiry)

    for_all = {"ca.pem": _certificate_pem(ca)}
    for_members = for_all | {"authority.pub": f"{_public(authority)}\n".encode(), "roster.json": roster.encode()}
    for_operators = {"operator.token": f"{secrets.token_hex(SECRET_BYTES)}\n".encode()}
    write_files(folder, for_all | {"authority.key": _pem(authority), "ca.key": _pem(ca_key)})
    own = {
        "identity.key": _pem(server),
        "server.pem": _certificate_pem(certificate),
        "server.key": _pem(tls_key),
        "secret": secrets.token_hex(SECRET_BYTES).encode(),
    }
    write_files(folder / "server", for_members | for_operators | own)
    write_files(folder / "server" / "nodes", {f"client-{n}.pub": c.node.encode() for n, c in enumerate(participants)})
    write_files(folder / "operator", for_all | for_operators)
    for number, member in enumerate(members):
        write_files(folder / f"client-{number}", for_members | member.files())


def sign_roster(unsigned: Roster, authority: Ed25519PrivateKey) -> Roster:
    return msgspec.structs.replace(unsigned, signature=authority.sign(unsigned.signed_text()).hex())


def renew_certificate(folder: Path, hosts: Sequence[str] = (), days: int = DAYS) -> x509.Certificate:
    """Replace server.pem and server.key in a folder that `make_keys` made. Clients need nothing new: they trust the CA.
    Without `hosts`, the new certificate is for the same ones as the present certificate."""
    ca_file, ca_key_file, present = folder / "ca.pem", folder / "ca.key", folder / "server" / "server.pem"
    ca, ca_key = load_certificate(ca_file), load_private(ca_key_file)
    if not isinstance(ca_key, EllipticCurvePrivateKey) or ca_key.public_key() != ca.public_key():
        raise KeysError(f"{ca_key_file} is not the key of {ca_file}; take both from the same `baffle keys new`")
    if not hosts and not present.exists():
        raise KeysError(f"{present} is missing, so its hosts are not known; give the server's names and addresses")
    key = generate_private_key(SECP256R1())
    certificate = new_certificate(key, ca, ca_key, hosts or hosts_in(load_certificate(present)), in_days(days))
    _replace(folder / "server", {"server.pem": _certificate_pem(certificate), "server.key": _pem(key)})
    return certificate


def in_days(days: int) -> datetime:
    if not 1 <= days <= MOST_DAYS:
        raise KeysError(f"expected 1 to {MOST_DAYS:,} days, got {days}")
    return datetime.now(UTC).replace(microsecond=0) + timedelta(days=days)


def moment(when: datetime) -> str:
    """A moment as rosters write it."""
    return f"{when:%Y-%m-%dT%H:%M:%SZ}"


def _public(key: Ed25519PrivateKey) -> str:
    return key.public_key().public_bytes_raw().hex()


def _pem(key: EllipticCurvePrivateKey | Ed25519PrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _certificate_pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(Encoding.PEM)


def write_files(folder: Path, files: dict[str, bytes]) -> None:
    """Write files that only their owner can read."""
    for name, data in files.items():
        path = folder / name
        try:
            make_folder(folder)
            path.touch(mode=0o600)
            path.write_bytes(data)
        except OSError as fault:
            raise KeysError(f"{path} cannot be written: {fault.strerror or fault}") from None


def _replace(folder: Path, files: dict[str, bytes]) -> None:
    """Write files that only their owner can read in place of older ones, once all of them are complete."""
    new = {name: folder / f".{name}.new" for name in files}
    try:
        for path in new.values():
            path.unlink(missing_ok=True)
        write_files(folder, {path.name: files[name] for name, path in new.items()})
        for name, path in new.items():
            path.replace(folder / name)
    except OSError as fault:
        raise KeysError(f"{folder} cannot be changed: {fault.strerror or fault}") from None


def load_private(path: Path) -> object:
    """The private key of any type in a PEM file."""
    try:
        return load_pem_private_key(read_private(path), None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as fault:
        raise KeysError(f"{path} is not a private key: {first_line(fault)}") from None


def _checked_certificate(ca: Path, certificate: Path, key: Path) -> x509.Certificate:
    """The server's certificate, if the CA issued it for this key and it has not expired."""
    own = load_certificate(certificate)
    try:
        own.verify_directly_issued_by(load_certificate(ca))
        public = own.public_key()
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
        raise KeysError(f"{certificate} was not issued by {ca}; take both from the same `baffle keys new`") from None
    private = load_private(key)
    if not isinstance(private, EllipticCurvePrivateKey) or private.public_key() != public:
        raise KeysError(f"{key} is not the key of {certificate}; take both from the same folder")
    if datetime.now(UTC) >= own.not_valid_after_utc:
        raise KeysError(
            f"{certificate} expired at {own.not_valid_after_utc:%Y-%m-%dT%H:%M:%SZ};"
            " make a new one with `baffle keys certificate`"
        )
    return own
