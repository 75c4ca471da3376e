"""Sums whose record says why clients abstained. No server knows it, but a simulation does: it is all of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from baffle.core.messages import RoundRequest
from baffle.core.ports import Aggregation, Collected, Transport
from baffle.errors import ABSTAINED


@dataclass
class CandidSum:
    """Another aggregation, whose clients' reasons reach its record beside the messages."""

    aggregation: Aggregation
    _told: dict[int, list[str]] = field(default_factory=dict)

    def log_of(self, client: int) -> Callable[[str], None]:
        """The log of a client, which gets the reason each time that the client abstains."""
        return self._told.setdefault(client, []).append

    def collect(self, groups: Sequence[Mapping[int, RoundRequest]], transport: Transport) -> Collected:
        for reasons in self._told.values():
            reasons.clear()
        collected = self.aggregation.collect(groups, transport)
        told = {client: iter(reasons) for client, reasons in self._told.items()}
        refusals = [
            (client, next(told[client], why) if why == ABSTAINED and client in told else why)
            for client, why in collected.refusals
        ]
        first = dict(reversed(refusals))
        events = {client: first[client] if event == ABSTAINED else event for client, event in collected.events.items()}
        return collected._replace(events=events, refusals=refusals)

    def forget(self, client: int) -> None:
        self.aggregation.forget(client)
