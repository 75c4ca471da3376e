"""Many clients of the link in one process, for benchmarks/load.py.

Every client has its own connection, TLS, keys, `Member` and secure sums, and sends and receives the same bytes as
`baffle join` does. Only the threads differ: `baffle join` has two for each client, which is too many for hundreds of
them. Here one thread serves the connections of all clients of the process, and a second one computes their answers,
one after the other. Clients keep their marks in memory: a real one has a disk of its own.

The process reads commands as lines of JSON, and answers each with a line about what its clients have spent and hold:

    {"do": "connect", "clients": 500}                 so many more clients connect
    {"do": "behave", "how": "break", "share": 0.3}    from now on the clients do as this `Behaviour` says
    {"do": "stall", "share": 0.05, "seconds": 60}     some do not read their connections for so long
    {"do": "cut"}                                     all lines break at once
    {"do": "report"}                                  nothing else
"""

import asyncio
import logging
import random
import secrets
import socket
import struct
import sys
import time
from asyncio import sslproto
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from queue import SimpleQueue
from threading import Thread, main_thread
from typing import Any, Literal, cast
from unittest import mock

import msgspec
from secure_sum import Meter
from websockets.client import ClientProtocol
from websockets.frames import Frame, Opcode
from websockets.http11 import Response
from websockets.protocol import State
from websockets.uri import parse_uri

from baffle.aggregation.client import session
from baffle.aggregation.client.marks import Memory
from baffle.aggregation.client.peers import ReadKeys, reader
from baffle.aggregation.messages import Advertisement
from baffle.client.worker import Worker
from baffle.core.messages import decode
from baffle.network.joining import Done
from baffle.network.keys.folders import ClientKeys, load_identity
from baffle.network.link.client import FIRST_PAUSE, LONGEST_PAUSE, OPEN_SECONDS, client_tls, split
from baffle.network.link.envelope import REQUEST_BYTES, Request, most_joining_bytes, read_request, reply
from baffle.network.link.handshake import GOODBYE, HANDSHAKE_BYTES, PATH, Accepted, ClientSide
from baffle.network.member.equipment import with_plan
from baffle.network.member.member import Member
from baffle.network.member.policy import Policy
from baffle.network.server.machine import require_open_files

logging.getLogger("asyncio").setLevel(logging.ERROR)  # it warns of every answer on a line that broke meanwhile

sslproto.SSLProtocol.max_size = 16 * 1024  # as in the server: asyncio's 256 kB for each connection add up

AWAY = 3.0
"""Seconds for which a client that broke its line stays away: more than the server waits for it."""

FEW_SAMPLES = Policy(least_batch=1, largest_batch=1.0)
"""A thousand clients share few samples, so that a round uses all that a client has."""

PAYLOAD, PAYLOAD_AT = struct.Struct("=2Q"), 120
"""Where the kernel's tcp_info says how many bytes the other end has acknowledged and how many have come from it."""


class Behaviour(msgspec.Struct, frozen=True):
    """What clients do when they are asked for their vectors. A `share` of them, drawn anew each time, does not answer:
    they `break` their line without goodbye and come back after AWAY seconds, or stay `silent`."""

    how: Literal["break", "silent"] = "silent"
    share: float = 0.0


@dataclass
class Spent:
    """What the clients of a process have sent and received so far. Frames are those of the link; the others are the
    bytes in TCP's segments."""

    up: int = 0
    down: int = 0
    frames_up: int = 0
    frames_down: int = 0
    exchanges: int = 0
    connections: int = 0


class Caller:
    """One client: its `Member`, and what `Line` knows of its connection."""

    def __init__(self, swarm: "Swarm", keys: ClientKeys, member: Member) -> None:
        self.swarm, self.keys, self.member = swarm, keys, member
        self.own = keys.identity.public_key().public_bytes_raw()
        self.process = secrets.token_bytes(16)
        self.limit = most_joining_bytes(len(keys.roster.clients))
        self.wire: Wire | None = None
        self.last_weights = ""
        """The hash of the weights that it held when its run was over."""
        self._asked: tuple[bytes, Request | None] = b"", None  # the hash of the newest request, and that request
        self._answered = b"", b""  # the hash of the newest request that was answered, and the answer
        self._pause = FIRST_PAUSE

    def opened(self, wire: "Wire") -> None:
        self.wire, self._pause = wire, FIRST_PAUSE
        self.swarm.spent.connections += 1

    def lost(self, wire: "Wire", *, goodbye: bool) -> None:
        if self.wire is wire:
            self.wire = None
        if self.swarm.stopped or (self.last_weights and goodbye):
            return
        pause = AWAY if wire.broken_off else random.uniform(self._pause / 2, self._pause)
        self._pause = min(2 * self._pause, LONGEST_PAUSE)
        self.swarm.loop.call_later(pause, self.swarm.dial, self)

    def take(self, wire: "Wire", frame: bytes) -> None:
        """Take a request as `Line` does: one that was answered before gets the same answer again."""
        request = read_request(self.keys.roster.server_key, self.own, frame)
        name = request.hash()
        if name == self._answered[0]:
            wire.send(self._answered[1])
        elif name != self._asked[0]:
            self._asked = name, request
            if not self._drops_out(wire, request):
                self.swarm.work.put((self, request))

    def answer(self, request: Request) -> None:
        """Compute an answer, in the thread that computes, and hand it to the thread that sends."""
        if request is not self._asked[1]:
            return
        body = self.member.answer(request.body)
        if self.member.over:
            self.last_weights = decode(body, Done).weights_hash.hex()
        frame = reply(self.keys.identity, self.keys.roster.server_key, request, body)
        self.swarm.loop.call_soon_threadsafe(self._send, request, frame, self.member.most_request_bytes)

    def _send(self, request: Request, frame: bytes, limit: int) -> None:
        self.limit, self._answered = limit, (request.hash(), frame)
        if self.wire:
            self.wire.allow(limit)
            self.wire.send(frame)

    def _drops_out(self, wire: "Wire", request: Request) -> bool:
        behaviour = self.swarm.behaviour
        if request.phase != "masked-request" or random.random() >= behaviour.share:
            return False
        if behaviour.how == "break":
            wire.break_off()
        return True


