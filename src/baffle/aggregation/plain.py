"""The plain sum: the server sees every client's vector, and can therefore refuse a single bad one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from baffle.aggregation.server.traffic import Traffic
from baffle.core.messages import RoundRequest, contribution_to
from baffle.core.ports import CONTRIBUTED, MISSING, Collected, Transport
from baffle.core.ring import EXTRAS, Encoding, RingVector, Sum, add
from baffle.errors import AbortError, MessageError


@dataclass(frozen=True)
class PlainSum:
    """Adds up contributions of `length` values in a ring, from at least so many clients."""

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
                vectors[client] = self._vector(asked[client], data)
                events[client] = CONTRIBUTED
            except MessageError as fault:
                events[client] = str(fault)
                traffic.refuse(client, fault)
        sums: list[Sum | None] = []
        for group in groups:
            summed = {client: vectors[client] for client in group if client in vectors}
            try:
                sums.append(self._total(summed) if summed else None)
            except MessageError as fault:
                sums.append(None)
                events |= dict.fromkeys(summed, f"the sum was abandoned: {fault}")
        return traffic.collected(tuple(sums), events)

    def _total(self, vectors: Mapping[int, RingVector]) -> Sum:
        if len(vectors) < self.least:
            raise AbortError(f"{len(vectors)} clients answered, expected at least {self.least}")
        return self.ring.decode(add(vectors.values()), len(vectors))

    def forget(self, client: int) -> None:
        """Do nothing: a plain sum knows nothing about its clients from one round to the next."""

    def _vector(self, request: RoundRequest, data: bytes) -> RingVector:
        vector = contribution_to(request, data)
        if len(vector) != self.length + EXTRAS:
            raise MessageError(f"a vector of {len(vector)} elements, expected {self.length + EXTRAS}")
        self.ring.check(vector, 1)
        return vector
