"""The weights are a fold over the journal: `apply` is the only code that changes them.

A live server, a client that catches up, a recovery after a crash and an audit all call it and get the same bits.

Over a run goes a chain of hashes: each covers the one before it, so the last one stands for everything before. h_0
covers the trajectory's digest and the initial state; h_t covers h_{t−1}, the outcome's bytes and the state after it. In
a networked run the statement of each epoch is a link as well, before the epoch's first round.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from typing import Protocol

import msgspec
import numpy as np

from baffle.core.arrays import F32
from baffle.core.local_steps import Walk
from baffle.core.messages import Outcome
from baffle.core.update import WEIGHTS_AT_ONCE, State, Transform
from baffle.errors import BaffleError, JournalError

FLOAT = np.dtype("<f4")  # a weight as bytes
TAG = b"baffle/chain/1"
EPOCH_TAG = b"baffle/epoch/2"


@dataclass(frozen=True)
class ServerState:
    """Everything that one round passes on to the next."""

    weights: F32
    optimizer: State
    average: State

    def vectors(self) -> tuple[F32, ...]:
        return (self.weights, *self.optimizer, *self.average)

    def digest(self) -> bytes:
        """SHA-256 of weights, optimizer state and average as little-endian float32."""
        return _hash(*self.vectors())

    def weights_hash(self) -> bytes:
        return _hash(self.weights)


class Gradient(Protocol):
    """The gradient of one step of a round."""

    def __call__(self, outcome: Outcome, step: int = 0, /) -> F32: ...


@dataclass(frozen=True)
class Rule:
    """How an outcome changes a state. `steps` tells how many steps a round has, `share` by what they are multiplied."""

    gradient: Gradient
    optimizer: Transform
    average: Transform
    steps: Callable[[int], int] = lambda _round: 1
    share: Callable[[int], np.float32] = lambda _round: np.float32(1)

    def start(self, weights: F32) -> ServerState:
        return ServerState(weights, self.optimizer.init(weights), self.average.init(weights))

    def smooth_weights(self, state: ServerState) -> F32:
        """The averaged weights; without an average, the weights themselves."""
        return state.average[0] if state.average else state.weights


def apply(rule: Rule, state: ServerState, outcome: Outcome) -> ServerState:
    """The state after a round. A skipped round changes nothing, not even a step count."""
    if outcome.kind == "skipped":
        return state
    require_denormals()
    steps, average = rule.steps(outcome.round), state.average
    with np.errstate(over="ignore", invalid="ignore"):  # weights beyond float32 show as a loss that is not finite
        walk = Walk(rule.optimizer, state.optimizer, state.weights, steps, rule.share(outcome.round))
        for step in range(steps):
            gradient = rule.gradient(outcome, step)
            walk.step(gradient)
            average, _ = rule.average.update(average, gradient, walk.weights)
    return ServerState(walk.weights, walk.state, average)


def within(cap: float, before: F32, after: F32) -> bool:
    """Whether an update is no longer than `cap`, the plan's `update.norm_max` (0: no limit)."""
    return not cap or float(np.linalg.norm(after.astype(np.float64) - before)) <= cap


def distance(a: F32, b: F32) -> float:
    """The root mean square of the difference of two weight vectors, measured a piece at a time to save memory."""
    total = 0.0
    with np.errstate(over="ignore", invalid="ignore"):  # weights that are not finite have no distance
        for first in range(0, len(a), WEIGHTS_AT_ONCE):
            part = a[first : first + WEIGHTS_AT_ONCE].astype(np.float64)
            part -= b[first : first + WEIGHTS_AT_ONCE]
            part *= part
            total += float(part.sum())  # a dot product would start threads
    return math.sqrt(total / max(len(a), 1))


def require_denormals() -> None:
    """Refuse a thread whose floating-point unit rounds tiny numbers to zero: it would compute other bits."""
    tiny = np.full(1, 2.0**-140, dtype=np.float32)
    if (tiny * np.float32(0.5))[0] == 0:
        raise BaffleError(
            "this thread flushes denormal numbers to zero, so its weights would differ from everyone else's; "
            "call torch.set_flush_denormal(False) in it"
        )


def pack(state: ServerState) -> bytes:
    return msgspec.msgpack.encode([v.astype(FLOAT, copy=False).tobytes() for v in state.vectors()])


def unpack(rule: Rule, data: bytes) -> ServerState:
    """Read a packed state; its form follows from the rule."""
    try:
        parts = msgspec.msgpack.decode(data, type=list[bytes])
        vectors = [np.frombuffer(part, dtype=FLOAT).astype(np.float32) for part in parts]
        weights, *rest = vectors
        shape = rule.start(weights)
        if [len(v) for v in vectors] != [len(v) for v in shape.vectors()]:
            raise ValueError("vectors of other lengths")
    except (msgspec.MsgspecError, ValueError, RecursionError) as fault:
        raise JournalError(f"a snapshot cannot be read ({fault}); it is damaged or belongs to another plan") from None
    split = len(shape.optimizer)
    return ServerState(weights, tuple(rest[:split]), tuple(rest[split:]))


def _hash(*vectors: F32) -> bytes:
    digest = sha256()
    for vector in vectors:
        digest.update(np.ascontiguousarray(vector, dtype=FLOAT).data)
    return digest.digest()


@dataclass(frozen=True)
class Present:
    """Where a run stands: its state after `round` rounds, and the hash of the chain up to there."""

    round: int
    state: ServerState
    chain: bytes


def chain_start(trajectory_digest: bytes, state: ServerState) -> bytes:
    return sha256(TAG + trajectory_digest + state.digest()).digest()


def chain_next(previous: bytes, outcome_bytes: bytes, state: ServerState) -> bytes:
    return chain_over(previous, outcome_bytes, state.digest())


def chain_over(previous: bytes, outcome_bytes: bytes, state_digest: bytes) -> bytes:
    """The next hash, from the digest of a state."""
    return sha256(TAG + previous + outcome_bytes + state_digest).digest()


def chain_epoch(previous: bytes, run: bytes) -> bytes:
    """Link the statement of an epoch, by its hash."""
    return sha256(EPOCH_TAG + previous + run).digest()