class Wire(asyncio.Protocol):
    """One connection of a client."""

    def __init__(self, caller: Caller) -> None:
        self._caller, self._swarm = caller, caller.swarm
        address = parse_uri(f"wss://{self._swarm.address}{PATH}")
        self._protocol = ClientProtocol(address, max_size=HANDSHAKE_BYTES)
        server = caller.keys.roster.server_key
        self._side = ClientSide(caller.keys.identity, server, self._swarm.host, caller.process)
        self._frames = 0
        self._payload: tuple[int, ...] = 0, 0
        self.broken_off = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._socket = self._transport.get_extra_info("socket")
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._swarm.wires.add(self)
        self._protocol.send_request(self._protocol.connect())
        self._flush()

    def data_received(self, data: bytes) -> None:
        self._protocol.receive_data(data)
        for event in self._protocol.events_received():
            if isinstance(event, Response) and self._protocol.state is State.OPEN:
                self._protocol.send_binary(self._side.greeting())
            elif isinstance(event, Frame) and event.opcode is Opcode.BINARY:
                self._take(bytes(event.data))
        self._flush()

    def eof_received(self) -> None:
        self.payload()
        self._protocol.receive_eof()
        self._flush()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the name is asyncio's
        self._swarm.wires.discard(self)
        up, down = self.payload()
        self._swarm.spent.up += up
        self._swarm.spent.down += down
        closed = self._protocol.close_rcvd
        self._caller.lost(self, goodbye=closed is not None and closed.code == GOODBYE)

    def allow(self, size: int) -> None:
        self._protocol.max_message_size = size + REQUEST_BYTES

    def send(self, frame: bytes) -> None:
        if self._protocol.state is State.OPEN:
            self._swarm.spent.frames_up += len(frame)
            self._protocol.send_binary(frame)
            self._flush()

    def stop_reading(self, seconds: float) -> None:
        self._transport.pause_reading()
        self._swarm.loop.call_later(seconds, self._read_on)

    def break_off(self) -> None:
        """Break the line, and stay away for a while."""
        self.broken_off = True
        self.cut()

    def cut(self) -> None:
        self.payload()
        self._transport.abort()

    def close(self) -> None:
        """Say goodbye."""
        if self._protocol.state is State.OPEN:
            self._protocol.send_close(GOODBYE, "the client stops")
            self._flush()

    def payload(self) -> tuple[int, ...]:
        """The bytes in TCP's segments, without their headers: sent and received. Asked once more before the socket is
        closed, because afterwards nobody knows."""
        with suppress(OSError):
            info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            self._payload = PAYLOAD.unpack_from(info, PAYLOAD_AT)
        return self._payload

    def _read_on(self) -> None:
        if not self._transport.is_closing():
            self._transport.resume_reading()

    def _take(self, frame: bytes) -> None:
        self._frames += 1
        if self._frames == 1:
            self._protocol.send_binary(self._side.proof(frame))
        elif self._frames == 2:
            decode(frame, Accepted)
            self.allow(self._caller.limit)
            self._caller.opened(self)
        else:
            self._swarm.spent.frames_down += len(frame)
            self._swarm.spent.exchanges += 1
            self._caller.take(self, frame)

    def _flush(self) -> None:
        for data in self._protocol.data_to_send():
            if self._transport.is_closing():
                return
            if data:
                self._transport.write(data)
            else:
                self._transport.close()


