"""How an epoch comes about: those who are here commit to nonces, are told the statement, and open them.

A client that committed and does not open cannot be left out afterwards: the statement names its commitment. So the
statement is dropped, and another one is made without that client.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace

from baffle.aggregation.context import signed
from baffle.core.chain import Present
from baffle.core.messages import RoundRequest, encode
from baffle.errors import MessageError
from baffle.network.connected import ConnectedClients
from baffle.network.joining import Done, EpochTerms, Halt, Introduce, Introduction, NewRoster, Ready, Salted
from baffle.network.rosters import Roster
from baffle.network.settling import tiers_for
from baffle.plan import Plan
from baffle.server.run import Running
from baffle.statement import (
    NOTHING,
    Certificate,
    Commitment,
    EpochRecord,
    PastEpoch,
    Statement,
    commitment_text,
    commitment_to,
    read_statement,
    ready_text,
    require_certified,
    salt_of,
    shared_plan,
)

TRIES = 3
"""How many statements are tried in a row before the server looks again who is here."""


class Assembly:
    """Makes the epochs of a run, each with at least so many clients."""

    def __init__(self, running: Running, clients: ConnectedClients, roster: Roster, least: int) -> None:
        self.running, self.clients, self.roster, self.least = running, clients, roster, least
        clients.roster, clients.places = NewRoster(roster.encode()), self.plan.federation.clients
        self._affords: dict[int, int] = {}
        self._certificate: Certificate | None = None
        clients.epoch = self._newest()
        if clients.epoch:
            self._allow_snapshots(clients.epoch)
        clients.introduce = self.question()

    def take(self, roster: Roster, gone: Collection[int]) -> None:
        """Go on under a later roster, without those that are gone. The epoch is over, and the next one begins when
        enough clients have taken the roster. Those that stay sign the last state: whoever comes knows the later roster
        alone, and their keys are in both."""
        self.clients.lose(gone)
        self._certify_end()
        self.roster = roster
        self.clients.hand_over(NewRoster(roster.encode()))
        self.clients.introduce = self.question()

    def members(self) -> dict[int, bytes]:
        """The clients that have a place in this run, by their numbers, and their identities."""
        places = self.plan.federation.clients
        return {client: key for client, key in self.roster.directory().items() if client < places}

    @property
    def plan(self) -> Plan:
        """The plan as the statement holds it."""
        return shared_plan(self.running.trajectory.plan)

    def _newest(self) -> EpochTerms | None:
        """The epoch that the journal ends with, if it is about the plan and the roster as they are now. When the run is
        over, its clients get the last weights under the plan that they know."""
        records = self.running.journal.statements.epochs()
        terms = terms_of(records, self.running.journal.statements.certificates()) if records else None
        if terms is None or (terms.statement.plan != self.plan.to_toml() and not self.running.over):
            return None
        if terms.statement.roster_hash != self.roster.hash():
            return None
        return terms if self._holds(terms.certificate) else replace(terms, certificate=None)

    def _holds(self, certificate: Certificate | None) -> bool:
        """Whether a certificate convinces clients that know the present roster alone."""
        try:
            if certificate:
                require_certified(certificate, self.roster.directory(), self.plan.per_round)
        except MessageError:
            return False
        return True

    def _allow_snapshots(self, terms: EpochTerms) -> None:
        """If the server may lie, clients take the state that an epoch begins with only with a certificate."""
        certified = terms.certificate is not None
        self.running.downlink.snapshots = certified or self.plan.secure.mode != "malicious-server"

    def question(self) -> Introduce:
        """What clients are asked before the next epoch."""
        epoch = len(self.running.lineage.links)
        return Introduce(self.plan.to_toml(), self.roster.number, self.roster.hash(), epoch)

    def form(self) -> dict[int, Ready]:
        """Begin an epoch with everybody who is here, and return its clients. Returns nobody if too few are left."""
        self._certify_end()
        for _ in range(TRIES):
            commitments = self._commitments()
            tiers = tiers_for(self.plan, self._affords)
            if len(commitments) < self.least:
                return {}
            statement = self._statement(commitments, tiers)
            data = encode(statement)
            opened = self._opened(EpochRecord(data, b""), statement)
            if len(opened) == len(commitments):
                return self._enter(data, statement, opened)
            self._commit_again(opened)
        return {}

    def _commit_again(self, opened: Mapping[int, Ready]) -> None:
        """Newcomers whose nonces are spent, because somebody else did not open, still wait for the next epoch."""
        clients = self.clients
        clients.introduced = clients.collect(
            Introduction, dict.fromkeys(sorted(opened.keys() - clients.ready), self.question())
        )

    def _certify_end(self) -> None:
        """If the server may lie, let the clients of the epoch that ends sign its last state. Others take that state
        only with a certificate."""
        epoch, present, trajectory = self.clients.epoch, self.running.present, self.running.trajectory
        if epoch is None:
            return  # nothing was played since the last epoch ended
        self._certificate = None
        if self.plan.secure.mode != "malicious-server":
            return
        ready = sorted(self.clients.reachable())
        catch_ups = self.running.downlink.catch_ups(ready, present)
        weights_hash = present.state.weights_hash()
        requests = {
            client: Halt(RoundRequest(present.round, trajectory.digest, present.chain, weights_hash, catch_ups[client]))
            for client in ready
        }
        done = self.clients.collect(Done, requests)
        self.running.downlink.delivered(list(done), present)
        states = {client: answer.signature for client, answer in done.items()}
        certificate = certificate_of(epoch.run, present, states)
        try:
            require_certified(certificate, self.roster.directory(), self.plan.per_round)
        except MessageError as fault:
            self.clients.tell(f"the state before round {present.round} has no certificate: {fault}")
            return
        self.running.journal.statements.add_certificate(certificate)
        self._certificate = certificate

    def _commitments(self) -> dict[int, Introduction]:
        """The signed commitments of everybody who is here. Those that take part already are asked for new ones."""
        clients = self.clients
        here = clients.here()
        waiting = {client: known for client, known in clients.introduced.items() if client in here}
        question = self.question()
        again = clients.collect(Introduction, dict.fromkeys(sorted(here - waiting.keys()), question))
        introductions = dict(sorted((waiting | again).items()))
        directory, server = self.roster.directory(), self.roster.server_key
        for client, known in list(introductions.items()):
            text = commitment_text(server, question.plan, question.roster_hash, question.epoch, known.commitment)
            if not signed(directory[client], known.signature, text):
                del introductions[client]
                clients.drop(client, "its commitment is not signed")
        self._affords |= {client: known.affords for client, known in introductions.items()}
        return introductions

    def _statement(self, introductions: Mapping[int, Introduction], tiers: tuple[int, ...]) -> Statement:
        links, present = self.running.lineage.links, self.running.present
        return Statement(
            2,
            self.plan.to_toml(),
            self.running.initial,
            self.roster.number,
            self.roster.hash(),
            tiers,
            len(links),
            links[-1].run if links else NOTHING,
            present.round,
            present.chain,
            tuple(Commitment(client, one.commitment, one.signature) for client, one in introductions.items()),
        )

    def _opened(self, record: EpochRecord, statement: Statement) -> dict[int, Ready]:
        """The clients that open the nonces that the statement has commitments to."""
        terms = self._terms(record, statement)
        begins = {client: terms.begin(self.clients.answered(client)) for client in statement.salters}
        answers = self.clients.collect(Ready, begins)
        directory = self.roster.directory()
        for one in statement.commitments:
            ready = answers.get(one.client)
            if ready is None:
                continue
            if commitment_to(ready.nonce) != one.commitment or not signed(
                directory[one.client], ready.signature, ready_text(record.run)
            ):
                del answers[one.client]
                self.clients.drop(one.client, "it has opened another nonce, or signed another statement")
        for client in set(statement.salters) - answers.keys():
            self.clients.leave_out(client)
        self.clients.introduced = {}  # a nonce serves one statement
        return answers

    def _enter(self, data: bytes, statement: Statement, opened: Mapping[int, Ready]) -> dict[int, Ready]:
        answers = [opened[client] for client in statement.salters]
        nonces, signatures = (
            b"".join(parts) for parts in zip(*((one.nonce, one.signature) for one in answers), strict=True)
        )
        record = EpochRecord(data, nonces, signatures)
        self.running.begin_epoch(record, self.roster.signed_text())
        terms = self._terms(record, statement)
        processes = self.clients.processes(opened)
        self._allow_snapshots(terms)
        self.clients.enter(terms, processes)
        self.clients.introduce = self.question()
        salted = self.clients.collect(Salted, dict.fromkeys(processes, terms.openings()))
        for client, answer in salted.items():
            if answer.salt != terms.salt:
                self.clients.drop(client, "it follows another salt")
        return {client: opened[client] for client in salted if client in self.clients.ready}

    def _terms(self, record: EpochRecord, statement: Statement) -> EpochTerms:
        salt = salt_of(record.run, statement, record.nonces) if record.nonces else b""
        earlier = self.running.journal.statements.epochs()
        past = past_of([known for known in earlier if known != record])
        return EpochTerms(record, statement, salt, past, self._certificate)


def terms_of(records: list[EpochRecord], certificates: list[Certificate]) -> EpochTerms:
    """What the clients of the newest of these epochs are told."""
    *earlier, newest = records
    statement = read_statement(newest.statement)
    about = statement.previous, statement.first, statement.chain
    fitting = (one for one in certificates if (one.run, one.round, one.chain) == about)
    salt = salt_of(newest.run, statement, newest.nonces)
    return EpochTerms(newest, statement, salt, past_of(earlier), next(fitting, None))


def certificate_of(run: bytes, present: Present, states: Mapping[int, bytes]) -> Certificate:
    """What clients have signed about a state, in one piece."""
    signers = tuple(sorted(states))
    return Certificate(run, present.round, present.chain, signers, b"".join(states[client] for client in signers))


def past_of(records: list[EpochRecord]) -> tuple[PastEpoch, ...]:
    """What a client must know of earlier epochs."""
    statements = [(record, read_statement(record.statement)) for record in records]
    return tuple(
        PastEpoch(statement.first, record.run, salt_of(record.run, statement, record.nonces))
        for record, statement in statements
    )
