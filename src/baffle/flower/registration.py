"""One client's registration at a Flower SuperLink: it joins, sends heartbeats, and leaves.

It waits for a server that is away, and joins again when the server has forgotten it.
"""

import ssl
import time
from collections.abc import Callable
from threading import Event, Thread
from typing import TypeVar

from cryptography.hazmat.primitives.asymmetric import ec

from baffle.errors import AwayError, KeyRefusedError, TransportError
from baffle.flower.connection import CallError, Connection, Identity
from baffle.flower.wire import make

WINDOW = 20.0
"""A client that sends no heartbeat for this many seconds counts as gone; SuperLink allows no shorter window."""

PATIENCE = 75.0
"""Seconds for which a refused key is tried again. A client that crashed is refused until its window ends, and a stock
SuperNode's window is 60 s."""

_HEARTBEAT = 4.0  # seconds: SuperLink closes a connection that was quiet for 5
_HEARTBEAT_RETRY = 1.0
_KEY_RETRY = 1.0
_FIRST_RETRY, _LONGEST_RETRY = 0.25, 5.0  # seconds until a server that is away is called again
_TIMEOUT, _HEARTBEAT_TIMEOUT = 30.0, 5.0

_KEY_KNOWN, _KEYS_ONLY, _NOT_ACTIVATED = 23, 2001, 2004  # Flower's codes

T = TypeVar("T")


class Registration:
    """A client's place at a SuperLink. The arguments are those of `FlowerNode`."""

    def __init__(
        self,
        address: str,
        roots: bytes | None,
        key: ec.EllipticCurvePrivateKey | None,
        tell: Callable[[str], None],
        patience: float,
        known: int,
    ) -> None:
        self.identity = Identity(key or ec.generate_private_key(ec.SECP256R1()))
        self._keyless = key is None
        self._known = known
        self._tell = tell
        self._patience = patience
        tls = _trust(roots) if roots is not None else None
        self.connection = Connection(address, tls, self.identity, _TIMEOUT)
        self._heartbeat_connection = Connection(address, tls, self.identity, _HEARTBEAT_TIMEOUT)
        self._heartbeats: Thread | None = None
        self._forgotten = Event()
        self.closed = Event()
        self.node = 0
        """The number by which the server knows this client; 0 before it has joined."""

    @property
    def joined(self) -> bool:
        return self.node != 0 and not self._forgotten.is_set()

    def join(self) -> None:
        """Take this client's place. A key may be refused because nobody registered it, or because the server believes
        that a client with it is present, as it does for a while after a crash; the server does not say which."""
        self.retry(self.connection.check_version)
        give_up = time.monotonic() + self._patience
        told = False
        while not self.closed.is_set():
            try:
                node = self.retry(self._activate)
            except KeyRefusedError as fault:
                if self._keyless or time.monotonic() >= give_up:
                    raise
                if not told:
                    self._tell(f"{fault}; trying again for {self._patience:.0f} s")
                told = True
                self.closed.wait(_KEY_RETRY)
                continue
            if node:
                self.node = self._known = node
                self._forgotten.clear()
                self._tell(f"joined {self.connection.address} as node {node}")
                self._start_heartbeats()
            return

    def forgotten(self, node: int) -> None:
        """The server no longer knows this node. If it is still ours, `joined` is false from now on."""
        if node == self.node and not self._forgotten.is_set():
            self._forgotten.set()
            self._tell(f"{self.connection.address} has forgotten this client; joining again")

    def retry(self, call: Callable[[], T], until: float | None = None) -> T | None:
        """Repeat a call until the server answers, or until a time by the server's clock. None if this client is closed
        meanwhile."""
        pause = _FIRST_RETRY
        while True:
            try:
                result = call()
            except AwayError as fault:
                if until is not None and self.identity.now() + pause > until:
                    raise
                if pause == _FIRST_RETRY:
                    self._tell(f"{fault}; trying again")
                if self.closed.wait(pause):
                    return None
                pause = min(2 * pause, _LONGEST_RETRY)
            else:
                if pause > _FIRST_RETRY:
                    self._tell(f"{self.connection.address} is there again")
                return result

    def close(self) -> None:
        """Leave, and tell the server so that it need not wait for the heartbeats to stop."""
        self.closed.set()
        if self._heartbeats:
            self._heartbeats.join()
        try:
            if self.joined:
                self._leave()
        except TransportError as fault:
            self._tell(f"left without telling the server: {fault}")
        finally:
            self.node = 0
            self.connection.close()
            self._heartbeat_connection.close()

    def _activate(self) -> int:
        """The node as which the server lets this client in."""
        request = make("ActivateNodeRequest", public_key=self.identity.public, heartbeat_interval=WINDOW / 2)
        address = self.connection.address
        try:
            return int(self.connection.call("activate-node", request, "ActivateNodeResponse").node_id)
        except CallError as fault:
            if fault.status == 401:
                raise KeyRefusedError(f"{address} does not accept the signature of this client's key") from fault
            if fault.code != _NOT_ACTIVATED:
                raise
        if self._known and self._send_heartbeat(self.connection, self._known):
            return self._known
        self._register()
        return int(self.connection.call("activate-node", request, "ActivateNodeResponse").node_id)

    def _register(self) -> None:
        request = make("RegisterNodeRequest", public_key=self.identity.public)
        address = self.connection.address
        try:
            self.connection.call("register-node", request, "RegisterNodeResponse")
        except CallError as fault:
            if fault.code == _KEYS_ONLY and self._keyless:
                raise KeyRefusedError(f"{address} takes registered keys only, and no key was given") from fault
            if fault.code == _KEYS_ONLY:
                raise KeyRefusedError(
                    f"{address} refuses this key: it is not registered there, or a client with it still counts as "
                    f"present, as it does for {WINDOW:.0f} s after a crash"
                ) from fault
            if fault.code == _KEY_KNOWN:
                raise KeyRefusedError(
                    f"{address} still counts a client with this key as present, "
                    f"as it does for {WINDOW:.0f} s after a crash"
                ) from fault
            raise

    def _leave(self) -> None:
        call = self._heartbeat_connection.call
        call("deactivate-node", make("DeactivateNodeRequest", node_id=self.node), "DeactivateNodeResponse")
        if self._keyless:  # nobody can use this key again
            call("unregister-node", make("UnregisterNodeRequest", node_id=self.node), "UnregisterNodeResponse")

    def _start_heartbeats(self) -> None:
        if self._heartbeats is None:
            self._heartbeats = Thread(target=self._keep_alive, name="heartbeat", daemon=True)
            self._heartbeats.start()

    def _keep_alive(self) -> None:
        pause = _HEARTBEAT
        while not self.closed.wait(pause):
            node = self.node
            pause = _HEARTBEAT
            try:
                if not self._send_heartbeat(self._heartbeat_connection, node):
                    self.forgotten(node)
            except TransportError:  # the thread that pulls messages reports it
                pause = _HEARTBEAT_RETRY

    def _send_heartbeat(self, connection: Connection, node: int) -> bool:
        """Tell the server that this client is present. False if the server does not know the node."""
        request = make("SendNodeHeartbeatRequest", node=make("Node", node_id=node), heartbeat_interval=WINDOW / 2)
        try:
            return bool(connection.call("send-node-heartbeat", request, "SendNodeHeartbeatResponse").success)
        except CallError as fault:
            if fault.status != 401:
                raise
            return False


def _trust(roots: bytes) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(cadata=roots.decode("ascii"))
    except (ssl.SSLError, UnicodeDecodeError) as fault:
        raise TransportError(f"expected certificates as PEM for roots, got something else: {fault}") from fault
    return context
