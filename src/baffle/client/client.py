"""The communicating half of a client: requests in, replies out. A `Worker` computes the contributions."""

from dataclasses import dataclass
from typing import Protocol

from baffle.aggregation.client.session import ClientSession
from baffle.aggregation.messages import Agree, Hello, MaskedRequest, Request, Turn, decode_request
from baffle.client.abstaining import Tell, abstention
from baffle.client.replica import Replica
from baffle.core.arrays import F32
from baffle.core.messages import Contribution, Message, RoundRequest, encode
from baffle.core.ring import ELEMENT, EXTRAS, RingVector
from baffle.core.update import State
from baffle.errors import BaffleError, RefusalError
from baffle.trajectory import Trajectory


class Computing(Protocol):
    """Computes a client's contributions: a Worker, or a place in a stack of simulated clients."""

    def vector(self, round_number: int, weights: F32, optimizer: State, /) -> RingVector: ...


@dataclass(frozen=True)
class Client:
    """One participant: its copy of the weights, its worker, and its side of the secure sum.

    Without a session the server sees its values. Without a worker it can still answer the other messages of a secure
    sum, but computes nothing. `tell` receives the full reason whenever it abstains.
    """

    replica: Replica
    worker: Computing | None
    session: ClientSession | None = None
    tell: Tell = lambda _words: None

    def answer(self, data: bytes) -> bytes:
        """The reply to a request. If this client cannot do what is asked, the reply is an Abstention."""
        try:
            return encode(self._answer(decode_request(data)))
        except (BaffleError, OSError) as fault:
            self.tell(f"abstained: {fault}")
            return abstention(data)

    def _answer(self, asked: Request) -> Message:
        session = self.session
        match asked:
            case RoundRequest() if session is None:
                return _contribution(asked, self._vector(asked))
            case MaskedRequest() if session is not None:
                return _contribution(asked.request, session.mask(asked, lambda: self._vector(asked.request)))
            case Hello() if session is not None:
                return session.advertise(asked.slot)
            case Agree() if session is not None:
                return session.agree(asked)
            case Turn() if session is not None:
                return session.turn(asked, self.tell)
            case _:
                mode = "on" if session else "off"
                raise RefusalError(f"a {type(asked).__name__}, but this client's secure.mode is {mode}")

    def _vector(self, request: RoundRequest) -> RingVector:
        if self.worker is None:
            raise RefusalError("this client has no samples and no runtime to compute with")
        return self.worker.vector(request.round, *self.replica.held_for(request))


def _contribution(request: RoundRequest, vector: RingVector) -> Contribution:
    return Contribution(request.round, vector.astype(ELEMENT, copy=False).tobytes())


def contribution_bytes(trajectory: Trajectory) -> int:
    """The size of a reply: 4 bytes per value, plus a constant."""
    return len(encode(Contribution(0, bytes(ELEMENT.itemsize * (trajectory.length + EXTRAS)))))
