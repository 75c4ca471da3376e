"""Injects the faults of a bad network into a federation, repeatable from a seed."""

from collections.abc import Callable, Mapping
from hashlib import sha256
from random import Random
from typing import Literal, get_args

from baffle.aggregation.messages import Request, decode_request, phase_of
from baffle.core.ports import Transport

Kind = Literal[
    "drop request",  # it never reaches the client
    "delay request",  # it reaches the client after the next one
    "repeat request",  # it reaches the client twice
    "replay request",  # it reaches the client, and again after the next one
    "corrupt request",
    "drop reply",  # the client has acted, but the server does not know
    "delay reply",  # it waits until the client is silent in a later exchange, and arrives then
    "repeat reply",  # it arrives, and a copy waits
    "swap reply",  # a waiting reply arrives instead, and this one waits
    "corrupt reply",
    "reorder",  # the client is asked after the others, and its reply comes last
]
KINDS: tuple[Kind, ...] = get_args(Kind)

ClientFaults = Mapping[Kind, bytes]
"""The faults that happen to one client in one exchange. The bytes are the seed of a fault with several forms."""

Schedule = Callable[[int, int, Request], ClientFaults]
"""Number of the exchange, client, request → the client's faults."""


def seeded(seed: bytes, rates: Mapping[str, Mapping[Kind, float]]) -> Schedule:
    """Random faults: `rates` says for each phase how often each kind happens. The schedule is a pure function of seed,
    exchange, client and phase, so that a run can be repeated whatever the order of its clients."""

    def schedule(exchange: int, client: int, request: Request) -> ClientFaults:
        phase = phase_of(request)
        faults: dict[Kind, bytes] = {}
        for kind, rate in rates.get(phase, {}).items():
            ticket = sha256(repr((seed, exchange, client, phase, kind)).encode()).digest()
            if int.from_bytes(ticket[:8], "big") < rate * 2**64:
                faults[kind] = ticket[8:]
        return faults

    return schedule


class Faults:
    """A transport that loses, delays, repeats, reorders or damages messages, as a schedule says."""

    def __init__(self, transport: Transport, schedule: Schedule) -> None:
        self._transport = transport
        self._schedule = schedule
        self._exchange = 0
        self._requests: dict[int, bytes] = {}  # delayed until after the client's next request
        self._replies: dict[int, bytes] = {}  # waiting for an exchange in which the client is silent

    def exchange(self, requests: Mapping[int, bytes]) -> Mapping[int, bytes]:
        faults = {
            client: self._schedule(self._exchange, client, decode_request(data)) for client, data in requests.items()
        }
        self._exchange += 1
        order = sorted(requests, key=lambda client: "reorder" in faults[client])
        sent = _damaged("corrupt request", {client: requests[client] for client in order}, faults)
        lost = {client for client in order if {"drop request", "delay request"} & faults[client].keys()}
        replies = self._deliver({client: data for client, data in sent.items() if client not in lost})
        second = self._deliver({client: sent[client] for client in replies if "repeat request" in faults[client]})
        delayed = self._deliver({client: self._requests.pop(client) for client in order if client in self._requests})
        for client in order:
            if {"delay request", "replay request"} & faults[client].keys():
                self._requests[client] = sent[client]
        return self._arriving(order, _damaged("corrupt reply", replies, faults), {**second, **delayed}, faults)

    def _deliver(self, requests: Mapping[int, bytes]) -> Mapping[int, bytes]:
        return self._transport.exchange(requests) if requests else {}

    def _arriving(
        self,
        order: list[int],
        replies: Mapping[int, bytes],
        extra: Mapping[int, bytes],
        faults: Mapping[int, ClientFaults],
    ) -> dict[int, bytes]:
        """The replies that reach the server now: at most one from each client. A second one waits."""
        arriving: dict[int, bytes] = {}
        for client in order:
            kinds = faults[client].keys()
            own = replies.get(client)
            waiting = self._replies.pop(client, None)
            second = own if {"delay reply", "repeat reply"} & kinds else extra.get(client)
            if {"drop reply", "delay reply"} & kinds:
                own = None
            if waiting is not None and (own is None or "swap reply" in kinds):
                own, waiting = waiting, own
            if own is not None:
                arriving[client] = own
            held = second if waiting is None else waiting
            if held is not None:
                self._replies[client] = held
        return arriving


def _damaged(kind: Kind, messages: Mapping[int, bytes], faults: Mapping[int, ClientFaults]) -> dict[int, bytes]:
    """The messages of one exchange, corrupted for the clients with a fault of this kind."""
    everybody = list(messages.values())
    return {
        client: corrupted(data, everybody, faults[client][kind]) if kind in faults[client] else data
        for client, data in messages.items()
    }


def corrupted(data: bytes, others: list[bytes], seed: bytes) -> bytes:
    """A message with bits flipped, cut short, made longer, or replaced by another client's."""
    draw = Random(seed)
    match draw.choice(("flip", "flip", "cut", "extend", "replace")):
        case "cut":
            return data[: draw.randrange(len(data) + 1)]
        case "extend":
            return data + draw.randbytes(draw.randrange(1, 9))
        case "replace" if others:
            return draw.choice(others)
        case _:
            spoilt = bytearray(data)
            for _ in range(draw.randrange(1, 4) if data else 0):
                spoilt[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
            return bytes(spoilt)
