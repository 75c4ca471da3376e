"""The plain sum: the server sees every client's vector, and can therefore refuse a single bad one. And the count of a
round's traffic, for plain and secure sums."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from baffle.aggregation.messages import phase_of
from baffle.core.messages import Message, RoundRequest, contribution_to, encode
from baffle.core.ports import CONTRIBUTED, MISSING, Collected, Transport
from baffle.core.ring import EXTRAS, Encoding, RingVector, Sum, add
from baffle.errors import AbortError, AbstainedError, MessageError


@dataclass
class Traffic:
    """A transport that counts what passes over it."""

    transport: Transport
    up: dict[int, int] = field(default_factory=dict)
    down: dict[int, int] = field(default_factory=dict)
    silent: Counter[str] = field(default_factory=Counter)  # clients that did not answer, by phase
    abstained: Counter[str] = field(default_factory=Counter)  # clients that did not do their part, by phase
    refusals: list[tuple[int, str]] = field(default_factory=list)
    _asked: dict[int, str] = field(default_factory=dict)  # the phase of what each client was last asked

    def exchange(self, messages: Mapping[int, Message]) -> Mapping[int, bytes]:
        if not messages:
            return {}
        encoded_once = {id(message): encode(message) for message in messages.values()}
        encoded = {client: encoded_once[id(message)] for client, message in messages.items()}
        replies = self.transport.exchange(encoded)
        self._asked |= {client: phase_of(message) for client, message in messages.items()}
        self.silent.update(self._asked[client] for client in messages if client not in replies)
        for counts, sent in ((self.down, encoded), (self.up, replies)):
            for client, data in sent.items():
                counts[client] = counts.get(client, 0) + len(data)
        return replies

    def refuse(self, client: int, why: Exception) -> None:
        """Note that a client's reply cannot be used, and why."""
        self.refusals.append((client, str(why)))
        if isinstance(why, AbstainedError):
            self.abstained[self._asked[client]] += 1

    def collected(self, sums: Sequence[Sum | None], events: Mapping[int, str]) -> Collected:
        """How the round ended, with everything counted here."""
        return Collected(sums, events, dict(self.silent), dict(self.abstained), self.refusals, self.up, self.down)


@dataclass(frozen=True)
class PlainSum:
    """Adds up contributions of `length` values in a ring, from at least `least` clients."""

    ring: Encoding
    length: int
    least: int = 1

    def collect(self, groups: Sequence[Mapping[int, RoundRequest]], transport: Transport) -> Collected:
        traffic = Traffic(transport)
        asked = {client: request for requests in groups for client, request in requests.items()}
        events = dict.fromkeys(asked, MISSING)
        vectors: dict[int, RingVector] = {}
        for client, data in traffic.exchange(asked).items():
            try:
                vector = contribution_to(asked[client], data)
                if len(vector) != self.length + EXTRAS:
                    raise MessageError(f"a vector of {len(vector)} elements, expected {self.length + EXTRAS}")
                self.ring.check(vector, 1)
                vectors[client], events[client] = vector, CONTRIBUTED
            except MessageError as fault:
                events[client] = str(fault)
                traffic.refuse(client, fault)
        sums: list[Sum | None] = []
        for group in groups:
            summed = {client: vectors[client] for client in group if client in vectors}
            try:
                if 0 < len(summed) < self.least:
                    raise AbortError(f"{len(summed)} clients answered, expected at least {self.least}")
                sums.append(self.ring.decode(add(summed.values()), len(summed)) if summed else None)
            except MessageError as fault:
                sums.append(None)
                events |= dict.fromkeys(summed, f"the sum was abandoned: {fault}")
        return traffic.collected(tuple(sums), events)

    def forget(self, client: int) -> None:
        """Do nothing: a plain sum knows nothing about its clients from one round to the next."""
