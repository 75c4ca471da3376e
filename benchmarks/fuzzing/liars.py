"""Clients of a roster that lie: each keeps to the handshake and signs its replies, but those to one kind of request are
damaged."""

import select
import ssl
import threading
from contextlib import suppress

from baffle.aggregation.context import state_text
from baffle.core.messages import Contribution, Message, decode, encode, tag_of
from baffle.network.joining import Begin, Done, Halt, Introduce, Introduction, Openings, Over, Ready, Salted
from baffle.network.keys.folders import ClientKeys
from baffle.network.link.envelope import Request, read_request, reply
from baffle.network.link.handshake import PATH, Accepted, ClientSide
from baffle.network.link.websocket import ClosedError, Websocket
from baffle.statement import commitment_text, commitment_to, read_statement, ready_text, run_of, salt_of
from fuzzing.damage import Mutations
from tests.support.links import HOST, dial

SECONDS = 20.0
"""Seconds to wait for the other end."""

ROUND = 1
"""The round that contributions are about."""


class Peer:
    """A client of the roster at the other end of a line. It answers honestly, or lies about one kind of question."""

    def __init__(self, keys: ClientKeys, address: str, mutations: Mutations, tls: ssl.SSLContext | None) -> None:
        self.keys, self._address, self._mutations, self._tls = keys, address, mutations, tls
        self._nonce = bytes([keys.number + 1] * 32)
        self._statement = b""
        self.lies_about = ""
        self.lied: list[bytes] = []
        self._connect()

    def _connect(self) -> None:
        self.socket = dial(self._address, self._tls)
        self._websocket = Websocket(self.socket, HOST, int(self._address.split(":")[1]), PATH, 1 << 22, SECONDS)
        side = ClientSide(self.keys.identity, self.keys.roster.server_key, HOST, bytes([self.keys.number] * 16))
        self._websocket.send(side.greeting())
        self._websocket.send(side.proof(self._websocket.receive(SECONDS)))
        decode(self._websocket.receive(SECONDS), Accepted)

    def close(self) -> None:
        self.socket.close()

    def answer(self) -> None:
        """Answer what has come. If the link has closed the line, open another."""
        own = self.keys.identity.public_key().public_bytes_raw()
        is_readable = True
        while is_readable or self._websocket._frames:
            is_readable = False
            try:
                request = read_request(self.keys.roster.server_key, own, self._websocket.receive(0.05))
                self._reply(request, encode(self.honest(request.body)))
            except TimeoutError:  # it was no frame
                return
            except (ClosedError, OSError):
                self.close()
                self._connect()

    def _reply(self, request: Request, body: bytes) -> None:
        draw, identity, server = self._mutations.draw, self.keys.identity, self.keys.roster.server_key
        if tag_of(request.body) != self.lies_about:
            self._websocket.send(reply(identity, server, request, body))
            return
        self.lies_about = ""
        if draw.random() < 0.92:
            lie = self._mutations.of(body)
            self.lied.append(lie)
            self._websocket.send(reply(identity, server, request, lie))
            return
        frame = reply(identity, server, request, body)
        lie = self._mutations.bytes_of(frame)
        self.lied.append(lie)
        match draw.randrange(4):
            case 0:
                self._websocket.send(frame)
                self._websocket.send(lie)  # an answer that nobody asked for
            case 1:
                with suppress(OSError):
                    self.socket.send(lie)  # no frame at all
                raise ClosedError(0, "no frames fit behind that")
            case _:
                self._websocket.send(lie)

    def honest(self, body: bytes) -> Message:
        """What an honest client answers."""
        identity, roster = self.keys.identity, self.keys.roster
        match tag_of(body):
            case "introduce":
                asked = decode(body, Introduce)
                commitment = commitment_to(self._nonce)
                text = commitment_text(roster.server_key, asked.plan, asked.roster_hash, asked.epoch, commitment)
                return Introduction(0, commitment, identity.sign(text))
            case "begin":
                self._statement = decode(body, Begin).statement
                return Ready(self._nonce, identity.sign(ready_text(run_of(self._statement))), 0, 0)
            case "openings":
                openings = decode(body, Openings)
                return Salted(salt_of(openings.run, read_statement(self._statement), openings.nonces))
            case "halt" | "over" as tag:
                last = decode(body, Halt).request if tag == "halt" else decode(body, Over).request
                text = state_text(run_of(self._statement), last.round, last.chain)
                return Done(last.weights_hash, identity.sign(text))
            case _:
                return Contribution(ROUND, bytes(28))


class Crowd:
    """All clients, on one thread."""

    def __init__(self, peers: list[Peer]) -> None:
        self.peers, self._stopped = peers, False
        self.fault: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="crowd", daemon=True)

    def __enter__(self) -> "Crowd":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped = True
        self._thread.join(SECONDS)
        for peer in self.peers:
            peer.close()

    def _run(self) -> None:
        try:
            while not self._stopped:
                poll = select.poll()
                by_file = {peer.socket.fileno(): peer for peer in self.peers}
                for file in by_file:
                    poll.register(file, select.POLLIN)
                for file, _ in poll.poll(100):
                    by_file[file].answer()
        except BaseException as fault:
            self.fault = fault
