"""The server's certificate for TLS, and the CA that issues it."""

import ipaddress
import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey as Key
from cryptography.x509.oid import NameOID

from baffle.errors import KeysError, first_line
from baffle.network.keys.rosters import read

NO_END = datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)  # how RFC 5280 writes that a certificate does not expire
DNS_NAME = re.compile(r"(\*\.)?[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*")


def new_ca(key: Key) -> x509.Certificate:
    """A CA's certificate. It does not expire, since it lies in every client's folder; the roster beside it does."""
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
    name = _name("BAFFLE")
    builder = _builder(name, key, name, key, NO_END, is_ca=True).add_extension(usage, critical=True)
    return builder.sign(key, hashes.SHA256())


def new_certificate(
    key: Key, ca: x509.Certificate, ca_key: Key, hosts: Sequence[str], expiry: datetime
) -> x509.Certificate:
    """The certificate of a server that clients reach at `hosts`, which are names and addresses."""
    if not hosts:
        raise KeysError("a server's certificate needs at least one host, got none; give its names and addresses")
    names = x509.SubjectAlternativeName([_host(host) for host in hosts])
    builder = _builder(_name(hosts[0]), key, ca.subject, ca_key, expiry, is_ca=False)
    return builder.add_extension(names, critical=False).sign(ca_key, hashes.SHA256())


def load_certificate(path: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(read(path))
    except (ValueError, x509.InvalidVersion) as fault:
        raise KeysError(f"{path} is not a certificate: {first_line(fault)}") from None


def hosts_in(certificate: x509.Certificate) -> tuple[str, ...]:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, x509.DuplicateExtension, ValueError):
        return ()
    return tuple(str(name.value) for name in names if isinstance(name, x509.DNSName | x509.IPAddress))


def _builder(
    subject: x509.Name, key: Key, issuer: x509.Name, issuer_key: Key, expiry: datetime, *, is_ca: bool
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime.now(UTC) - timedelta(days=1))  # for clients whose clock is slow
        .not_valid_after(expiry)
        .add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), critical=False)
    )


def _name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])


def _host(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        pass
    if len(name) > 253 or not DNS_NAME.fullmatch(name):
        expected = "an address, or a name in ASCII (xn--… for others), and no port"
        raise KeysError(f"{name!r} is not a host: expected {expected}")
    return x509.DNSName(name)
