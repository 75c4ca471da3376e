"""How the two ends of a new connection authenticate each other, before the server sends a request.

    client                                   server
    Greeting(nonce, host)            →
                                     ←       Challenge(nonce, signature over both nonces, its key and the host)
    Proof(key, process, signature)   →
                                     ←       Accepted

The server proves its identity first: a client shows its key only to the server that its roster names. Both signatures
cover fresh nonces, so they cannot be replayed. The host is the name that the client called: a server signs only for its
own names, so a greeting cannot be relayed from another address.
"""

import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Annotated

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec import Meta

from baffle.aggregation.context import length_prefixed, signed
from baffle.aggregation.messages import Key, Session, Signature
from baffle.core.messages import Message, decode, encode
from baffle.errors import MessageError, RefusalError

HANDSHAKE_BYTES = 512  # the most bytes that a frame of the handshake may have
PATH = "/link"  # the path at which clients open their websocket
# Why a connection ends: as usual, one end stops, the same key connects again, the handshake or a frame breaks a rule
NORMAL, GOODBYE, REPLACED, REFUSED, WRONG = 1000, 1001, 4001, 4003, 4004


class Greeting(Message, frozen=True, tag="link/2/greeting"):
    """From a client: a fresh nonce, and the name by which it called the server."""

    nonce: Key
    host: Annotated[str, Meta(max_length=255)]


class Challenge(Message, frozen=True, tag="link/2/challenge"):
    """From the server: a fresh nonce, and its signature over both nonces, its key and the host."""

    nonce: Key
    signature: Signature


class Proof(Message, frozen=True, tag="link/2/proof"):
    """From a client: its key, a random name of its process, and its signature over the whole handshake."""

    key: Key
    process: Session
    signature: Signature


class Accepted(Message, frozen=True, tag="link/2/accepted"):
    """From the server: the client may wait for requests now."""


@dataclass
class ServerSide:
    """The server's half. `clients` maps public identities to client numbers; `hosts` are the server's names."""

    identity: Ed25519PrivateKey
    clients: Mapping[bytes, int]
    hosts: Collection[str]
    client: int | None = None  # the number of the client at the other end, once it is authenticated
    process: bytes = b""
    _seen: list[bytes] = field(default_factory=list)

    def take(self, frame: bytes) -> bytes:
        """The answer to the client's next frame. Refuses any frame that breaks the handshake."""
        own = self.identity.public_key().public_bytes_raw()
        if not self._seen:
            greeting, nonce = decode(frame, Greeting), secrets.token_bytes(32)
            if greeting.host not in self.hosts:
                raise RefusalError(f"this server is not called {greeting.host!r}; make a certificate for that name")
            challenge = encode(Challenge(nonce, self.identity.sign(_server_text(nonce, greeting, own))))
            self._seen = [frame, challenge]
            return challenge
        proof = decode(frame, Proof)
        if proof.key not in self.clients:  # before anything is verified, so that strangers cost little
            raise RefusalError("this key is not on the server's roster")
        if not signed(proof.key, proof.signature, _client_text(self._seen, proof.key, proof.process, own)):
            raise RefusalError("this key's owner has not signed the handshake")
        self.client, self.process = self.clients[proof.key], proof.process
        return encode(Accepted())


@dataclass
class ClientSide:
    """The client's half. `server` is the server's public identity, from the roster."""

    identity: Ed25519PrivateKey
    server: bytes
    host: str
    process: bytes
    _seen: list[bytes] = field(default_factory=list)

    def greeting(self) -> bytes:
        self._seen = [encode(Greeting(secrets.token_bytes(32), self.host))]
        return self._seen[0]

    def proof(self, frame: bytes) -> bytes:
        """The client's proof, in answer to a challenge that the server must have signed."""
        challenge, greeting = decode(frame, Challenge), decode(self._seen[0], Greeting)
        if not signed(self.server, challenge.signature, _server_text(challenge.nonce, greeting, self.server)):
            raise MessageError("it is not the server that this client's roster names")
        self._seen.append(frame)
        own = self.identity.public_key().public_bytes_raw()
        signature = self.identity.sign(_client_text(self._seen, own, self.process, self.server))
        return encode(Proof(own, self.process, signature))


def _server_text(nonce: bytes, greeting: Greeting, server: bytes) -> bytes:
    return length_prefixed(b"link/2/server", nonce, greeting.nonce, server, greeting.host.encode())


def _client_text(seen: list[bytes], client: bytes, process: bytes, server: bytes) -> bytes:
    frames = sha256(b"".join(sha256(frame).digest() for frame in seen)).digest()
    return length_prefixed(b"link/2/client", frames, client, server, process)
