"""The epochs of a run: which roster and which statement count now, and what the next statement says.

Nothing is sent from here. assembly.py forms an epoch with all clients, connected.py lets single clients into it.
"""

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from baffle import statement as statements
from baffle.client.abstaining import Tell
from baffle.client.client import contribution_bytes
from baffle.core.messages import RoundRequest, encode
from baffle.core.state import Present
from baffle.errors import MessageError
from baffle.network.joining import EpochTerms, Introduce, Introduction, NewRoster, Ready
from baffle.network.keys.rosters import Roster
from baffle.network.link.envelope import most_request_bytes
from baffle.network.settling import tiers_for
from baffle.plan import Plan
from baffle.server.run import Running
from baffle.statement import (
    PROTOCOL,
    Certificate,
    Commitment,
    EpochRecord,
    PastEpoch,
    Statement,
    read_statement,
    salt_of,
)


class Epochs:
    """The epochs of a run under a roster, which a later roster may replace."""

    def __init__(self, running: Running, roster: Roster, tell: Tell) -> None:
        trajectory = running.trajectory
        self.running, self.roster, self._tell = running, roster, tell
        self.places = trajectory.plan.federation.clients
        self.most_request_bytes = most_request_bytes(self.places, trajectory.n, contribution_bytes(trajectory))
        self._affords: dict[int, int] = {}
        self._certificate: Certificate | None = None
        self._unopened: dict[int, Commitment] = {}  # of statements for this epoch that came to nothing
        self.epoch = self._newest()  # the present epoch; None before the first, and between two rosters
        if self.epoch:
            self._allow_snapshots(self.epoch)
        self._prepare_next()

    @property
    def plan(self) -> Plan:
        return statements.shared_plan(self.running.trajectory.plan)

    @property
    def have_begun(self) -> bool:
        return bool(self.running.lineage.epochs)

    @property
    def may_lie(self) -> bool:
        """Whether clients protect themselves against a server that lies."""
        return self.plan.secure.mode == "malicious-server"

    def members(self) -> dict[int, bytes]:
        """Client → its identity, for every client that has a place in this run."""
        return {client: key for client, key in self.roster.directory().items() if client < self.places}

    def answered(self, client: int) -> int:
        """One more than the last round that a client contributed to."""
        return self.running.contributed.get(client, -1) + 1

    def statement(self, introductions: Mapping[int, Introduction]) -> Statement:
        """The next epoch's statement, with the clients that have introduced themselves, and with evidence against those
        that have not opened their nonces for an earlier one."""
        self._affords |= {client: one.affords for client, one in introductions.items()}
        epochs, present, roster = self.running.lineage.epochs, self.running.present, self.roster
        plan, tiers = self.plan.to_toml(), tiers_for(self.plan, self._affords)
        said = plan, self.running.initial, roster.number, roster.hash(), tiers, len(epochs)
        previous = epochs[-1].run if epochs else statements.NOTHING
        commitments = tuple(Commitment(client, one.commitment, one.signature) for client, one in introductions.items())
        unopened = tuple(one for client, one in sorted(self._unopened.items()) if client not in introductions)
        return Statement(PROTOCOL, *said, previous, present.round, present.chain, commitments, unopened)

    def note_unopened(self, statement: Statement, clients: Collection[int]) -> None:
        """These clients have not opened the nonces that the statement has commitments to."""
        self._unopened |= {one.client: one for one in statement.commitments if one.client in clients}

    @property
    def accused(self) -> set[int]:
        """The clients against which the run's statements have evidence."""
        records = self.running.journal.statements.epochs()
        return {one.client for record in records for one in read_statement(record.statement).unopened}

    def offered(self, statement: Statement) -> EpochTerms:
        """What clients are told of an epoch whose nonces are not open yet."""
        past = _past_of(self.running.journal.statements.epochs())
        return EpochTerms(EpochRecord(encode(statement), b""), statement, b"", past, self._certificate)

    def begin(self, offered: EpochTerms, opened: Mapping[int, Ready]) -> EpochTerms:
        """Begin an epoch whose nonces are open. The journal holds it before anybody learns of it."""
        statement = offered.statement
        answers = [opened[client] for client in statement.salters]
        nonces = b"".join(answer.nonce for answer in answers)
        signatures = b"".join(answer.signature for answer in answers)
        record = EpochRecord(offered.record.statement, nonces, signatures)
        self.running.begin_epoch(record, self.roster.signed_text())
        self.epoch = replace(offered, record=record, salt=salt_of(record.run, statement, nonces))
        self._allow_snapshots(self.epoch)
        self._prepare_next()
        return self.epoch

    def end(self, states: Mapping[int, bytes]) -> None:
        """The epoch has played its last round, and these clients have signed the state that the next begins with."""
        self._certificate = self.certify(self.running.present, states)

    def take(self, roster: Roster) -> None:
        """A later roster counts from now on, and the epoch under the one before is over."""
        self.roster, self.epoch = roster, None
        self._prepare_next()

    def last_requests(self, clients: list[int]) -> dict[int, RoundRequest]:
        """For each client a request that brings it to the present weights."""
        running = self.running
        present, digest = running.present, running.trajectory.digest
        catch_ups, weights_hash = running.downlink.catch_ups(clients, present), present.state.weights_hash()
        return {
            client: RoundRequest(present.round, digest, present.chain, weights_hash, catch_ups[client])
            for client in clients
        }

    def certify(self, present: Present, states: Mapping[int, bytes]) -> Certificate | None:
        """If the server may lie, keep the clients' signatures under a state. Tells if there are too few."""
        if self.epoch is None or not self.may_lie:
            return None
        signers = tuple(sorted(states))
        signatures = b"".join(states[client] for client in signers)
        certificate = Certificate(self.epoch.run, present.round, present.chain, signers, signatures)
        try:
            statements.require_certified(certificate, self.roster.directory(), statements.least_signers(self.plan))
        except MessageError as fault:
            self._tell(f"the state before round {present.round} has no certificate: {fault}")
            return None
        self.running.journal.statements.add_certificate(certificate)
        return certificate

    def _prepare_next(self) -> None:
        number, self._unopened = len(self.running.lineage.epochs), {}
        # What clients are asked before the next epoch
        self.question = Introduce(self.plan.to_toml(), self.roster.number, self.roster.hash(), number)
        self.new_roster = NewRoster(self.roster.encode())  # the roster, for clients that do not know it yet

    def _newest(self) -> EpochTerms | None:
        """The epoch that the journal ends with, if it is about the plan and the roster as they are now. When the run is
        over, its clients get the last weights under the plan that they know."""
        records = self.running.journal.statements.epochs()
        if not records:
            return None
        *earlier, newest = records
        statement = read_statement(newest.statement)
        if statement.plan != self.plan.to_toml() and not self.running.over:
            return None
        if statement.roster_hash != self.roster.hash():
            return None
        salt = salt_of(newest.run, statement, newest.nonces)
        return EpochTerms(newest, statement, salt, _past_of(earlier), self._certificate_for(statement))

    def _certificate_for(self, statement: Statement) -> Certificate | None:
        """The certificate of the state that an epoch begins with, if it convinces clients under the present roster."""
        about = statement.previous, statement.first, statement.chain
        for certificate in self.running.journal.statements.certificates():
            if (certificate.run, certificate.round, certificate.chain) == about:
                with suppress(MessageError):
                    statements.require_certified(
                        certificate, self.roster.directory(), statements.least_signers(self.plan)
                    )
                    return certificate
        return None

    def _allow_snapshots(self, terms: EpochTerms) -> None:
        """If the server may lie, clients take the state that an epoch begins with only with a certificate."""
        self.running.downlink.snapshots = terms.certificate is not None or not self.may_lie


def _past_of(records: Sequence[EpochRecord]) -> tuple[PastEpoch, ...]:
    past = [(record, read_statement(record.statement)) for record in records]
    return tuple(PastEpoch(said.first, one.run, salt_of(one.run, said, one.nonces)) for one, said in past)
