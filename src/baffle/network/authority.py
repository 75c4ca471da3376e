"""Makes the keys of a federation: once, on a trusted machine, to be handed out.

    keys/ca.key                          signs server certificates; not needed after this: keep it offline
    keys/server/…                        certificate and key for TLS, a secret between Flower's processes, the roster;
                                         in nodes/ the clients' public node keys, for a SuperLink that you run yourself
    keys/client-0/, keys/client-1/ …     one folder for each client: its two private keys, the CA, the roster

Each client gets the roster from here and not from the server, so the server cannot add clients that it made up.
"""

import ipaddress
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
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
from cryptography.x509.oid import NameOID

from baffle.errors import KeysError
from baffle.network.keys import Participant, Roster, load_private, load_roster, read

LIFETIME = timedelta(days=3650)
SECRET_BYTES = 32
MOST_CLIENTS = 100_000


@dataclass(frozen=True)
class ServerKeys:
    """The server's keys: files for Flower's processes, and the roster."""

    ca: Path
    certificate: Path
    key: Path
    secret: Path
    roster: Roster

    @classmethod
    def load(cls, folder: Path) -> "ServerKeys":
        ca, certificate, key, secret = (folder / name for name in ("ca.pem", "server.pem", "server.key", "secret"))
        authority = _load_certificate(ca)
        own = _load_certificate(certificate)
        try:
            own.verify_directly_issued_by(authority)
        except (ValueError, TypeError, InvalidSignature):
            raise KeysError(f"{certificate} was not issued by {ca}; take both from the same `baffle keys`") from None
        private = load_private(key, load_pem_private_key)
        if not isinstance(private, EllipticCurvePrivateKey) or private.public_key() != own.public_key():
            raise KeysError(f"{key} is not the key of {certificate}; take both from the same `baffle keys`")
        if len(read(secret)) < SECRET_BYTES:
            raise KeysError(f"{secret} is shorter than {SECRET_BYTES} bytes; expected one that `baffle keys` made")
        roster = load_roster(folder)
        roster.node_keys()  # raises if one of them cannot be read
        return cls(ca, certificate, key, secret, roster)


def make_keys(folder: Path, clients: int, hosts: Sequence[str]) -> None:
    """Write the keys of a new federation into a new folder. `hosts` are the names or addresses at which clients will
    reach the server."""
    try:
        occupied = folder.exists() and any(folder.iterdir())
    except OSError as fault:
        raise KeysError(f"{folder} cannot be used: {fault.strerror or fault}; give a new folder") from None
    if occupied:
        raise KeysError(f"{folder} is not empty; keys are made only once: give a new folder")
    if not 1 <= clients <= MOST_CLIENTS:
        raise KeysError(f"expected 1 to {MOST_CLIENTS:,} clients, got {clients}")
    identities = [Ed25519PrivateKey.generate() for _ in range(clients)]
    nodes = [generate_private_key(SECP384R1()) for _ in range(clients)]
    roster = Roster(tuple(map(_participant, identities, nodes)))
    roster_file = msgspec.json.encode(roster)
    ca_key = generate_private_key(SECP256R1())
    server_key = generate_private_key(SECP256R1())
    authority = _certificate("BAFFLE", ca_key, None, ca_key, hosts=())
    certificate = _certificate(hosts[0], server_key, authority, ca_key, hosts=hosts)
    ca = authority.public_bytes(Encoding.PEM)
    _write(folder / "ca.key", _pem(ca_key))
    for name, data in {
        "ca.pem": ca,
        "server.pem": certificate.public_bytes(Encoding.PEM),
        "server.key": _pem(server_key),
        "secret": secrets.token_hex(SECRET_BYTES).encode(),
        "roster.json": roster_file,
    }.items():
        _write(folder / "server" / name, data)
    for number, client in enumerate(roster.clients):
        _write(folder / "server" / "nodes" / f"client-{number}.pub", client.node.encode())
    for number, (identity, node) in enumerate(zip(identities, nodes, strict=True)):
        own = folder / f"client-{number}"
        _write(own / "identity.key", _pem(identity))
        _write(own / "node.key", node.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
        _write(own / "ca.pem", ca)
        _write(own / "roster.json", roster_file)


def _participant(identity: Ed25519PrivateKey, node: EllipticCurvePrivateKey) -> Participant:
    public = node.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    return Participant(identity.public_key().public_bytes_raw().hex(), public.decode())


def _certificate(
    name: str,
    key: EllipticCurvePrivateKey,
    issuer: x509.Certificate | None,
    issuer_key: EllipticCurvePrivateKey,
    hosts: Sequence[str],
) -> x509.Certificate:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])
    now = datetime.now(UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer.subject if issuer else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))  # for clients whose clock is slow
        .not_valid_after(now + LIFETIME)
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), critical=False)
    )
    if issuer is None:
        usage = x509.KeyUsage(
            digital_signature=False,
            content_commitment=False,
            key_encipherment=False,
            data_encipherment=False,
            key_agreement=False,
            key_cert_sign=True,
            crl_sign=True,
            encipher_only=False,
            decipher_only=False,
        )
        builder = builder.add_extension(usage, critical=True)
    if hosts:
        builder = builder.add_extension(x509.SubjectAlternativeName([_host(host) for host in hosts]), critical=False)
    return builder.sign(issuer_key, hashes.SHA256())


def _host(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        pass
    try:
        return x509.DNSName(name)
    except ValueError:
        raise KeysError(f"{name!r} is not a host: expected an address, or a name in ASCII (xn--… for others)") from None


def _pem(key: EllipticCurvePrivateKey | Ed25519PrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _write(path: Path, data: bytes) -> None:
    """Write a file that only its owner can read."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.touch(mode=0o600)
        path.write_bytes(data)
    except OSError as fault:
        raise KeysError(f"{path} cannot be written: {fault.strerror or fault}") from None


def _load_certificate(path: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(read(path))
    except ValueError as fault:
        raise KeysError(f"{path} is not a certificate: {str(fault).splitlines()[0]}") from None
