"""Counts what passes between the server and the clients in a round: bytes, missing answers, abstentions, refusals."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from baffle.aggregation.messages import phase_of
from baffle.core.messages import Message, encode
from baffle.core.ports import Collected, Transport
from baffle.core.ring import Sum
from baffle.errors import AbstainedError


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
        """Note that a client's answer is of no use."""
        self.refusals.append((client, str(why)))
        if isinstance(why, AbstainedError):
            self.abstained[self._asked[client]] += 1

    def collected(self, sums: Sequence[Sum | None], events: Mapping[int, str]) -> Collected:
        """How the round ended, with all that was counted."""
        return Collected(sums, events, dict(self.silent), dict(self.abstained), self.refusals, self.up, self.down)
