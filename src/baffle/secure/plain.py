"""The plain sum: the server sees every client's vector. It can therefore refuse a single bad one."""

from collections.abc import Mapping
from dataclasses import dataclass

from baffle.core.messages import RoundRequest, contribution_to
from baffle.core.ports import CONTRIBUTED, MISSING, Collected, Transport
from baffle.core.ring import EXTRAS, Ring, RingVector, add
from baffle.errors import MessageError
from baffle.secure.traffic import Traffic


@dataclass(frozen=True)
class PlainSum:
    """Adds up contributions of `length` values in a ring."""

    ring: Ring
    length: int

    def collect(self, requests: Mapping[int, RoundRequest], transport: Transport) -> Collected:
        traffic, events = Traffic(transport), dict.fromkeys(requests, MISSING)
        vectors: list[RingVector] = []
        for client, data in traffic.exchange(requests).items():
            try:
                vectors.append(self._vector(requests[client], data))
                events[client] = CONTRIBUTED
            except MessageError as fault:
                events[client] = str(fault)
        total = self.ring.decode(add(vectors), len(vectors)) if vectors else None
        return Collected(total, events, traffic.up, traffic.down)

    def _vector(self, request: RoundRequest, data: bytes) -> RingVector:
        vector = contribution_to(request, data)
        if len(vector) != self.length + EXTRAS:
            raise MessageError(f"a vector of {len(vector)} elements, expected {self.length + EXTRAS}")
        self.ring.decode(vector, 1)
        return vector
