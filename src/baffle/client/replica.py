"""A client's copy of the weights: how it is updated and checked.

A client makes the initial weights itself and applies the outcomes of rounds itself. Each step extends a chain of
hashes, and a request names the hash that it is about. A client that joins later may take the state at the start of an
epoch, if that state leads to the hash in the epoch's statement.
"""

import math
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from baffle.core.arrays import F32
from baffle.core.messages import CatchUp, RoundRequest, read
from baffle.core.state import FLOAT, Present, chain_next, distance, pack, unpack
from baffle.core.update import State
from baffle.errors import BaffleError, JournalError, MessageError, OutOfReachError, unwritable
from baffle.files import read_file, replace
from baffle.lineage import Lineage
from baffle.trajectory import Trajectory

SAVE_SECONDS = 10.0  # seconds between two saves. A client that was killed repeats at most this much work.
SLACK_BYTES = 1 << 16  # bytes of a saved replica for everything but its state


class Saved(msgspec.Struct, frozen=True, array_like=True):
    """A replica as bytes: its run, where it is, and its state, or only weights if it does not replay rounds."""

    trajectory: bytes
    run: bytes
    round: int
    chain: bytes
    state: bytes
    weights: bytes = b""
    at_most: float = math.inf  # the weights are no further than this from those that the run began with


class Held(NamedTuple):
    """What a replica holds for a round. Weights that were sent come without an optimizer's state."""

    weights: F32
    optimizer: State


class Reach(NamedTuple):
    """How far a client lets a server move its weights: in one round, and from those that the run began with. Both are
    root mean squares over all weights."""

    step: float
    distance: float
    initial: Callable[[], F32]  # the weights that the run began with

    def after(self, before: F32, after: F32, at_most: float, rounds: int = 1) -> float:
        """How far the weights are at most from the first ones after so many rounds, if they were `at_most` so far
        before. Steps are added up, which needs no copy of the first weights; only a sum beyond the limit is measured.
        Refuses weights out of reach."""
        if math.isinf(self.step) and math.isinf(self.distance):
            return at_most
        step = distance(before, after)
        if not step <= self.step * rounds:
            raise OutOfReachError(f"a round moves the weights by {step:g}, most_step allows {self.step:g}")
        return self.within(after, at_most + step)

    def within(self, weights: F32, at_most: float = math.inf) -> float:
        if not at_most <= self.distance:
            at_most = distance(self.initial(), weights)
            if not at_most <= self.distance:
                raise OutOfReachError(
                    f"the weights are {at_most:g} from those that the run began with, most_distance allows "
                    f"{self.distance:g}"
                )
        return at_most


NO_LIMIT = Reach(math.inf, math.inf, lambda: np.empty(0, np.float32))


