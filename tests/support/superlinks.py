"""A real SuperLink, with or without TLS and node keys, and clients that echo."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from secrets import token_bytes
from threading import Thread
from typing import TYPE_CHECKING

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from cryptography.x509.oid import NameOID

from baffle.flower.node import FlowerNode, IncomingMessage
from baffle.flower.superlink import QUIET, answers

if TYPE_CHECKING:
    from baffle.flower.grid_transport import GridTransport
    from baffle.flower.run import FlowerRun


class Superlink:
    """An unmodified `flower-superlink` as a process that can be killed and started again."""

    def __init__(self, folder: Path, guarded: bool) -> None:
        self._folder = folder
        self.secret = token_bytes(32)
        (folder / "secret").write_bytes(self.secret)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port: int = probe.getsockname()[1]
        self.address = f"127.0.0.1:{self._port}"
        self.roots = certify(folder) if guarded else None
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        address = ["--host", "127.0.0.1", "--port", str(self._port)]
        access = ["--isolation", "process", "--superexec-auth-secret-file", "secret"]
        if self.roots:
            access += ["--ssl-ca-certfile", "ca.pem", "--ssl-certfile", "server.pem", "--ssl-keyfile", "server.key"]
            access += ["--enable-supernode-auth", "--database", "state.db"]
        else:
            access += ["--insecure"]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [Path(sys.executable).with_name("flower-superlink"), *address, *access],
                cwd=self._folder,
                env={**os.environ, **QUIET, "FLWR_HOME": str(self._folder)},
                stdout=log,
                stderr=log,
            )

    def wait(self) -> None:
        """Wait until it answers."""
        for _ in range(400):
            if answers(self.address, self._folder / "ca.pem" if self.roots else None):
                return
            time.sleep(0.1)
        pytest.fail((self._folder / "log").read_text())

    def kill(self) -> None:
        if self._process:
            self._process.kill()
            self._process.wait()


class Echo:
    """A client in a thread that answers each message with its own content, and collects what it reports in `told`."""

    def __init__(
        self,
        link: Superlink,
        key: ec.EllipticCurvePrivateKey | None = None,
        answer: Callable[[FlowerNode, IncomingMessage], None] = lambda client, message: client.reply(
            message, message.content
        ),
        known: int = 0,
    ) -> None:
        self.told: list[str] = []
        self.client = FlowerNode(link.address, link.roots, key, self.told.append, known=known)
        self._answer = answer
        self._thread = Thread(target=self._work)
        self._thread.start()

    def _work(self) -> None:
        with self.client as client:
            for message in client.messages():
                self._answer(client, message)

    def node(self) -> int:
        """Its number, once it has joined."""
        until(lambda: self.client.number != 0)
        return self.client.number

    def leave(self) -> None:
        self.client.stop()
        self._thread.join()


Join = Callable[..., Echo]
"""Starts a client with the arguments of `Echo`."""


class Echoes:
    """Clients 0, 1, … on these nodes, over a grid."""

    def __init__(self, transport: "GridTransport", nodes: list[int]) -> None:
        self._transport, self._nodes = transport, nodes

    def exchange(self, requests: Mapping[int, bytes]) -> Mapping[int, bytes]:
        replies = self._transport.exchange({self._nodes[client]: data for client, data in requests.items()})
        return {self._nodes.index(node): data for node, data in replies.items()}


def transport_to(run: "FlowerRun", nodes: list[int], seconds: float = 30, told: dict[int, str] | None = None) -> Echoes:
    """A transport on which clients 0, 1, … are these nodes. `told` collects why clients failed."""
    from baffle.flower.grid_transport import GridTransport

    reasons = {} if told is None else told

    def tell(node: int, why: str) -> None:
        reasons[nodes.index(node)] = why

    return Echoes(GridTransport(run.grid, seconds, tell), nodes)


def until(condition: Callable[[], bool], seconds: float = 40) -> None:
    """Wait until the condition holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP384R1())


def public(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def certify(folder: Path) -> bytes:
    """Write a certificate authority and a certificate that it issues for this machine; returns the authority's."""

    def certificate(
        subject: str, public_key: ec.EllipticCurvePublicKey, issuer: str, signer: ec.EllipticCurvePrivateKey, ca: bool
    ) -> bytes:
        now = datetime.now(UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)]))
            .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
            .public_key(public_key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(minutes=1))
            .not_valid_after(now + timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
            .sign(signer, hashes.SHA256())
            .public_bytes(Encoding.PEM)
        )

    authority, server = new_key(), new_key()
    roots = certificate("authority", authority.public_key(), "authority", authority, ca=True)
    (folder / "ca.pem").write_bytes(roots)
    (folder / "server.pem").write_bytes(certificate("server", server.public_key(), "authority", authority, ca=False))
    (folder / "server.key").write_bytes(server.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return roots
