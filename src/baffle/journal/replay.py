"""Replay: from a journal back to the weights, to resume a run or to audit it. It needs no deep-learning framework."""

from pathlib import Path

from baffle.core.arrays import F32
from baffle.core.state import Present, chain_next
from baffle.errors import BaffleError, ChainError, JournalError, MessageError
from baffle.journal.store import Entry, Journal
from baffle.lineage import Lineage
from baffle.plan import Plan, parse
from baffle.plan.arithmetic import require_vouched
from baffle.statement import NOTHING, epoch_of, read_statement
from baffle.trajectory import Epoch, trajectory_of


def lineage_of(journal: Journal, plan: Plan) -> Lineage:
    """The lineage of the run in a journal. The statements of its epochs must follow from each other."""
    epochs: list[Epoch] = []
    for number, record in enumerate(journal.statements.epochs()):
        try:
            statement = read_statement(record.statement)
            its_plan = parse(statement.plan)
        except BaffleError as fault:
            raise JournalError(f"the statement of epoch {number} cannot be read: {fault}") from None
        first, previous = (epochs[-1].first, epochs[-1].run) if epochs else (0, NOTHING)
        if (statement.epoch, statement.previous) != (number, previous) or statement.first < first:
            raise JournalError(f"the statement of epoch {number} does not follow from the one before")
        if its_plan.trajectory_digest() != plan.trajectory_digest():
            raise JournalError(f"the statement of epoch {number} is about another plan than the journal")
        try:
            epochs.append(epoch_of(record))
        except MessageError as fault:
            raise JournalError(f"the salt of an epoch does not follow from its statement: {fault}") from None
    if epochs and epochs[0].first:
        raise JournalError(f"the first epoch begins with round {epochs[0].first}, expected 0")
    return Lineage(trajectory_of(plan, journal.n_weights(), epochs=tuple(epochs)))


def initial_weights(path: Path, plan: Plan) -> F32:
    """The weights that the run in a journal began with."""
    with Journal.open(path) as journal:
        return journal.snapshot(lineage_of(journal, plan).trajectory.rule, 0).weights


def follow(lineage: Lineage, present: Present, entry: Entry) -> Present:
    """Replay one round of a journal. The error for a round that does not follow from the one before names it."""
    number = present.round
    if entry.round != number:
        raise ChainError(f"round {number} is missing from the journal; the next one is {entry.round}", number)
    after = lineage.step(present, entry.outcome_bytes)
    if after.chain != entry.chain:
        raise ChainError(
            f"round {number} does not follow: its totals, key or hash were changed, or a state before it", number
        )
    return lineage.linked(after)


def catch_up(journal: Journal, lineage: Lineage) -> Present:
    """Where a run stands: replayed from its newest sound snapshot."""
    require_vouched(lineage.trajectory.plan)
    for number in reversed(journal.snapshot_numbers()):
        try:
            present = at_snapshot(journal, lineage, number)
        except JournalError:
            if number == 0:
                raise
            continue
        for entry in journal.entries(number):
            present = follow(lineage, present, entry)
        return present
    raise JournalError("the journal has no snapshot, not even of the initial weights; it is damaged")


def at_snapshot(journal: Journal, lineage: Lineage, number: int) -> Present:
    """Where the run stood when a snapshot was taken."""
    state = journal.snapshot(lineage.trajectory.rule, number)
    if number == 0:
        return lineage.beginning(state)
    entry = journal.entry(number - 1)
    if chain_next(chain_before(journal, lineage, number - 1), entry.outcome_bytes, state) != entry.chain:
        raise ChainError(f"snapshot {number} does not fit round {number - 1}", number - 1)
    return lineage.linked(Present(number, state, entry.chain))


def chain_before(journal: Journal, lineage: Lineage, number: int) -> bytes:
    """The hash of the chain before a round, with the links of the epochs that begin with it."""
    if number == 0:
        return lineage.beginning(journal.snapshot(lineage.trajectory.rule, 0)).chain
    return lineage.chains(number, journal.entry(number - 1).chain)[-1]
