"""A client of a Flower SuperLink that does not import flwr: joins, takes messages, replies, and leaves.

    with Fleet("host:8000", roots, key, tell=print) as fleet:
        for message in fleet.messages():
            fleet.reply(message, answer(message.content))

It is there for as long as its heartbeats come. It waits for a server that is away, and joins again when one has
forgotten it.
"""

import ssl
import time
from collections.abc import Callable, Iterator
from functools import partial
from threading import Event, Thread
from types import TracebackType
from typing import NamedTuple, TypeVar

from cryptography.hazmat.primitives.asymmetric import ec

from baffle.errors import AwayError, KeyRefusedError, MessageError, TransportError
from baffle.flower import wire
from baffle.flower.connection import CallError, Connection, Identity
from baffle.flower.wire import Wire, make

WINDOW = 20.0
"""Seconds without a heartbeat after which a client counts as gone; SuperLink allows no less."""

PATIENCE = 75.0
"""Seconds for which a refused key is tried again. A client that crashed is refused until its window ends, and a stock
SuperNode's window is 60 s."""

_BEAT = 4.0  # seconds: SuperLink closes a connection that was quiet for 5
_SHORTEST, _LONGEST = 0.05, 1.0  # seconds between two looks for a message
_SHARE = 5  # of the time of a look that is waited before the next: a server that is slow is not pressed harder
_TIMEOUT, _SHORT_TIMEOUT = 30.0, 5.0

_KEY_KNOWN, _KEYS_ONLY, _NOT_ACTIVATED, _RUN_OVER = 23, 2001, 2004, 2007  # Flower's codes
_RAISED = 2  # Flower's code of a reply from an app that failed

T = TypeVar("T")


class Message(NamedTuple):
    """A message for this client: its content, its type ("train.masked"), and what a reply must refer to."""

    content: bytes
    kind: str
    metadata: Wire


