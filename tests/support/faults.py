"""Faults on purpose: what a network does to a federation, repeatable from a seed."""

from collections.abc import Callable, Mapping
from hashlib import sha256
from random import Random
from typing import Literal, get_args

from baffle.aggregation.messages import Request, decode_request, phase_of
from baffle.core.ports import Transport

Kind = Literal[
    "drop request",  # the client never hears it
    "delay request",  # it reaches the client behind the next one
    "repeat request",  # it reaches the client twice
    "replay request",  # it reaches the client, and again behind the next one
    "corrupt request",
    "drop reply",  # the client has acted, and the server does not know
    "delay reply",  # it waits until the client is silent in a later exchange, and stands there
    "repeat reply",  # it arrives, and waits besides
    "swap reply",  # one that waits arrives, and this one waits
    "corrupt reply",
    "reorder",  # the client is asked, and heard, behind the others
]
KINDS: tuple[Kind, ...] = get_args(Kind)

Found = Mapping[Kind, bytes]
"""What befalls a client in one exchange; the bytes decide how, where there are several ways."""

Schedule = Callable[[int, int, Request], Found]
"""Number of the exchange, client, request → its faults."""


def seeded(seed: bytes, rates: Mapping[str, Mapping[Kind, float]]) -> Schedule:
    """Faults at random: `rates` has for each phase how often each kind is to happen. A pure function of the seed, the
    exchange, the client and the phase, so that a run can be repeated, whatever the order of its clients."""

    def faults(exchange: int, client: int, asked: Request) -> Found:
        phase = phase_of(asked)
        found: dict[Kind, bytes] = {}
        for kind, rate in rates.get(phase, {}).items():
            ticket = sha256(repr((seed, exchange, client, phase, kind)).encode()).digest()
            if int.from_bytes(ticket[:8], "big") < rate * 2**64:
                found[kind] = ticket[8:]
        return found

    return faults


class Faults:
    """A transport on which messages are lost, late, doubled, out of order or damaged, as a schedule says."""

    def __init__(self, transport: Transport, schedule: Schedule) -> None:
        self._transport, self._schedule = transport, schedule
        self._exchange = 0
        self._requests: dict[int, bytes] = {}  # those that come behind the next one
        self._replies: dict[int, bytes] = {}  # those that wait for a silence

    def exchange(self, requests: Mapping[int, bytes]) -> Mapping[int, bytes]:
        found = {client: self._schedule(self._exchange, client, decode_request(d)) for client, d in requests.items()}
        self._exchange += 1
        order = sorted(requests, key=lambda client: "reorder" in found[client])
        sent = _damaged("corrupt request", {client: requests[client] for client in order}, found)
        lost = {client for client in order if {"drop request", "delay request"} & found[client].keys()}
        replies = self._deliver({client: data for client, data in sent.items() if client not in lost})
        second = self._deliver({client: sent[client] for client in replies if "repeat request" in found[client]})
        behind = self._deliver({client: self._requests.pop(client) for client in order if client in self._requests})
        for client in order:
            if {"delay request", "replay request"} & found[client].keys():
                self._requests[client] = sent[client]
        return self._arriving(order, _damaged("corrupt reply", replies, found), {**second, **behind}, found)

    def _deliver(self, requests: Mapping[int, bytes]) -> Mapping[int, bytes]:
        return self._transport.exchange(requests) if requests else {}

    def _arriving(
        self, order: list[int], replies: Mapping[int, bytes], extra: Mapping[int, bytes], found: Mapping[int, Found]
    ) -> dict[int, bytes]:
        """What reaches the server now: one reply a client at most. A further one waits."""
        arriving: dict[int, bytes] = {}
        for client in order:
            kinds, own, waiting = found[client].keys(), replies.get(client), self._replies.pop(client, None)
            further = own if {"delay reply", "repeat reply"} & kinds else extra.get(client)
            if {"drop reply", "delay reply"} & kinds:
                own = None
            if waiting is not None and (own is None or "swap reply" in kinds):
                own, waiting = waiting, own
            if own is not None:
                arriving[client] = own
            held = further if waiting is None else waiting
            if held is not None:
                self._replies[client] = held
        return arriving


def _damaged(kind: Kind, messages: Mapping[int, bytes], found: Mapping[int, Found]) -> dict[int, bytes]:
    """The messages of one exchange, some of them corrupted."""
    everybody = list(messages.values())
    return {
        client: corrupted(data, everybody, found[client][kind]) if kind in found[client] else data
        for client, data in messages.items()
    }


def corrupted(data: bytes, others: list[bytes], seed: bytes) -> bytes:
    """A message with bits flipped, cut short, made longer, or in another's place."""
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
