"""What the clients of a networked run have signed: that the run is the one of its statements, and that its states are
those of its journal. It is evidence against a server that told two stories."""

from baffle.core.state import ServerState
from baffle.errors import BaffleError, ChainError, JournalError
from baffle.journal.store import Journal
from baffle.lineage import Lineage
from baffle.plan import parse
from baffle.statement import (
    read_roster_text,
    read_statement,
    require_certified,
    require_enough_salt,
    require_signed_by_all,
    require_signed_commitments,
)


class Evidence:
    """The statements of a journal, which are checked at once, and its certificates, which are checked as the rounds are
    replayed."""

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
                require_enough_salt(statement, plan)
                require_signed_by_all(record, statement, directory)
            except BaffleError as fault:
                raise JournalError(f"the statement of epoch {number} does not hold: {fault}") from None
            if statement.initial != initial.digest():
                raise ChainError(f"the statement of epoch {number} begins with other weights than the journal", 0)
            self._clients[record.run] = directory, plan.per_round
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

    def require_planned(self, total: int) -> None:
        """Refuse rounds beyond those that the clients of an epoch have agreed to."""
        ends = [*(first for first, _ in self._planned[1:]), total]
        for number, ((_, rounds), end) in enumerate(zip(self._planned, ends, strict=False)):
            if end > rounds:
                raise ChainError(f"the journal holds {end} rounds, but epoch {number} was to end with {rounds}", rounds)

    def require_all_used(self) -> None:
        """Refuse certificates about rounds that the journal does not have."""
        if self._certificates:
            number = self._certificates[0].round
            raise JournalError(f"a certificate about the state before round {number}, which the journal has not got")
