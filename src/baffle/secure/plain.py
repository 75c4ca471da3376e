"""The plain sum: the server sees every client's vector. It can therefore refuse a single bad one."""

from collections.abc import Mapping
from dataclasses import dataclass

from baffle.core.messages import Abstention, RoundRequest, decode_reply
from baffle.core.ports import Closed
from baffle.core.ring import EXTRAS, Ring, RingVector, add
from baffle.errors import MessageError


@dataclass(frozen=True)
class PlainSum:
    """Adds up contributions of `length` values in a ring."""

    ring: Ring
    length: int

    def close(self, request: RoundRequest, replies: Mapping[int, bytes]) -> Closed:
        vectors: list[RingVector] = []
        refusals: dict[int, str] = {}
        for client, data in replies.items():
            try:
                vectors.append(self._vector(request, data))
            except MessageError as fault:
                refusals[client] = str(fault)
        return Closed(self.ring.decode(add(vectors), len(vectors)) if vectors else None, refusals)

    def _vector(self, request: RoundRequest, data: bytes) -> RingVector:
        reply = decode_reply(data)
        if reply.round != request.round:
            raise MessageError(f"a reply to round {reply.round}, expected round {request.round}")
        if isinstance(reply, Abstention):
            raise MessageError(f"abstained: {reply.reason}")
        vector = reply.elements()
        if len(vector) != self.length + EXTRAS:
            raise MessageError(f"a vector of {len(vector)} elements, expected {self.length + EXTRAS}")
        self.ring.decode(vector, 1)
        return vector
