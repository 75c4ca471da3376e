"""A client's copy of the weights: how it is brought up to date, and how the client checks that it is right."""

import threading
import time
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from baffle.core.arrays import F32
from baffle.core.messages import CatchUp, Outcome, RoundRequest, decode, read
from baffle.core.state import FLOAT, ServerState, apply, pack, unpack
from baffle.errors import JournalError, MessageError, unwritable
from baffle.files import read_file, replace
from baffle.trajectory import Trajectory


class Held(NamedTuple):
    """What a client holds: the weights, and the whole state if it replays rounds."""

    state: ServerState | None
    weights: F32


MOST_BYTES = 1 << 33
"""Of a saved replica."""

SAVE_SECONDS = 10.0
"""Seconds between two saves, so a client that was killed repeats at most this much work."""


class Replica:
    """A client's copy of the weights. Simulated clients share one replica, because their weights are identical.

    A catch-up by `outcomes` replays rounds and needs the whole state; for `weights` or `delta` the weights are enough.
    With a `file`, a whole state is saved there every few seconds, and a client that is restarted continues from it.
    """

    astray: bool
    """Whether a catch-up failed to lead to the server's weights, so that this replica needs them whole."""

    def __init__(self, trajectory: Trajectory, file: Path | None = None) -> None:
        self.trajectory = trajectory
        self._file = file
        self._saved = time.monotonic()
        self._lock = threading.Lock()
        self.astray = False
        self._round, state = _saved(file, trajectory) if file else (-1, None)
        self._held = Held(state, state.weights if state else np.empty(0, np.float32))
        self._hash = state.weights_hash() if state else b""

    @property
    def round(self) -> int:
        """The round whose weights this replica holds; −1 for none."""
        return self._round

    @staticmethod
    def round_in(file: Path) -> int:
        """The round of the state saved in a file; −1 if there is none."""
        saved = _read(file)
        return saved[1] if saved else -1

    def forget(self) -> None:
        """Hold nothing, as at the beginning. The file stays until the next save replaces it."""
        with self._lock:
            self._round, self._held, self._hash = -1, Held(None, np.empty(0, np.float32)), b""
            self.astray = False

    def save(self) -> None:
        """Write the state to the file. Does nothing without a file or without a whole state."""
        if not self._file or self._held.state is None:
            return
        data = msgspec.msgpack.encode((self.trajectory.digest, self._round, pack(self._held.state)))
        try:
            replace(self._file, sha256(data).digest() + data)
        except OSError as fault:
            raise unwritable(self._file, fault, "this client takes no part until it can") from None
        self._saved = time.monotonic()

    def frozen(self) -> bytes:
        """What this replica holds, as bytes from which another replica can continue."""
        state, weights = self._held
        held = ("state", pack(state)) if state else ("weights", weights.astype(FLOAT, copy=False).tobytes())
        return msgspec.msgpack.encode((self.trajectory.digest, self._round, *held))

    def thaw(self, frozen: bytes) -> None:
        """Continue from what another replica held when it was frozen."""
        digest, number, kind, data = read(frozen, tuple[bytes, int, Literal["state", "weights"], bytes], "Replica")
        if digest != self.trajectory.digest:
            raise MessageError("a replica of another plan")
        if kind == "state":
            state = unpack(self.trajectory.rule, data)
            self._held = Held(state, state.weights)
        else:
            self._held = Held(None, self._vector(data).view(np.float32) if data else np.empty(0, np.float32))
        self._round = number
        self._hash = sha256(self._held.weights.astype(FLOAT, copy=False).data).digest()

    def weights_for(self, request: RoundRequest) -> F32:
        """The weights that the request is about, after its catch-up. If they do not have the hash that the server
        names, the request is refused and the replica keeps what it had."""
        if request.trajectory != self.trajectory.digest:
            raise MessageError("the server follows another plan than this client")
        with self._lock:
            if self._round == request.round and self._hash == request.weights_hash:
                return self._held.weights
            self.astray = request.catch_up.kind in ("outcomes", "delta")  # until the hash below proves otherwise
            held = self._advanced(request.catch_up)
            if sha256(held.weights.astype(FLOAT, copy=False).data).digest() != request.weights_hash:
                raise MessageError(
                    f"round {request.round}: this client's weights are not the ones that the server names"
                )
            self._round, self._held, self._hash = request.round, held, request.weights_hash
            self.astray = False
            if time.monotonic() - self._saved > SAVE_SECONDS:
                self.save()
            return held.weights

    def _advanced(self, catch_up: CatchUp) -> Held:
        match catch_up.kind:
            case "snapshot":
                try:
                    state = unpack(self.trajectory.rule, _only(catch_up))
                except JournalError as fault:
                    raise MessageError(f"the server's state is of no use: {fault}") from None
                return Held(state, state.weights)
            case "outcomes":
                state = self._replayed(catch_up)
                return Held(state, state.weights)
            case "weights":
                return Held(None, self._vector(_only(catch_up)).view(np.float32))
            case "delta":
                if catch_up.since != self._round:
                    raise MessageError(
                        f"a difference from round {catch_up.since}, but this client is at round {self._round}"
                    )
                moved = self._held.weights.view(np.uint32) + self._vector(_only(catch_up))
                return Held(None, moved.view(np.float32))

    def _replayed(self, catch_up: CatchUp) -> ServerState:
        state = self._held.state
        if state is None or self._round < catch_up.since:
            raise MessageError(f"rounds from {catch_up.since} on, but this client is at round {self._round}")
        for item in catch_up.items[self._round - catch_up.since :]:
            state = apply(self.trajectory.rule, state, decode(item, Outcome))
        return state

    def _vector(self, data: bytes) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
        if len(data) != self.trajectory.n * FLOAT.itemsize:
            raise MessageError(f"expected {self.trajectory.n} weights of 4 bytes, got {len(data)} bytes")
        return np.frombuffer(data, dtype="<u4").astype(np.uint32)


def _read(file: Path) -> tuple[bytes, int, bytes] | None:
    """The saved trajectory digest, round and state. None if the file is missing or damaged: the server can send the
    state again."""
    with suppress(OSError, MemoryError, msgspec.MsgspecError):
        data = read_file(file, MOST_BYTES)
        if sha256(data[32:]).digest() == data[:32]:
            return msgspec.msgpack.decode(data[32:], type=tuple[bytes, int, bytes])
    return None


def _saved(file: Path, trajectory: Trajectory) -> tuple[int, ServerState | None]:
    """The saved round and state, if they belong to this trajectory; otherwise −1 and None."""
    saved = _read(file)
    if saved:
        digest, number, state = saved
        if digest == trajectory.digest:
            with suppress(JournalError):
                return number, unpack(trajectory.rule, state)
    return -1, None


def _only(catch_up: CatchUp) -> bytes:
    if len(catch_up.items) != 1:
        raise MessageError(f"a catch-up by {catch_up.kind} has one item, got {len(catch_up.items)}")
    return catch_up.items[0]
