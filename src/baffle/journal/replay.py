"""Replay: from a journal back to the weights, to resume a run or to audit it. It needs no deep-learning framework.

An auditor may be handed a forged folder. Nothing in one is imported or called, and no size that it names is believed
before the data of that size has been seen; what is wrong is reported as a `BaffleError`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from baffle.core.messages import Outcome
from baffle.core.state import ServerState, apply
from baffle.errors import BaffleError, ChainError, JournalError
from baffle.files import read_file
from baffle.journal.folder import SUMMARY_BYTES, RunFolder
from baffle.journal.store import Entry, Journal, chain_next, chain_start
from baffle.plan import load
from baffle.trajectory import Trajectory, trajectory_of


@dataclass(frozen=True)
class Present:
    """Where a run stands: its state after `round` rounds, and the hash of the chain up to there. `skipped` lists the
    rounds that were skipped since the state last changed."""

    round: int
    state: ServerState
    chain: bytes
    skipped: tuple[int, ...] = ()

    def after(self, outcome: Outcome, state: ServerState, chain: bytes) -> "Present":
        """Where the run stands one round later."""
        skipped = (*self.skipped, self.round) if outcome.kind == "skipped" else ()
        return Present(self.round + 1, state, chain, skipped)


@dataclass(frozen=True)
class Verified:
    """The result of an audit that found nothing wrong."""

    rounds: int
    skipped: int
    n_weights: int
    weights_sha256: str
    trajectory_digest: str
    chain: str


def beginning(trajectory: Trajectory, state: ServerState) -> Present:
    return Present(0, state, chain_start(trajectory.digest, state))


def follow(trajectory: Trajectory, present: Present, entry: Entry) -> Present:
    """Replay one round. The error for a round that does not follow from the one before names it."""
    number = present.round
    if entry.round != number:
        raise ChainError(f"round {number} is missing from the journal; the next one is {entry.round}", number)
    try:
        outcome = entry.outcome()
        if outcome.round != number:
            raise ChainError(f"round {number} holds the outcome of round {outcome.round}", number)
        state = apply(trajectory.rule, present.state, outcome)
    except ChainError:
        raise
    except BaffleError as fault:
        raise ChainError(f"round {number} cannot be replayed: {fault}", number) from None
    chain = chain_next(present.chain, entry.outcome_bytes, state)
    if chain != entry.chain:
        raise ChainError(
            f"round {number} does not follow: its totals, key or hash were changed, or a state before it", number
        )
    return present.after(outcome, state, chain)


def catch_up(journal: Journal, trajectory: Trajectory) -> Present:
    """Where a run stands: replayed from its newest sound snapshot."""
    for number in reversed(journal.snapshot_numbers()):
        try:
            present = _at_snapshot(journal, trajectory, number)
        except JournalError:
            if number == 0:
                raise
            continue
        for entry in journal.entries(number):
            present = follow(trajectory, present, entry)
        return present
    raise JournalError("the journal has no snapshot, not even of the initial weights; it is damaged")


def _at_snapshot(journal: Journal, trajectory: Trajectory, number: int) -> Present:
    state = journal.snapshot(trajectory.rule, number)
    if number == 0:
        return beginning(trajectory, state)
    entry = journal.entry(number - 1)
    if number > 1:
        before = journal.entry(number - 2).chain
    else:
        before = beginning(trajectory, journal.snapshot(trajectory.rule, 0)).chain
    if chain_next(before, entry.outcome_bytes, state) != entry.chain:
        raise ChainError(f"snapshot {number} does not fit round {number - 1}", number - 1)
    first_skipped = number
    while first_skipped and journal.entry(first_skipped - 1).outcome().kind == "skipped":
        first_skipped -= 1
    return Present(number, state, entry.chain, tuple(range(first_skipped, number)))


def verify(path: str | Path, progress: Callable[[int, int], None] = lambda _done, _of: None) -> Verified:
    """Replay a run from its initial weights and check every hash, snapshot and file on the way."""
    folder = RunFolder.existing(Path(path))
    # The summary is read before the journal. A run may end between the two, and it writes its journal first.
    claim = _claim(folder)
    try:
        with Journal.open(folder.journal) as journal, journal.one_view():
            journal.require_sound()
            verified = _replay_all(folder, journal, progress)
    except MemoryError:
        raise JournalError(f"{folder.journal} needs more memory to replay than this machine has") from None
    if claim:
        _check_claim(folder, claim, verified)
    return verified


def _replay_all(folder: RunFolder, journal: Journal, progress: Callable[[int, int], None]) -> Verified:
    plan = journal.plan()
    if load(str(folder.plan)).trajectory_digest() != plan.trajectory_digest():
        raise JournalError(f"{folder.plan} describes another run than the journal beside it")
    trajectory = trajectory_of(plan, journal.n_weights())
    total = journal.length()
    snapshots = set(journal.snapshot_numbers())
    skipped = 0
    present = beginning(trajectory, journal.snapshot(trajectory.rule, 0))
    for entry in journal.entries():
        after = follow(trajectory, present, entry)
        skipped += after.state is present.state
        present = after
        if present.round in snapshots:
            _check_snapshot(journal, trajectory, present)
        progress(present.round, total)
    if total != present.round:
        raise ChainError(f"the journal holds {total - present.round} rounds before round 0", 0)
    if max(snapshots) > total:
        raise ChainError(f"the journal ends before its snapshot {max(snapshots)}", total)
    return Verified(
        rounds=total,
        skipped=skipped,
        n_weights=trajectory.n,
        weights_sha256=present.state.weights_hash().hex(),
        trajectory_digest=trajectory.digest.hex(),
        chain=present.chain.hex(),
    )


def _check_snapshot(journal: Journal, trajectory: Trajectory, present: Present) -> None:
    last = present.round - 1
    try:
        stored = journal.snapshot(trajectory.rule, present.round)
    except JournalError as fault:
        raise ChainError(f"snapshot {present.round}, after round {last}: {fault}", last) from None
    if stored.digest() != present.state.digest():
        raise ChainError(f"snapshot {present.round} is not the state after round {last}", last)


class Claim(msgspec.Struct):
    """The part of a summary that a journal can prove."""

    rounds: Annotated[int, msgspec.Meta(ge=0)]
    weights_sha256: Annotated[str, msgspec.Meta(max_length=64)]


def _claim(folder: RunFolder) -> Claim | None:
    """What the summary of a finished run claims; a run that has not ended has none."""
    try:
        if not folder.summary.exists():
            return None
        return msgspec.json.decode(read_file(folder.summary, SUMMARY_BYTES), type=Claim)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as fault:
        raise JournalError(f"{folder.summary} cannot be read: {fault}") from None


def _check_claim(folder: RunFolder, claim: Claim, verified: Verified) -> None:
    if claim.rounds != verified.rounds:
        raise ChainError(
            f"{folder.summary} claims {claim.rounds} rounds, the journal holds {verified.rounds}",
            min(claim.rounds, verified.rounds),
        )
    if claim.weights_sha256 != verified.weights_sha256:
        raise JournalError(f"{folder.summary} claims other weights ({claim.weights_sha256}) than the journal leads to")
