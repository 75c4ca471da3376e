"""What a round costs each client in bytes."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from baffle.core.messages import Message, encode
from baffle.core.ports import Transport


@dataclass
class Traffic:
    """A transport whose bytes are counted, per client."""

    transport: Transport
    up: dict[int, int] = field(default_factory=dict)
    down: dict[int, int] = field(default_factory=dict)
    answered: frozenset[int] = frozenset()  # who replied in the last exchange

    def exchange(self, messages: Mapping[int, Message]) -> Mapping[int, bytes]:
        once = {id(message): encode(message) for message in messages.values()}
        encoded = {client: once[id(message)] for client, message in messages.items()}
        replies = self.transport.exchange(encoded)
        self.answered = frozenset(replies)
        for counts, sent in ((self.down, encoded), (self.up, replies)):
            for client, data in sent.items():
                counts[client] = counts.get(client, 0) + len(data)
        return replies
