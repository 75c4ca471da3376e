"""Replay: from a journal back to the weights, for going on with a run and for auditing it. Needs NumPy alone."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from baffle.core.messages import Outcome
from baffle.core.state import ServerState, apply
from baffle.errors import BaffleError, ChainError, JournalError
from baffle.journal.folder import RunFolder
from baffle.journal.store import Entry, Journal, chain_next, chain_start
from baffle.plan import load
from baffle.trajectory import Trajectory, trajectory_of


@dataclass(frozen=True)
class Present:
    """Where a run stands: its state after `round` rounds and the hash that leads there. `skipped`: the rounds that led
    nowhere since the state last changed."""

    round: int
    state: ServerState
    chain: bytes
    skipped: tuple[int, ...] = ()

    def after(self, outcome: Outcome, state: ServerState, chain: bytes) -> "Present":
        """One round further."""
        skipped = (*self.skipped, self.round) if outcome.kind == "skipped" else ()
        return Present(self.round + 1, state, chain, skipped)


@dataclass(frozen=True)
class Verified:
    """What an audit found in order."""

    rounds: int
    skipped: int
    n_weights: int
    weights_sha256: str
    trajectory_digest: str
    chain: str


def beginning(trajectory: Trajectory, state: ServerState) -> Present:
    return Present(0, state, chain_start(trajectory.digest, state))


def follow(trajectory: Trajectory, present: Present, entry: Entry) -> Present:
    """One round further, or an error that names the round that does not follow."""
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
    """The present of a run: its newest sound snapshot, and replay from there."""
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
    before = (
        journal.entry(number - 2).chain
        if number > 1
        else beginning(trajectory, journal.snapshot(trajectory.rule, 0)).chain
    )
    if chain_next(before, entry.outcome_bytes, state) != entry.chain:
        raise ChainError(f"snapshot {number} does not fit round {number - 1}", number - 1)
    first = number
    while first and journal.entry(first - 1).outcome().kind == "skipped":
        first -= 1
    return Present(number, state, entry.chain, tuple(range(first, number)))


def verify(path: Path, progress: Callable[[int, int], None] = lambda _done, _of: None) -> Verified:
    """Replay a run from its initial weights and check every hash, snapshot and file on the way."""
    folder = RunFolder.existing(path)
    claim = _claim(folder)  # before the journal: a run may end meanwhile, and its summary follows its journal
    with Journal.open(folder.journal) as journal, journal.one_view():
        plan = journal.plan()
        if load(str(folder.plan)).trajectory_digest() != plan.trajectory_digest():
            raise JournalError(f"{folder.plan} describes another run than the journal beside it")
        trajectory = trajectory_of(plan, journal.n_weights())
        total, snapshots, skipped = journal.length(), journal.snapshot_numbers(), 0
        present = beginning(trajectory, journal.snapshot(trajectory.rule, 0))
        for entry in journal.entries():
            after = follow(trajectory, present, entry)
            skipped += after.state is present.state
            present = after
            if present.round in snapshots:
                _check_snapshot(journal, trajectory, present)
            progress(present.round, total)
        if max(snapshots) > present.round:
            raise ChainError(f"the journal ends before its snapshot {max(snapshots)}", total)
    verified = Verified(
        rounds=present.round,
        skipped=skipped,
        n_weights=trajectory.n,
        weights_sha256=present.state.weights_hash().hex(),
        trajectory_digest=trajectory.digest.hex(),
        chain=present.chain.hex(),
    )
    if claim:
        _check_claim(folder, claim, verified)
    return verified


def _check_snapshot(journal: Journal, trajectory: Trajectory, present: Present) -> None:
    last = present.round - 1
    try:
        stored = journal.snapshot(trajectory.rule, present.round)
    except JournalError as fault:
        raise ChainError(f"snapshot {present.round}, after round {last}: {fault}", last) from None
    if stored.digest() != present.state.digest():
        raise ChainError(f"snapshot {present.round} is not the state after round {last}", last)


class Claim(msgspec.Struct):
    """What a summary says that a journal can prove."""

    rounds: int
    weights_sha256: str


def _claim(folder: RunFolder) -> Claim | None:
    """A finished run's summary must tell of the rounds in the journal and name the weights that they lead to."""
    if not folder.summary.exists():
        return None
    try:
        return msgspec.json.decode(folder.summary.read_bytes(), type=Claim)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as fault:
        raise JournalError(f"{folder.summary} cannot be read: {fault}") from None


def _check_claim(folder: RunFolder, claim: Claim, verified: Verified) -> None:
    if claim.rounds != verified.rounds:
        raise ChainError(
            f"{folder.summary} tells of {claim.rounds} rounds, the journal holds {verified.rounds}",
            min(claim.rounds, verified.rounds),
        )
    if claim.weights_sha256 != verified.weights_sha256:
        raise JournalError(f"{folder.summary} claims other weights ({claim.weights_sha256}) than the journal leads to")
