"""A client's copy of the weights: how it is brought up to date, and how the client checks that it is right.

A client begins at weights that it made itself, and moves by the outcomes of rounds, which it applies itself. Each step
leads to a hash of everything before it, and a request names the hash that it is about. A client that comes later may
take the state with which an epoch begins, if that state leads to the hash in the epoch's statement.
"""

import threading
import time
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

import msgspec
import numpy as np

from baffle.core.arrays import F32
from baffle.core.chain import Present, chain_next
from baffle.core.messages import CatchUp, RoundRequest, read
from baffle.core.state import FLOAT, pack, unpack
from baffle.errors import BaffleError, JournalError, MessageError, unwritable
from baffle.files import read_file, replace
from baffle.lineage import Lineage
from baffle.trajectory import Trajectory

SAVE_SECONDS = 10.0
"""Seconds between two saves, so a client that was killed repeats at most this much work."""

SLACK_BYTES = 1 << 16
"""Room in a saved replica for everything but its state."""


class Saved(msgspec.Struct, frozen=True, array_like=True):
    """A replica as bytes: the run that it belongs to, where it is, and its state, or only weights if it does not replay
    rounds."""

    trajectory: bytes
    run: bytes
    round: int
    chain: bytes
    state: bytes
    weights: bytes = b""


