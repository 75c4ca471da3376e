"""A client's copy of the weights: how it is brought up to date, and how it knows that it is right."""

import threading
from hashlib import sha256
from typing import NamedTuple

import numpy as np

from baffle.core.arrays import F32
from baffle.core.messages import CatchUp, Outcome, RoundRequest, decode
from baffle.core.state import FLOAT, ServerState, apply, unpack
from baffle.errors import MessageError
from baffle.trajectory import Trajectory


class Held(NamedTuple):
    """What a client holds: the weights, and the whole state where it replays."""

    state: ServerState | None
    weights: F32


class Replica:
    """The weights as a client holds them. Simulated clients share one, because theirs are identical.

    With `outcomes` it replays rounds and needs the whole state; with `weights` or `delta` the weights are enough.
    """

    def __init__(self, course: Trajectory) -> None:
        self._course = course
        self._lock = threading.Lock()
        self._round = -1
        self._held = Held(None, np.empty(0, np.float32))
        self._hash = b""

    def weights_for(self, request: RoundRequest) -> F32:
        """The weights that the request is about. Refused, without a change, when they are not everybody's."""
        if request.trajectory != self._course.digest:
            raise MessageError("the server follows another plan than this client")
        with self._lock:
            if self._round == request.round and self._hash == request.weights_hash:
                return self._held.weights
            held = self._advanced(request.catch_up)
            if sha256(held.weights.astype(FLOAT, copy=False).data).digest() != request.weights_hash:
                raise MessageError(
                    f"round {request.round}: this client's weights are not the ones that the server names"
                )
            self._round, self._held, self._hash = request.round, held, request.weights_hash
            return held.weights

    def _advanced(self, catch_up: CatchUp) -> Held:
        match catch_up.kind:
            case "snapshot":
                state = unpack(self._course.rule, _only(catch_up))
                return Held(state, state.weights)
            case "outcomes":
                state = self._replayed(catch_up)
                return Held(state, state.weights)
            case "weights":
                return Held(None, self._vector(_only(catch_up)).view(np.float32))
            case "delta":
                if catch_up.since != self._round:
                    raise MessageError(f"a difference from round {catch_up.since}, but this client is at {self._round}")
                moved = self._held.weights.view(np.uint32) + self._vector(_only(catch_up))
                return Held(None, moved.view(np.float32))

    def _replayed(self, catch_up: CatchUp) -> ServerState:
        state = self._held.state
        if state is None or self._round < catch_up.since:
            raise MessageError(f"rounds from {catch_up.since} on, but this client is at round {self._round}")
        for item in catch_up.items[self._round - catch_up.since :]:
            state = apply(self._course.rule, state, decode(item, Outcome))
        return state

    def _vector(self, data: bytes) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
        if len(data) != self._course.n * FLOAT.itemsize:
            raise MessageError(f"expected {self._course.n} weights of 4 bytes, got {len(data)} bytes")
        return np.frombuffer(data, dtype="<u4").astype(np.uint32)


def _only(catch_up: CatchUp) -> bytes:
    if len(catch_up.items) != 1:
        raise MessageError(f"a catch-up by {catch_up.kind} has one item, got {len(catch_up.items)}")
    return catch_up.items[0]
