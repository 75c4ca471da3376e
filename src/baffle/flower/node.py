"""A client of a Flower SuperLink that does not import flwr: it joins, receives messages, replies, and leaves.

    with FlowerNode("host:8000", roots, key, tell=print) as node:
        for message in node.messages():
            node.reply(message, answer(message.content))

The server counts it as present for as long as its heartbeats come.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial
from types import TracebackType
from typing import NamedTuple

from cryptography.hazmat.primitives.asymmetric import ec

from baffle.errors import AwayError, MessageError, TransportError
from baffle.flower import wire
from baffle.flower.connection import CallError
from baffle.flower.registration import PATIENCE, Registration
from baffle.flower.wire import Wire, make

_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0  # seconds between two pulls
_PAUSE_PER_PULL = 5  # pause at least this many times as long as the last pull took: spares a server that is slow

_RAISED = 2  # Flower's code of a reply from an app that failed


class IncomingMessage(NamedTuple):
    """A message for this client: its content, its type ("train.masked"), and what a reply must refer to."""

    content: bytes
    kind: str
    metadata: Wire


class FlowerNode:
    """One client at a SuperLink. `roots` are certificates as PEM; without them nothing is encrypted. Without a key the
    client makes a new one, which a server that asks for registered keys refuses. `known` is the node number that this
    key had before: with it, a client that crashed gets its place back at once; without it, when its window has
    ended."""

    def __init__(
        self,
        address: str,
        roots: bytes | None = None,
        key: ec.EllipticCurvePrivateKey | None = None,
        tell: Callable[[str], None] = lambda _words: None,
        patience: float = PATIENCE,
        known: int = 0,
    ) -> None:
        self._tell = tell
        self._registration = Registration(address, roots, key, tell, patience, known)
        self._connection = self._registration.connection
        self._closed = self._registration.closed

    @property
    def number(self) -> int:
        """The number by which the server knows this client; 0 before it has joined."""
        return self._registration.node

    def messages(self) -> Iterator[IncomingMessage]:
        """Join, and yield each message as it comes, until `stop`. Pulls often after a message and seldom when it has
        been quiet for long, so that a message waits about a tenth of the silence before it."""
        last_message = time.monotonic()
        while not self._closed.is_set():
            pulled = time.monotonic()
            if not self._registration.joined:
                self._registration.join()
            elif message := self._pull():
                yield message
                last_message = time.monotonic()
            else:
                now = time.monotonic()
                pause = max(_SHORTEST_PAUSE, (now - last_message) / 10, _PAUSE_PER_PULL * (now - pulled))
                self._closed.wait(min(_LONGEST_PAUSE, pause))

    def reply(self, message: IncomingMessage, content: bytes) -> None:
        record = wire.record_object(content)
        records = wire.records_object(wire.name_of(record))
        self._push(message, [record, records], None)

    def refuse(self, message: IncomingMessage, reason: str) -> None:
        """Reply that there will be no answer, so that the server need not wait for one."""
        self._push(message, [], make("Error", code=_RAISED, reason=reason))

    def stop(self) -> None:
        """End `messages`, from any thread."""
        self._closed.set()

    def close(self) -> None:
        """Leave, so that the server knows at once; a server that is away finds out by itself."""
        self._registration.close()

    def __enter__(self) -> "FlowerNode":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _pull(self) -> IncomingMessage | None:
        """The next message, if there is one."""
        number = self.number
        node = make("Node", node_id=number)
        try:
            pulled = self._call("pull-messages", make("PullMessagesRequest", node=node), "PullMessagesResponse")
        except CallError as fault:
            if fault.status != 401:
                raise
            self._registration.forgotten(number)
            return None
        if not pulled or not pulled.messages_list:
            return None
        metadata = pulled.messages_list[0].metadata
        tree = pulled.message_object_trees[0]
        received = make(
            "ConfirmMessageReceivedRequest", node=node, run_id=metadata.run_id, message_object_id=tree.object_id
        )
        try:
            content = wire.content_of(self._pull_objects(metadata, wire.names(tree))[0])
            self._connection.call("confirm-message-received", received, "ConfirmMessageReceivedResponse")
        except MessageError as fault:
            self._tell(f"a message that is not for this client: {fault}")
            self.refuse(IncomingMessage(b"", metadata.message_type, metadata), str(fault))
            return None
        except TransportError as fault:
            self._tell(f"a message was lost on its way: {fault}")
            return None
        return IncomingMessage(content, metadata.message_type, metadata)

    def _pull_objects(self, metadata: Wire, names: list[str]) -> list[bytes]:
        """The objects of a message. The server may announce a message before all of its objects are there; a message
        that is confirmed too early fails for its sender."""
        until = metadata.created_at + metadata.ttl
        objects: list[bytes] = []
        while len(objects) < len(names) and self._registration.identity.now() < until:
            request = make(
                "PullObjectRequest",
                node=make("Node", node_id=self.number),
                run_id=metadata.run_id,
                object_id=names[len(objects)],
            )
            answer = self._call("pull-object", request, "PullObjectResponse", until)
            if not answer or not answer.object_found:
                break
            if not answer.object_available:
                self._closed.wait(_SHORTEST_PAUSE)
                continue
            objects.append(answer.object_content)
            if wire.name_of(objects[-1]) != names[len(objects) - 1]:
                raise MessageError("expected an object with the hash that names it, got another")
        if len(objects) < len(names):
            raise TransportError(f"{self._connection.address} no longer has its content")
        return objects

    def _push(self, message: IncomingMessage, below: list[bytes], error: Wire | None) -> None:
        """Send a reply. It consists of the objects `below` it, from the lowest up, or of an error."""
        asked = message.metadata
        until = asked.created_at + asked.ttl
        envelope, tree, objects = wire.reply(asked, self._registration.identity.now(), below, error)
        node = make("Node", node_id=self.number)
        announcement = make("PushMessagesRequest", node=node, messages_list=[envelope], message_object_trees=[tree])
        try:
            wanted = self._call("push-messages", announcement, "PushMessagesResponse", until)
            if wanted and not wanted.objects_to_push:
                self._tell("the server no longer waits for this reply")
            for name, content in objects.items():
                if wanted and name in wanted.objects_to_push:
                    request = make(
                        "PushObjectRequest",
                        node=node,
                        run_id=asked.run_id,
                        object_id=name,
                        object_content=content,
                        session_id=wanted.session_id,
                    )
                    kept = self._call("push-object", request, "PushObjectResponse", until)
                    if kept and not kept.stored:
                        self._tell("the server did not keep all of this reply")
        except CallError as fault:
            self._tell(f"a reply was not taken: {fault}")
        except AwayError as fault:
            self._tell(f"a reply came too late: {fault}")

    def _call(self, path: str, request: Wire, answer: str, until: float | None = None) -> Wire | None:
        """A call that waits for a server that is away."""
        return self._registration.retry(partial(self._connection.call, path, request, answer), until)
