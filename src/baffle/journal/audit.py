"""An audit: replay a run from its initial weights, and check every hash, snapshot, statement and file on the way.

An auditor may be handed a forged folder. Nothing that one names is imported or called without `--own-code`, and no size
that it names is believed before the data of that size has been seen; what is wrong is reported as a `BaffleError`.

The journal of a networked run also holds the clients' signatures. They prove that the run is the one of its statements
and that its states are those of its journal, against a server that shows different clients different histories.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from baffle.core.state import Present, ServerState, chain_start
from baffle.errors import BaffleError, ChainError, JournalError
from baffle.files import read_file
from baffle.journal.folder import SUMMARY_BYTES, RunFolder
from baffle.journal.replay import follow, lineage_of
from baffle.journal.store import Journal
from baffle.lineage import Lineage
from baffle.plan import load, parse
from baffle.plan.arithmetic import require_vouched, vouch_for
from baffle.statement import (
    least_signers,
    read_roster_text,
    read_statement,
    require_certified,
    require_enough_salt,
    require_evidence,
    require_signed_by_all,
    require_signed_commitments,
)
from baffle.trajectory import Trajectory


@dataclass(frozen=True)
class Verified:
    """The result of an audit that found nothing wrong."""

    rounds: int
    skipped: int
    n_weights: int
    weights_sha256: str
    trajectory_digest: str
    chain: str


def verify(
    path: str | Path,
    progress: Callable[[int, int], None] = lambda _done, _of: None,
    *,
    own_code: bool = False,
) -> Verified:
    """Replay a run from its initial weights and check every hash, snapshot and file on the way. Functions that the
    run's weights follow from are called only with `own_code`, since the folder may be untrusted."""
    folder = RunFolder.existing(Path(path))
    # The summary is read before the journal. A run may end between the two, and it writes its journal first.
    claim = _claim(folder)
    try:
        with Journal.open(folder.journal) as journal, journal.one_view():
            journal.require_sound()
            if own_code:
                vouch_for(journal.plan())
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
    require_vouched(plan)
    lineage = lineage_of(journal, plan)
    trajectory = lineage.trajectory
    total, skipped, snapshots = journal.length(), 0, set(journal.snapshot_numbers())
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
    evidence.end(present.round)
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


class Evidence:
    """The statements of a journal, checked at once, and its certificates, checked as the rounds are replayed."""

    def __init__(self, journal: Journal, lineage: Lineage, initial: ServerState) -> None:
        self._lineage = lineage
        self._clients: dict[bytes, tuple[dict[int, bytes], int]] = {}  # run → identities, how many sign for a state
        self._planned: list[tuple[int, int]] = []  # the first round of each epoch, and where its plan ends
        self._certificates = journal.statements.certificates()
        for number, (record, roster) in enumerate(journal.statements.epochs_with_rosters()):
            try:
                statement = read_statement(record.statement)
                plan = parse(statement.plan)
                server, directory = read_roster_text(roster, statement.roster_hash)
                require_signed_commitments(statement, server, directory)
                require_evidence(statement, server, directory)
                require_enough_salt(statement, plan)
                require_signed_by_all(record, statement, directory)
            except BaffleError as fault:
                raise JournalError(f"the statement of epoch {number} does not hold: {fault}") from None
            if statement.initial != initial.digest():
                raise ChainError(f"the statement of epoch {number} begins with other weights than the journal", 0)
            self._clients[record.run] = directory, least_signers(plan)
            self._planned.append((statement.first, plan.rounds))

    def check(self, number: int, chain: bytes) -> None:
        """Check the certificates about the state before a round, if there are any. `chain` is the hash of the chain
        there, without the links of epochs that begin with the round."""
        while self._certificates and self._certificates[0].round == number:
            certificate = self._certificates.pop(0)
            if certificate.run not in self._clients:
                raise JournalError(f"the certificate before round {number} belongs to another run")
            if certificate.chain not in self._lineage.chains(number, chain):
                raise ChainError(f"clients have signed another state before round {number}", number)
            try:
                require_certified(certificate, *self._clients[certificate.run])
            except BaffleError as fault:
                raise ChainError(f"the certificate before round {number} does not hold: {fault}", number) from None

    def end(self, total: int) -> None:
        """Refuse rounds that no epoch's clients have agreed to, and certificates about rounds that are missing."""
        ends = [*(first for first, _ in self._planned[1:]), total]
        for number, ((_, rounds), end) in enumerate(zip(self._planned, ends, strict=False)):
            if end > rounds:
                raise ChainError(f"the journal holds {end} rounds, but epoch {number} was to end with {rounds}", rounds)
        if self._certificates:
            number = self._certificates[0].round
            raise JournalError(f"a certificate is about the state before round {number}; the journal has no such state")
