"""An audit: replay a run from its initial weights, and check every hash, snapshot, statement and file on the way.

An auditor may be handed a forged folder. Nothing in one is imported or called, and no size that it names is believed
before the data of that size has been seen; what is wrong is reported as a `BaffleError`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from baffle.core.chain import Present, chain_start
from baffle.errors import ChainError, JournalError
from baffle.files import read_file
from baffle.journal.evidence import Evidence
from baffle.journal.folder import RunFolder
from baffle.journal.replay import follow, lineage_of
from baffle.journal.store import Journal
from baffle.plan import load
from baffle.trajectory import Trajectory

SUMMARY_BYTES = 1 << 20
"""No summary is longer than this; a real one takes about a kilobyte."""


@dataclass(frozen=True)
class Verified:
    """The result of an audit that found nothing wrong."""

    rounds: int
    skipped: int
    n_weights: int
    weights_sha256: str
    trajectory_digest: str
    chain: str


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
    lineage = lineage_of(journal, plan)
    trajectory = lineage.trajectory
    total = journal.length()
    snapshots = set(journal.snapshot_numbers())
    skipped = 0
    initial = journal.snapshot(trajectory.rule, 0)
    evidence = Evidence(journal, lineage, initial)
    evidence.check(0, chain_start(trajectory.digest, initial))
    present = lineage.beginning(initial)
    for entry in journal.entries():
        after = follow(lineage, present, entry)
        skipped += after.state is present.state
        present = after
        if present.round in snapshots:
            _check_snapshot(journal, trajectory, present)
        evidence.check(present.round, entry.chain)
        progress(present.round, total)
    evidence.require_planned(present.round)
    evidence.require_all_used()
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