class Replica:
    """A client's copy of the weights. Simulated clients share one replica, because their weights are identical.

    It begins where the client can begin by itself. With `downlink` other than "scalars" the server sends weights, or
    their differences, and the client takes its word for them. A state is taken whole only with `snapshots`. With a
    `file`, the state is saved there every few seconds, and a client that is restarted continues from it.
    """

    astray: bool
    """Whether a catch-up failed to lead to the run's state: this client has been told another story than the others."""

    def __init__(self, lineage: Lineage, present: Present, file: Path | None = None, *, snapshots: bool = True) -> None:
        self._prepare(lineage, file, snapshots=snapshots)
        self._hold(present)
        if file:
            with suppress(OSError, MessageError, JournalError):
                self._continue(read_saved(file, lineage.trajectory))

    def _prepare(self, lineage: Lineage, file: Path | None, *, snapshots: bool) -> None:
        self._lineage = lineage
        self._snapshots = snapshots
        self._file = file
        self._saved = time.monotonic()
        self._lock = threading.Lock()
        self.astray = False
        self._present: Present | None = None

    @property
    def trajectory(self) -> Trajectory:
        return self._lineage.trajectory

    @property
    def round(self) -> int:
        """The round whose weights this replica holds."""
        return self._round

    @property
    def chain(self) -> bytes:
        """The hash of all that led to the weights, by this client's own account; empty if it has none."""
        return self._present.chain if self._present else b""

    def in_epoch(self, lineage: Lineage, *, snapshots: bool = True) -> "Replica":
        """A replica that goes on from here in a later epoch of the same run."""
        return Replica.thawed(lineage, self.frozen(), self._file, snapshots=snapshots)

    @classmethod
    def thawed(cls, lineage: Lineage, frozen: bytes, file: Path | None = None, *, snapshots: bool = True) -> "Replica":
        """A replica that continues from what another held when it was frozen."""
        replica = cls.__new__(cls)
        replica._prepare(lineage, file, snapshots=snapshots)
        replica._continue(read(frozen, Saved, "Replica"))
        return replica

    def save(self) -> None:
        """Write the state to the file. Does nothing without a file or without a whole state."""
        if not self._file or self._present is None:
            return
        data = self.frozen()
        try:
            replace(self._file, sha256(data).digest() + data)
        except OSError as fault:
            raise unwritable(self._file, fault, "this client takes no part until it can") from None
        self._saved = time.monotonic()

    def frozen(self) -> bytes:
        """What this replica holds, as bytes from which another replica can continue."""
        run = self._lineage.links[-1].run if self._lineage.links else b""
        state = pack(self._present.state) if self._present else b""
        weights = b"" if self._present else self._weights.astype(FLOAT, copy=False).tobytes()
        return msgspec.msgpack.encode(Saved(self.trajectory.digest, run, self._round, self.chain, state, weights))

    def weights_for(self, request: RoundRequest) -> F32:
        """The weights that the request is about, after its catch-up. If they do not have the hash that the server
        names, the request is refused and the replica keeps what it had."""
        if request.trajectory != self.trajectory.digest:
            raise MessageError("the server follows another plan than this client")
        with self._lock:
            if self._round == request.round and self._hash == request.weights_hash and self._knows(request.chain):
                return self._weights
            replays = request.catch_up.kind in ("outcomes", "hashed", "snapshot")
            self.astray = replays  # until the hashes below prove otherwise
            try:
                self._move(request)
            except MessageError:
                raise
            except BaffleError as fault:
                raise MessageError(f"what the server says does not lead to its weights: {fault}") from None
            self.astray = False
            if time.monotonic() - self._saved > SAVE_SECONDS:
                self.save()
            return self._weights

    def _knows(self, chain: bytes) -> bool:
        return self._present is None or self._present.chain == chain

    def _move(self, request: RoundRequest) -> None:
        catch_up = request.catch_up
        if catch_up.kind in ("delta", "weights"):
            if self.trajectory.plan.run.downlink == "scalars":
                raise MessageError(f"a catch-up by {catch_up.kind}, but in this run clients apply outcomes themselves")
            weights = self._sent(catch_up)
            if _hash(weights) != request.weights_hash:
                raise _other_weights(request)
            self._present, self._weights, self._hash = None, weights, request.weights_hash
            self._round = request.round
            return
        present = self._replayed(catch_up)
        if (present.round, present.chain) != (request.round, request.chain):
            raise _other_weights(request)
        if present.state.weights_hash() != request.weights_hash:
            raise _other_weights(request)
        self._hold(present)

    def _replayed(self, catch_up: CatchUp) -> Present:
        """The present that the outcomes lead to. The last state is hashed here, so the chain is right only if it and
        all hashes that the server names are. Where the server may lie, none of its hashes count: one for a round that
        no client saw could make a chain that clients sign and no auditor can follow."""
        present = self._present
        if catch_up.kind == "snapshot":
            present, catch_up = self._proved(catch_up), CatchUp("outcomes", catch_up.since, catch_up.items[3:])
        if present is None or present.round < catch_up.since:
            raise MessageError(f"rounds from {catch_up.since} on, but this client is at round {self._round}")
        may_lie = self.trajectory.plan.secure.mode == "malicious-server"
        for outcome, digest in catch_up.steps()[present.round - catch_up.since :]:
            present = self._lineage.advance(present, outcome, b"" if may_lie else digest)
        return present

    def _proved(self, catch_up: CatchUp) -> Present:
        """The state with which the present epoch begins. It comes with the hash of the chain before the last round, and
        that round's outcome: together they must give the hash in the epoch's statement."""
        link = self._lineage.links[-1] if self._lineage.links else None
        if link is None or link.first != catch_up.since or link.before is None or len(catch_up.items) < 3:
            raise MessageError("a state that nothing proves; it is taken only where an epoch begins")
        if not self._snapshots:
            raise MessageError("a state that no certificate vouches for; this client applies outcomes, or waits")
        packed, before, outcome = catch_up.items[:3]
        state = unpack(self.trajectory.rule, packed)
        return self._lineage.linked(Present(link.first, state, chain_next(before, outcome, state)))

    def _sent(self, catch_up: CatchUp) -> F32:
        if len(catch_up.items) != 1:
            raise MessageError(f"a catch-up by {catch_up.kind} has one item, got {len(catch_up.items)}")
        numbers = _numbers(catch_up.items[0], self.trajectory.n)
        if catch_up.kind == "weights":
            return numbers.view(np.float32)
        if catch_up.since != self._round:
            raise MessageError(f"a difference from round {catch_up.since}, but this client is at round {self._round}")
        return (self._weights.view(np.uint32) + numbers).view(np.float32)

    def _hold(self, present: Present) -> None:
        self._present, self._round, self._weights = present, present.round, present.state.weights
        self._hash = present.state.weights_hash()

    def _continue(self, saved: Saved) -> None:
        """Hold what was saved, if it belongs to this run."""
        if saved.trajectory != self.trajectory.digest:
            raise MessageError("a replica of another plan")
        runs = [link.run for link in self._lineage.links]
        if saved.run not in (runs or [b""]):
            raise MessageError("a replica of another run")
        if saved.weights:
            self._present, self._round = None, saved.round
            self._weights = _numbers(saved.weights, self.trajectory.n).view(np.float32)
            self._hash = _hash(self._weights)
            return
        state = unpack(self.trajectory.rule, saved.state)
        self._hold(self._lineage.linked(Present(saved.round, state, saved.chain), after=saved.run))


def read_saved(file: Path, trajectory: Trajectory) -> Saved:
    """What a file holds. A damaged file is refused: the server can send everything again."""
    state = sum(vector.nbytes for vector in trajectory.rule.start(np.zeros(trajectory.n, np.float32)).vectors())
    data = read_file(file, state + SLACK_BYTES)
    if sha256(data[32:]).digest() != data[:32]:
        raise MessageError(f"{file} is damaged")
    saved: Saved = read(data[32:], Saved, "Replica")
    return saved


def _numbers(data: bytes, n: int) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    if len(data) != n * FLOAT.itemsize:
        raise MessageError(f"expected {n} weights of 4 bytes, got {len(data)} bytes")
    return np.frombuffer(data, dtype="<u4").astype(np.uint32)


def _hash(weights: F32) -> bytes:
    return sha256(weights.astype(FLOAT, copy=False).data).digest()


def _other_weights(request: RoundRequest) -> MessageError:
    return MessageError(f"round {request.round}: this client's weights are not the ones that the server names")
