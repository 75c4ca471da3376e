"""Counts what passes between the server and the clients in a round: bytes, missing answers, refusals."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from baffle.aggregation.messages import phase_of
from baffle.core.messages import Message, encode
from baffle.core.ports import Transport


@dataclass
class Traffic:
    """A transport that counts what passes over it."""

    transport: Transport
    up: dict[int, int] = field(default_factory=dict)
    down: dict[int, int] = field(default_factory=dict)
    silent: Counter[str] = field(default_factory=Counter)  # clients that did not answer, by phase
    refusals: list[tuple[int, str]] = field(default_factory=list)

    def exchange(self, messages: Mapping[int, Message]) -> Mapping[int, bytes]:
        if not messages:
            return {}
        encoded_once = {id(message): encode(message) for message in messages.values()}
        encoded = {client: encoded_once[id(message)] for client, message in messages.items()}
        replies = self.transport.exchange(encoded)
        self.silent.update(phase_of(message) for client, message in messages.items() if client not in replies)
        for counts, sent in ((self.down, encoded), (self.up, replies)):
            for client, data in sent.items():
                counts[client] = counts.get(client, 0) + len(data)
        return replies

    def refuse(self, client: int, why: Exception) -> None:
        self.refusals.append((client, str(why)))