class Swarm:
    """The clients of this process, whose keys lie in a folder. They share one copy of the roster and the samples."""

    def __init__(self, folder: Path, numbers: range, address: str, meter: Meter) -> None:
        self.address, self._meter = address, meter
        self.host, self._port = split(address)
        self.loop = asyncio.new_event_loop()
        self.behaviour = Behaviour()
        self.spent = Spent()
        self.wires = set[Wire]()
        self.work: SimpleQueue[tuple[Caller, Request] | None] = SimpleQueue()
        self.stopped = False
        self._failures = list[str]()
        self._dialling = set[asyncio.Task[None]]()
        self._computing = Thread(target=self._compute, name="compute", daemon=True)
        first = ClientKeys.load(folder / f"client-{numbers[0]}")
        self._tls = client_tls(first)
        self._callers = [self._caller(folder, first, number) for number in numbers]
        self._absent = iter(self._callers)

    def run(self) -> None:
        self._computing.start()
        self.loop.run_until_complete(self._obey())

    def dial(self, caller: Caller) -> None:
        """Open a client's connection."""
        if not self.stopped:
            task = self.loop.create_task(self._dial(caller))
            self._dialling.add(task)
            task.add_done_callback(self._dialling.discard)

    def _caller(self, folder: Path, first: ClientKeys, number: int) -> Caller:
        own = folder / f"client-{number}"
        keys = replace(first, number=number, identity=load_identity(own / "identity.key"), folder=own)
        member = Member(keys, None, with_plan(number, None, part=True))
        member.memory = member.consent.memory = Memory()  # type: ignore[assignment]
        return Caller(self, keys, member)

    async def _dial(self, caller: Caller) -> None:
        wire = Wire(caller)
        try:
            await self.loop.create_connection(
                lambda: wire,
                self.host,
                self._port,
                ssl=self._tls,
                family=socket.AF_INET,
                ssl_handshake_timeout=OPEN_SECONDS,
            )
        except (OSError, EOFError):  # time-outs and errors of TLS are OSErrors
            caller.lost(wire, goodbye=False)

    async def _obey(self) -> None:
        """Follow commands until there are no more."""
        commands = asyncio.StreamReader()
        await self.loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
        while line := await commands.readline():
            command = msgspec.json.decode(line)
            match command.pop("do"):
                case "connect":
                    for caller in islice(self._absent, command["clients"]):
                        self.dial(caller)
                case "behave":
                    self.behaviour = msgspec.convert(command, Behaviour)
                case "stall":
                    for wire in random.sample(list(self.wires), round(command["share"] * len(self.wires))):
                        wire.stop_reading(command["seconds"])
                case "cut":
                    for wire in list(self.wires):
                        wire.cut()
            sys.stdout.buffer.write(msgspec.json.encode(self._report()) + b"\n")
            sys.stdout.buffer.flush()
        self.stopped = True
        for wire in list(self.wires):
            wire.close()
        self.work.put(None)

    def _report(self) -> dict[str, Any]:
        payloads = [wire.payload() for wire in self.wires]
        up, down = (self.spent.up + sum(up for up, _ in payloads), self.spent.down + sum(down for _, down in payloads))
        threads = {"transport": main_thread(), "compute": self._computing}
        return {
            "spent": replace(self.spent, up=up, down=down),
            "cpu": {name: cpu_of(thread) for name, thread in threads.items()},
            "probe_seconds": self._meter.spent["probe"],
            "connected": sum(caller.wire is not None for caller in self._callers),
            "last_weights": Counter(caller.last_weights for caller in self._callers),
            "failures": self._failures[:5],
        }

    def _compute(self) -> None:
        while item := self.work.get():
            caller, request = item
            try:
                caller.answer(request)
            except Exception as fault:  # whoever runs the benchmark is told
                self._failures.append(f"client {caller.keys.number}: {type(fault).__name__}: {fault}")


def cpu_of(thread: Thread) -> float:
    """CPU seconds of a thread of this process."""
    return time.clock_gettime(time.pthread_getcpuclockid(cast(int, thread.ident)))


LISTS: dict[bytes, Advertisement] = {}


def sharing_lists(directory: Mapping[int, bytes], run: bytes) -> ReadKeys:
    """Reads lists of keys and checks their signatures, as a client alone does. But the clients of this process share
    one copy of each list: a thousand clients with a thousand lists each would take ten gigabytes."""
    read = reader(directory, run)

    def read_and_share(data: bytes) -> Advertisement:
        advertisement = read(data)
        return LISTS.setdefault(advertisement.signature, advertisement)

    return read_and_share


def main() -> None:
    folder, first, stop, address = sys.argv[1:]
    numbers, meter = range(int(first), int(stop)), Meter()
    require_open_files(len(numbers), sys.exit)
    with (
        mock.patch.object(session, "reader", sharing_lists),
        mock.patch.object(Worker, "vector", meter.around(Worker.vector, "probe")),
    ):
        Swarm(Path(folder), numbers, address, meter).run()


if __name__ == "__main__":
    main()
