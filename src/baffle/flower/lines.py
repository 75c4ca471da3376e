"""Lines to clients over Flower. Flower knows nodes, not clients, so each node proves once which client it is. (Over the
link, the handshake proves it.)

Messages over Flower are not signed, unlike those over the link: the server believes what a SuperLink delivers.
"""

import secrets
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from baffle.aggregation.context import length_prefixed, signed
from baffle.aggregation.messages import Key, Signature
from baffle.core.messages import Message, Number, decode, encode
from baffle.errors import MessageError
from baffle.network.joining import Reply
from baffle.network.keys.rosters import Roster

if TYPE_CHECKING:
    from baffle.flower.grid_transport import GridTransport

AGAIN = 5.0
"""Seconds until a node that did not prove which client it is is asked again: all clients wait while the server asks."""

Answer = Callable[[bytes], bytes]  # a client: request → reply


class Who(Message, frozen=True, tag="who"):
    """Asks a node which client it is. The challenge is new each time, so an overheard answer is of no use."""

    challenge: Key


class Me(Message, frozen=True, tag="me"):
    """A node's answer: its client's number, signed with that client's key."""

    client: Number
    signature: Signature


def with_identity(identity: Ed25519PrivateKey, number: int, answer: Answer) -> Answer:
    """A client that also answers `Who`."""

    def answer_or_identify(data: bytes) -> bytes:
        try:
            who = decode(data, Who)
        except MessageError:
            return answer(data)
        return encode(Me(number, identity.sign(proof_text(who, number))))

    return answer_or_identify


def proof_text(who: Who, client: int) -> bytes:
    """The text that a client signs to prove its number."""
    return length_prefixed(b"baffle/flower-node/1", who.challenge, client.to_bytes(8, "big"))


class FlowerLines:
    """The nodes of a run that are online, and the clients that they have proved to be. `directory` has the clients'
    public keys, `seconds` is the deadline of an exchange, and `tell` is called with what happens to nodes."""

    def __init__(
        self, transport: "GridTransport", directory: Mapping[int, bytes], seconds: float, tell: Callable[[str], None]
    ) -> None:
        self._transport, self._directory, self._seconds, self._tell = transport, directory, seconds, tell
        self._nodes: dict[int, int] = {}  # client → node
        self._ask_after: dict[int, float] = {}
        self._turned_away: dict[int, str] = {}

    def present(self) -> Mapping[int, object]:
        online = self._transport.nodes()
        self._nodes = {client: node for client, node in self._nodes.items() if node in online}
        now = self._transport.clock.now()
        unknown = [node for node in sorted(online - set(self._nodes.values())) if self._ask_after.get(node, now) <= now]
        if unknown:
            self._identify(unknown)
        return dict(self._nodes)

    def carry(self, requests: Mapping[int, bytes], run: bytes, *, patient: bool = False) -> Mapping[int, bytes]:  # noqa: ARG002
        nodes = {client: self._nodes[client] for client in requests if client in self._nodes}
        replies = self._exchange({node: requests[client] for client, node in nodes.items()})
        return {client: replies[node] for client, node in nodes.items() if node in replies}

    def post(self, requests: Mapping[int, bytes], run: bytes) -> Mapping[int, Reply]:
        """The replies, as futures that are done: over Flower all of them arrive before this returns."""
        replies = self.carry(requests, run)
        futures: dict[int, Reply] = {client: Future() for client in requests}
        for client, future in futures.items():
            future.set_result(replies.get(client))
        return futures

    def admit(self, roster: Roster) -> None:
        before, self._directory = self._directory, roster.directory()
        stay = {client for client, key in self._directory.items() if before.get(client) == key}
        self._nodes = {client: node for client, node in self._nodes.items() if client in stay}

    def expect(self, contribution: int) -> None:
        """SuperLink has limits of its own."""

    def _exchange(self, requests: Mapping[int, bytes]) -> Mapping[int, bytes]:
        return self._transport.exchange(
            requests, self._seconds, lambda node, why: self._tell(f"node {node} failed: {why}")
        )

    def _identify(self, nodes: list[int]) -> None:
        questions = {node: Who(secrets.token_bytes(32)) for node in nodes}
        replies = self._exchange({node: encode(who) for node, who in questions.items()})
        self._ask_after |= dict.fromkeys(nodes, self._transport.clock.now() + AGAIN)
        for node, data in replies.items():
            try:
                client = self._proved(questions[node], decode(data, Me))
            except MessageError as fault:
                if self._turned_away.get(node) != str(fault):
                    self._turned_away[node] = str(fault)
                    self._tell(f"turned away: {fault}")
                continue
            self._nodes[client] = node
            del self._ask_after[node]

    def _proved(self, who: Who, me: Me) -> int:
        if me.client not in self._directory:
            raise MessageError(f"client {me.client} is not on the roster")
        if not signed(self._directory[me.client], me.signature, proof_text(who, me.client)):
            raise MessageError(f"an answer in the name of client {me.client} is not signed with its key")
        return me.client