class Replica:
    """A client's copy of the weights. Simulated clients share one replica, because their weights are identical.

    It starts at a present that the client can compute itself. With a `downlink` other than "scalars" the server sends
    weights, or their differences, and the client trusts them. A whole state is accepted only with `snapshots`. With a
    `file`, the state is saved there every few seconds, and a restarted client continues from it.
    """

    diverged: bool
    """Whether the last catch-up did not lead to the state that the server names: the server's history does not match
    this client's replay."""
    out_of_reach: str
    """Why the weights that the server names are further than this client goes; empty if they are not."""

    def __init__(
        self,
        lineage: Lineage,
        present: Present,
        file: Path | None = None,
        *,
        snapshots: bool = True,
        reach: Reach = NO_LIMIT,
    ) -> None:
        self._prepare(lineage, file, snapshots, reach)
        self._hold(present, 0.0)
        if file:
            with suppress(OSError, MessageError, JournalError):
                self._continue(read_saved(file, lineage.trajectory))

    def _prepare(self, lineage: Lineage, file: Path | None, snapshots: bool, reach: Reach) -> None:
        self._lineage, self._file, self._snapshots, self._reach = lineage, file, snapshots, reach
        self._saved, self._lock = time.monotonic(), threading.Lock()
        self.diverged, self.out_of_reach = False, ""
        self._present: Present | None = None
        self._round, self._at_most, self._weights = 0, 0.0, np.empty(0, np.float32)

    @property
    def trajectory(self) -> Trajectory:
        return self._lineage.trajectory

    @property
    def round(self) -> int:
        """The round whose weights this replica holds."""
        return self._round

    @property
    def chain(self) -> bytes:
        """The hash of everything that led to the weights, as this client computed it; empty if it was sent weights."""
        return self._present.chain if self._present else b""

    def in_epoch(self, lineage: Lineage, *, snapshots: bool = True) -> "Replica":
        """A replica that continues from here in a later epoch of the same run."""
        return Replica.thawed(lineage, self.frozen(), self._file, snapshots=snapshots, reach=self._reach)

    @classmethod
    def thawed(
        cls,
        lineage: Lineage,
        frozen: bytes,
        file: Path | None = None,
        *,
        snapshots: bool = True,
        reach: Reach = NO_LIMIT,
    ) -> "Replica":
        """A replica that continues from a frozen one."""
        replica = cls.__new__(cls)
        replica._prepare(lineage, file, snapshots, reach)
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
        """This replica as bytes, from which another replica can continue."""
        run = self._lineage.epochs[-1].run if self._lineage.epochs else b""
        state = pack(self._present.state) if self._present else b""
        weights = b"" if self._present else self._weights.astype(FLOAT, copy=False).tobytes()
        saved = Saved(self.trajectory.digest, run, self._round, self.chain, state, weights, self._at_most)
        return msgspec.msgpack.encode(saved)

    def weights_for(self, request: RoundRequest) -> F32:
        """The weights that the request is about, after its catch-up. If their hash is not the one that the server
        names, the request is refused and the replica stays as it was."""
        return self.held_for(request).weights

    def held_for(self, request: RoundRequest) -> "Held":
        """The same weights, and the optimizer's state."""
        if request.trajectory != self.trajectory.digest:
            raise MessageError("the server follows another plan than this client")
        with self._lock:
            here = self._round, self._hash, self.chain or request.chain
            if here == (request.round, request.weights_hash, request.chain):
                return self._held
            replays = request.catch_up.kind in ("outcomes", "hashed", "snapshot")
            self.diverged = replays  # until the hashes below prove otherwise
            try:
                self._move(request)
            except OutOfReachError as fault:
                self.diverged, self.out_of_reach = False, str(fault)
                raise
            except MessageError:
                raise
            except BaffleError as fault:
                raise MessageError(f"what the server says does not lead to its weights: {fault}") from None
            self.diverged = False
            if time.monotonic() - self._saved > SAVE_SECONDS:
                self.save()
            return self._held

    @property
    def _held(self) -> "Held":
        return Held(self._weights, self._present.state.optimizer if self._present else ())

    def _move(self, request: RoundRequest) -> None:
        catch_up = request.catch_up
        if catch_up.kind in ("delta", "weights"):
            if self.trajectory.plan.run.downlink == "scalars":
                raise MessageError(f"a catch-up by {catch_up.kind}, but in this run clients apply outcomes themselves")
            weights = self._sent(catch_up)
            if _hash(weights) != request.weights_hash:
                raise _other_weights(request)
            rounds = max(abs(request.round - self._round), 1)
            self._at_most = self._reach.after(self._weights, weights, self._at_most, rounds)
            self._present, self._weights, self._hash = None, weights, request.weights_hash
            self._round = request.round
            return
        present, at_most = self._replayed(catch_up)
        named = request.round, request.chain, request.weights_hash
        if (present.round, present.chain, present.state.weights_hash()) != named:
            raise _other_weights(request)
        self._hold(present, at_most)

    def _replayed(self, catch_up: CatchUp) -> tuple[Present, float]:
        """The present after the outcomes, and how far it is at most from the first weights. The last state is hashed
        here, so the chain is right only if all hashes from the server are. If the server may lie, none of its hashes is
        used: a false one, for a round that no client saw, could lead to a chain that clients sign and no auditor can
        follow."""
        present, at_most = self._present, self._at_most
        if catch_up.kind == "snapshot":
            present, catch_up = self._proved(catch_up), CatchUp("outcomes", catch_up.since, catch_up.items[3:])
            at_most = self._reach.within(present.state.weights)
        if present is None or present.round < catch_up.since:
            raise MessageError(f"rounds from {catch_up.since} on, but this client is at round {self._round}")
        may_lie = self.trajectory.plan.secure.mode == "malicious-server"
        for outcome, digest in catch_up.steps()[present.round - catch_up.since :]:
            before, present = present.state.weights, self._lineage.advance(present, outcome, b"" if may_lie else digest)
            at_most = self._reach.after(before, present.state.weights, at_most)
        return present, at_most

    def _proved(self, catch_up: CatchUp) -> Present:
        """The state with which the present epoch begins. It comes with the hash of the chain before the previous round
        and that round's outcome. Together they must give the hash in the epoch's statement."""
        epoch = self._lineage.epochs[-1] if self._lineage.epochs else None
        if epoch is None or epoch.first != catch_up.since or epoch.before is None or len(catch_up.items) < 3:
            raise MessageError("a state that nothing proves; it is taken only where an epoch begins")
        if not self._snapshots:
            raise MessageError("a state that no certificate vouches for; this client applies outcomes, or waits")
        packed, before, outcome = catch_up.items[:3]
        state = unpack(self.trajectory.rule, packed)
        return self._lineage.linked(Present(epoch.first, state, chain_next(before, outcome, state)))

    def _sent(self, catch_up: CatchUp) -> F32:
        if len(catch_up.items) != 1:
            raise MessageError(f"a catch-up by {catch_up.kind} has one item, got {len(catch_up.items)}")
        numbers = _numbers(catch_up.items[0], self.trajectory.n)
        if catch_up.kind == "weights":
            return numbers.view(np.float32)
        if catch_up.since != self._round:
            raise MessageError(f"a difference from round {catch_up.since}, but this client is at round {self._round}")
        return (self._weights.view(np.uint32) + numbers).view(np.float32)

    def _hold(self, present: Present, at_most: float) -> None:
        self._at_most = at_most
        self._present, self._round, self._weights = present, present.round, present.state.weights
        self._hash = present.state.weights_hash()

    def _continue(self, saved: Saved) -> None:
        """Hold what was saved, if it belongs to this run."""
        if saved.trajectory != self.trajectory.digest:
            raise MessageError("a replica of another plan")
        runs = [epoch.run for epoch in self._lineage.epochs]
        if saved.run not in (runs or [b""]):
            raise MessageError("a replica of another run")
        if saved.weights:
            self._present, self._round = None, saved.round
            self._weights = _numbers(saved.weights, self.trajectory.n).view(np.float32)
            self._hash, self._at_most = _hash(self._weights), saved.at_most
            return
        state = unpack(self.trajectory.rule, saved.state)
        self._hold(self._lineage.linked(Present(saved.round, state, saved.chain), after=saved.run), saved.at_most)


def read_saved(file: Path, trajectory: Trajectory) -> Saved:
    """Read a saved replica. A damaged file is refused: the server can send everything again."""
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
