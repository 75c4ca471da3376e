"""Certificates are for the hosts that were named, and for nothing that is no host."""

from datetime import UTC, datetime, timedelta

import pytest
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key

from baffle.errors import KeysError
from baffle.network.certificates import hosts_in, new_ca, new_certificate


def _hosts_of_a_certificate_for(*hosts: str) -> tuple[str, ...]:
    key = generate_private_key(SECP256R1())
    return hosts_in(new_certificate(key, new_ca(key), key, hosts, datetime.now(UTC) + timedelta(days=1)))


def test_hosts_are_names_and_addresses_in_their_order() -> None:
    hosts = ("fl.example.org", "192.0.2.10", "xn--bcher-kva.example", "2001:db8::1", "*.example.org", "a" * 63 + ".b")
    assert _hosts_of_a_certificate_for(*hosts) == hosts


def test_a_ca_has_no_hosts() -> None:
    assert hosts_in(new_ca(generate_private_key(SECP256R1()))) == ()


@pytest.mark.parametrize(
    "host",
    [
        "",
        " ",
        "bücher.example",
        "fl.example.org:9092",
        "[::1]",
        "https://fl.example.org",
        "fl..example",
        ".example",
        "fl.example.org\n",
        "a" * 64,
        "a." * 127 + "a",
    ],
)
def test_what_is_no_host_is_refused(host: str) -> None:
    with pytest.raises(KeysError, match="is not a host: expected an address, or a name in ASCII"):
        _hosts_of_a_certificate_for("localhost", host)
    with pytest.raises(KeysError, match="is not a host"):
        _hosts_of_a_certificate_for(host)
