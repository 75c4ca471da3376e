"""How an epoch is formed with all clients that are here, by the messages of joining.py. The epoch before ends first.

A client that committed and does not open its nonce cannot be left out afterwards, because the statement names its
commitment. The statement is then dropped, and another one is made without that client, with its commitment as evidence:
clients count the statements for which they opened nonces in vain, and do not charge this one to the server. A client
that has been caught before opens first. If it does not, nobody else has opened a nonce in vain.
"""

from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass

from baffle.aggregation.context import signed
from baffle.network.joining import Done, EpochTerms, Halt, Introduction, Ready, RosterTaken, Salted
from baffle.network.keys.rosters import Roster
from baffle.network.server.connected import ConnectedClients
from baffle.network.server.epochs import Epochs
from baffle.statement import commitment_text, commitment_to, ready_text

TRIES = 3  # how many statements are tried in a row before the server looks for clients again


@dataclass(frozen=True)
class Assembly:
    """Forms the epochs of a run, each with at least so many clients."""

    epochs: Epochs
    clients: ConnectedClients
    least: int

    def form(self) -> dict[int, Ready]:
        """Begin an epoch with all clients that are here, and return its clients; none if too few are left."""
        self._halt()
        candidates = self.clients.here()
        for _ in range(TRIES):
            introductions = self._introduce(candidates)
            if len(introductions) < self.least:
                return {}
            offered = self.epochs.offered(self.epochs.statement(introductions))
            opened, failed = self._begin(offered)
            if not failed:
                return self._open(offered, opened)
            candidates = set(introductions) - failed
        return {}

    def take(self, roster: Roster, gone: Collection[int]) -> None:
        """Go on under a later roster, without the clients that are gone. The epoch is over. The remaining clients sign
        its last state: their keys are in both rosters, and newcomers know only the later one."""
        self.clients.lose(gone)
        self._halt()
        self.epochs.take(roster)
        self.clients.leave_epoch()
        self.clients.collect(RosterTaken, dict.fromkeys(sorted(self.clients.reachable()), self.epochs.new_roster))

    def _halt(self) -> None:
        """If the server may lie, let the clients of the epoch sign its last state: others need a certificate."""
        if self.epochs.epoch is None:
            return  # nothing was played since the last epoch ended
        done: dict[int, Done] = {}
        if self.epochs.may_lie:
            requests = self.epochs.last_requests(sorted(self.clients.reachable()))
            done = self.clients.collect(Done, {client: Halt(request) for client, request in requests.items()})
            self.epochs.running.downlink.delivered(list(done), self.epochs.running.present)
        self.epochs.end({client: answer.signature for client, answer in done.items()})

    def _introduce(self, candidates: Set[int]) -> dict[int, Introduction]:
        """The signed commitments of clients. Those that have not introduced themselves for this epoch are asked."""
        clients, question = self.clients, self.epochs.question
        waiting = {client: known for client, known in clients.introduced.items() if client in candidates}
        asked = clients.collect(Introduction, dict.fromkeys(sorted(candidates - waiting.keys()), question))
        introductions = dict(sorted((waiting | asked).items()))
        directory, server = self.epochs.roster.directory(), self.epochs.roster.server_key
        for client, known in list(introductions.items()):
            text = commitment_text(server, question.plan, question.roster_hash, question.epoch, known.commitment)
            if not signed(directory[client], known.signature, text):
                del introductions[client]
                clients.drop(client, "its commitment is not signed")
        return introductions

    def _begin(self, offered: EpochTerms) -> tuple[dict[int, Ready], set[int]]:
        """Tell clients the statement. Returns those that open the nonces that it has commitments to, and those that do
        not: because they refuse, do not answer or lie."""
        salters, known = offered.salters, self.clients.faults.known
        opened: dict[int, Ready] = {}
        failed = set[int]()
        for clients in (salters & known, salters - known):
            if not failed:
                now = self._opened(offered, sorted(clients))
                opened |= now
                failed |= clients - now.keys()
                self.clients.forget_introductions(clients)  # a nonce serves one statement
        for client in sorted(failed):
            self.clients.faults.charge(client, "it has not opened the nonce that it had committed to")
        self.epochs.note_unopened(offered.statement, failed)
        return opened, failed

    def _opened(self, offered: EpochTerms, clients: Collection[int]) -> dict[int, Ready]:
        """The clients among these that open their nonces and sign the statement."""
        directory = self.epochs.roster.directory()
        commitments = {one.client: one.commitment for one in offered.statement.commitments}
        begins = {client: offered.begin(self.epochs.answered(client)) for client in clients}
        opened = self.clients.collect(Ready, begins, patient=True)
        for client, ready in list(opened.items()):
            is_signed = signed(directory[client], ready.signature, ready_text(offered.run))
            if commitment_to(ready.nonce) != commitments[client] or not is_signed:
                del opened[client]
                self.clients.drop(client, "it has opened another nonce, or signed another statement")
        return opened

    def _open(self, offered: EpochTerms, opened: Mapping[int, Ready]) -> dict[int, Ready]:
        """Begin the epoch, and tell its clients all nonces. Returns those that follow the same salt."""
        epoch = self.epochs.begin(offered, opened)
        entered = self.clients.enter(opened)
        salted = self.clients.collect(Salted, dict.fromkeys(sorted(entered), epoch.openings()))
        for client, answer in salted.items():
            if answer.salt != epoch.salt:
                self.clients.drop(client, "it follows another salt")
        return {client: opened[client] for client in salted if client in self.clients.ready}