class Fleet:
    """One client's place in the fleet. `roots` are certificates as PEM; without them nothing is encrypted. Without a
    key the client takes a new one, which a server that asks for registered keys refuses. `known` is the node that this
    key was before: with it a client that crashed takes its place again at once, and else when its window has ended."""

    def __init__(
        self,
        address: str,
        roots: bytes | None = None,
        key: ec.EllipticCurvePrivateKey | None = None,
        tell: Callable[[str], None] = lambda _words: None,
        patience: float = PATIENCE,
        known: int = 0,
    ) -> None:
        self._identity = Identity(key or ec.generate_private_key(ec.SECP256R1()))
        self._keyless, self._known = key is None, known
        self._tell, self._patience = tell, patience
        tls = _trust(roots) if roots is not None else None
        self._connection = Connection(address, tls, self._identity, _TIMEOUT)
        self._pulse = Connection(address, tls, self._identity, _SHORT_TIMEOUT)
        self._beats: Thread | None = None
        self._lost, self._closed = Event(), Event()
        self.node = 0
        """The number by which the server knows this client; 0 before it joined."""

    def messages(self) -> Iterator[Message]:
        """Joins, and gives each message as it comes, until `stop`. Looks often after a message and seldom when it has
        been quiet for long, so that a message waits about a tenth of the silence before it."""
        last = time.monotonic()
        while not self._closed.is_set():
            looked = time.monotonic()
            if not self.node or self._lost.is_set():
                self._join()
            elif message := self._next():
                yield message
                last = time.monotonic()
            else:
                now = time.monotonic()
                self._closed.wait(min(_LONGEST, max(_SHORTEST, (now - last) / 10, _SHARE * (now - looked))))

    def reply(self, message: Message, content: bytes) -> None:
        record = wire.record_object(content)
        records = wire.records_object(wire.name_of(record))
        self._push(message, [record, records], None)

    def refuse(self, message: Message, reason: str) -> None:
        """Replies that there will be no answer, so that the server need not wait for one."""
        self._push(message, [], make("Error", code=_RAISED, reason=reason))

    def stop(self) -> None:
        """Ends `messages`, from any thread."""
        self._closed.set()

    def close(self) -> None:
        """Leaves, so that the server knows at once; a server that is away finds out by itself."""
        self.stop()
        if self._beats:
            self._beats.join()
        try:
            if self.node and not self._lost.is_set():
                self._pulse.call(
                    "deactivate-node", make("DeactivateNodeRequest", node_id=self.node), "DeactivateNodeResponse"
                )
                if self._keyless:  # nobody can use this key again
                    self._pulse.call(
                        "unregister-node", make("UnregisterNodeRequest", node_id=self.node), "UnregisterNodeResponse"
                    )
        except TransportError as fault:
            self._tell(f"left without a word to the server: {fault}")
        finally:
            self.node = 0
            self._connection.close()
            self._pulse.close()

    def __enter__(self) -> "Fleet":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _join(self) -> None:
        """Takes this client's place. A key may be refused because nobody registered it, or because the server believes
        that a client with it is there, as it does for a while after a crash; the server does not say which."""
        self._stubborn(self._connection.check_version)
        give_up, told = time.monotonic() + self._patience, False
        while not self._closed.is_set():
            try:
                node = self._stubborn(self._activate)
            except KeyRefusedError as fault:
                if self._keyless or time.monotonic() >= give_up:
                    raise
                if not told:
                    self._tell(f"{fault}; trying again for {self._patience:.0f} s")
                told = True
                self._closed.wait(1.0)
                continue
            if node:
                self.node = self._known = node
                self._lost.clear()
                self._tell(f"joined {self._connection.address} as node {node}")
                self._beat()
            return

    def _activate(self) -> int:
        request = make("ActivateNodeRequest", public_key=self._identity.public, heartbeat_interval=WINDOW / 2)
        try:
            return int(self._connection.call("activate-node", request, "ActivateNodeResponse").node_id)
        except CallError as fault:
            if fault.status == 401:
                raise KeyRefusedError(
                    f"{self._connection.address} does not accept the signature of this client's key"
                ) from fault
            if fault.code != _NOT_ACTIVATED:
                raise
        if self._known and self._alive(self._connection, self._known):
            return self._known
        try:
            register = make("RegisterNodeRequest", public_key=self._identity.public)
            self._connection.call("register-node", register, "RegisterNodeResponse")
        except CallError as fault:
            if fault.code == _KEYS_ONLY and self._keyless:
                raise KeyRefusedError(
                    f"{self._connection.address} takes registered keys only, and no key was given"
                ) from fault
            if fault.code == _KEYS_ONLY:
                raise KeyRefusedError(
                    f"{self._connection.address} refuses this key: it is not registered there, or a client with it "
                    f"still counts as present, as it does for {WINDOW:.0f} s after a crash"
                ) from fault
            if fault.code == _KEY_KNOWN:
                raise KeyRefusedError(
                    f"{self._connection.address} still counts a client with this key as present, "
                    f"as it does for {WINDOW:.0f} s after a crash"
                ) from fault
            raise
        return int(self._connection.call("activate-node", request, "ActivateNodeResponse").node_id)

    def _next(self) -> Message | None:
        node = make("Node", node_id=self.node)
        try:
            request = make("PullMessagesRequest", node=node)
            found = self._stubborn(partial(self._connection.call, "pull-messages", request, "PullMessagesResponse"))
        except CallError as fault:
            if fault.status != 401:
                raise
            self._forgotten(self.node)
            return None
        if not found or not found.messages_list:
            return None
        metadata, tree = found.messages_list[0].metadata, found.message_object_trees[0]
        taken = make(
            "ConfirmMessageReceivedRequest", node=node, run_id=metadata.run_id, message_object_id=tree.object_id
        )
        try:
            content = wire.content_of(self._objects(metadata, wire.names(tree))[0])
            self._connection.call("confirm-message-received", taken, "ConfirmMessageReceivedResponse")
        except MessageError as fault:
            self._tell(f"a message that is not for this client: {fault}")
            self.refuse(Message(b"", metadata.message_type, metadata), str(fault))
            return None
        except TransportError as fault:
            self._tell(f"a message was lost on its way: {fault}")
            return None
        return Message(content, metadata.message_type, metadata)

    def _objects(self, metadata: Wire, names: list[str]) -> list[bytes]:
        """The objects of a message. The server may tell of a message before all of it is there; to take it as received
        before that would break it for its sender."""
        until = metadata.created_at + metadata.ttl
        objects: list[bytes] = []
        while len(objects) < len(names) and self._identity.now() < until:
            request = make(
                "PullObjectRequest",
                node=make("Node", node_id=self.node),
                run_id=metadata.run_id,
                object_id=names[len(objects)],
            )
            answer = self._stubborn(partial(self._connection.call, "pull-object", request, "PullObjectResponse"), until)
            if not answer or not answer.object_found:
                break
            if not answer.object_available:
                self._closed.wait(_SHORTEST)
                continue
            objects.append(answer.object_content)
            if wire.name_of(objects[-1]) != names[len(objects) - 1]:
                raise MessageError("expected an object with the hash that names it, got another")
        if len(objects) < len(names):
            raise TransportError(f"{self._connection.address} no longer has its content")
        return objects

    def _push(self, message: Message, below: list[bytes], error: Wire | None) -> None:
        """Sends a reply that is made of the objects `below` it, from the lowest up, or of an error."""
        asked = message.metadata
        until = asked.created_at + asked.ttl
        envelope, tree, objects = wire.reply(asked, self._identity.now(), below, error)
        node = make("Node", node_id=self.node)
        request = make("PushMessagesRequest", node=node, messages_list=[envelope], message_object_trees=[tree])
        try:
            wanted = self._stubborn(
                partial(self._connection.call, "push-messages", request, "PushMessagesResponse"), until
            )
            if wanted and not wanted.objects_to_push:
                self._tell("the server no longer waits for this reply")
            for name, thing in objects.items():
                if wanted and name in wanted.objects_to_push:
                    part = make(
                        "PushObjectRequest",
                        node=node,
                        run_id=asked.run_id,
                        object_id=name,
                        object_content=thing,
                        session_id=wanted.session_id,
                    )
                    kept = self._stubborn(
                        partial(self._connection.call, "push-object", part, "PushObjectResponse"), until
                    )
                    if kept and not kept.stored:
                        self._tell("the server did not keep all of this reply")
        except CallError as fault:
            self._tell(f"a reply was not taken: {fault}")
        except AwayError as fault:
            self._tell(f"a reply came too late: {fault}")

    def _stubborn(self, call: Callable[[], T], until: float | None = None) -> T | None:
        """Calls until the server is there, or until the given time by its clock; nothing comes of it if this client is
        closed meanwhile."""
        pause = 0.25
        while True:
            try:
                result = call()
            except AwayError as fault:
                if until is not None and self._identity.now() + pause > until:
                    raise
                if pause == 0.25:
                    self._tell(f"{fault}; trying again")
                if self._closed.wait(pause):
                    return None
                pause = min(2 * pause, 5.0)
            else:
                if pause > 0.25:
                    self._tell(f"{self._connection.address} is there again")
                return result

    def _beat(self) -> None:
        def beat() -> None:
            pause = _BEAT
            while not self._closed.wait(pause):
                node, pause = self.node, _BEAT
                try:
                    if not self._alive(self._pulse, node):
                        self._forgotten(node)
                except TransportError:  # whoever looks for messages tells of it
                    pause = 1.0

        if self._beats is None:
            self._beats = Thread(target=beat, name="heartbeat", daemon=True)
            self._beats.start()

    def _alive(self, connection: Connection, node: int) -> bool:
        """Tells the server that this client is there; whether it knows it."""
        request = make("SendNodeHeartbeatRequest", node=make("Node", node_id=node), heartbeat_interval=WINDOW / 2)
        try:
            return bool(connection.call("send-node-heartbeat", request, "SendNodeHeartbeatResponse").success)
        except CallError as fault:
            if fault.status != 401:
                raise
            return False

    def _forgotten(self, node: int) -> None:
        if node == self.node and not self._lost.is_set():
            self._lost.set()
            self._tell(f"{self._connection.address} has forgotten this client; joining again")


def _trust(roots: bytes) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(cadata=roots.decode("ascii"))
    except (ssl.SSLError, UnicodeDecodeError) as fault:
        raise TransportError(f"expected certificates as PEM for roots, got something else: {fault}") from fault
    return context
