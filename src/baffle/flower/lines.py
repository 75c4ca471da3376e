"""Lines to clients over Flower. Flower knows nodes and not clients, so each node is asked once which client it is.

Flower's nodes are not on the link, whose handshake and signed messages prove who says what: what a SuperLink delivers
is believed.
"""

import secrets
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future

from baffle.aggregation.context import signed
from baffle.core.messages import decode, encode
from baffle.errors import MessageError
from baffle.flower.grid_transport import GridTransport
from baffle.flower.identify import Me, Who, proof_text
from baffle.flower.run import AppRun, FlowerRun
from baffle.network.joining import Reply
from baffle.network.rosters import Roster

AGAIN = 5.0
"""Seconds until a node that did not say who it is is asked again: while the server asks, the others wait."""


class FlowerLines:
    """The nodes of a run that are online, and the clients that they have proved to be. `tell` is called with what
    happens to nodes."""

    def __init__(
        self, run: FlowerRun | AppRun, directory: Mapping[int, bytes], seconds: float, tell: Callable[[str], None]
    ) -> None:
        self._run, self._directory, self._tell = run, directory, tell
        self._nodes: dict[int, int] = {}  # client → node
        self._ask_after: dict[int, float] = {}
        self._turned_away: dict[int, str] = {}
        self._grid = GridTransport(run.grid, seconds, lambda node, why: tell(f"node {node} failed: {why}"))

    def present(self) -> Mapping[int, object]:
        online = set(self._run.nodes())
        self._nodes = {client: node for client, node in self._nodes.items() if node in online}
        now = time.monotonic()
        unknown = [node for node in sorted(online - set(self._nodes.values())) if self._ask_after.get(node, now) <= now]
        if unknown:
            self._identify(unknown)
        return dict(self._nodes)

    def carry(self, requests: Mapping[int, bytes], run: bytes) -> Mapping[int, bytes]:  # noqa: ARG002
        nodes = {client: self._nodes[client] for client in requests if client in self._nodes}
        replies = self._grid.exchange({node: requests[client] for client, node in nodes.items()})
        return {client: replies[node] for client, node in nodes.items() if node in replies}

    def post(self, requests: Mapping[int, bytes], run: bytes) -> Mapping[int, Reply]:
        """The replies, for which everybody waits."""
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

    def _identify(self, nodes: list[int]) -> None:
        questions = {node: Who(secrets.token_bytes(32)) for node in nodes}
        replies = self._grid.exchange({node: encode(who) for node, who in questions.items()})
        self._ask_after |= dict.fromkeys(nodes, time.monotonic() + AGAIN)
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
