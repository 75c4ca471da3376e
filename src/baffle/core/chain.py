"""The chain of hashes over a run: each covers the one before it, so the last one stands for everything before.

h_0 covers the trajectory's digest and the initial state; h_t covers h_{t−1}, the outcome's bytes and the state after
it. In a networked run the statement of each epoch is a link as well, before the epoch's first round.
"""

from dataclasses import dataclass
from hashlib import sha256

from baffle.core.state import ServerState

TAG = b"baffle/chain/1"
EPOCH_TAG = b"baffle/epoch/2"


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
