"""A client's copy of the weights: how it is brought up to date, and how it knows that it is right."""

import threading
from hashlib import sha256

import numpy as np

from baffle.core.arrays import F32
from baffle.core.messages import CatchUp, Outcome, RoundRequest, decode
from baffle.core.state import FLOAT, ServerState, apply, unpack
from baffle.errors import MessageError
from baffle.trajectory import Trajectory


class Replica:
    """The weights as a client holds them. Simulated clients share one, because theirs are identical.

    With `outcomes` it replays rounds and needs the whole state; with `weights` or `delta` the weights are enough.
    """

    def __init__(self, course: Trajectory) -> None:
        self._course = course
        self._lock = threading.Lock()
        self._round = -1
        self._state: ServerState | None = None
        self._weights = np.empty(0, np.float32)
        self._hash = b""

    def weights_for(self, request: RoundRequest) -> F32:
        """The weights that the request is about; refused when they are not everybody's."""
        if request.trajectory != self._course.digest:
            raise MessageError("the server follows another plan than this client")
        with self._lock:
            if self._round != request.round:
                self._advance(request.catch_up)
                self._round = request.round
                self._hash = sha256(self._weights.astype(FLOAT, copy=False).data).digest()
            if self._hash != request.weights_hash:
                raise MessageError(
                    f"round {request.round}: this client's weights are not the ones that the server names"
                )
            return self._weights

    def _advance(self, catch_up: CatchUp) -> None:
        match catch_up.kind:
            case "snapshot":
                self._state = unpack(self._course.rule, _only(catch_up))
                self._weights = self._state.weights
            case "outcomes":
                self._replay(catch_up)
            case "weights":
                self._weights = self._vector(_only(catch_up)).view(np.float32)
            case "delta":
                if catch_up.since != self._round:
                    raise MessageError(f"a difference from round {catch_up.since}, but this client is at {self._round}")
                moved = self._weights.view(np.uint32) + self._vector(_only(catch_up))
                self._weights = moved.view(np.float32)

    def _replay(self, catch_up: CatchUp) -> None:
        state, number = self._state, self._round
        if state is None or number < catch_up.since:
            raise MessageError(f"rounds from {catch_up.since} on, but this client is at round {number}")
        for item in catch_up.items[number - catch_up.since :]:
            state = apply(self._course.rule, state, decode(item, Outcome))
        self._state, self._weights = state, state.weights

    def _vector(self, data: bytes) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
        if len(data) != self._course.n * FLOAT.itemsize:
            raise MessageError(f"expected {self._course.n} weights of 4 bytes, got {len(data)} bytes")
        return np.frombuffer(data, dtype="<u4").astype(np.uint32)


def _only(catch_up: CatchUp) -> bytes:
    if len(catch_up.items) != 1:
        raise MessageError(f"a catch-up by {catch_up.kind} has one item, got {len(catch_up.items)}")
    return catch_up.items[0]
