"""What a client checks before it enters an epoch of a run."""

from dataclasses import dataclass
from itertools import pairwise

from baffle.errors import RefusalError
from baffle.lineage import Lineage, Link
from baffle.network.joining import Begin
from baffle.network.keys import ClientKeys
from baffle.network.settling import require_sound_terms
from baffle.plan import Plan
from baffle.statement import (
    NOTHING,
    Certificate,
    Statement,
    read_statement,
    require_certified,
    require_enough_salt,
    require_signed_commitments,
    run_of,
    shared_plan,
)
from baffle.trajectory import Epoch, Trajectory


@dataclass(frozen=True)
class Entry:
    """An epoch that a client may enter."""

    begin: Begin
    statement: Statement
    plan: Plan
    run: bytes
    commitment: bytes
    """This client's own, in the statement."""
    takes_snapshots: bool
    """Whether this client may begin with the state that the epoch begins with. If the server may lie, only if the
    clients of the epoch before have signed that state."""

    def lineage(self, bare: Trajectory, salt: bytes) -> Lineage:
        """The run up to this epoch. `bare` is its trajectory without salts. As long as the salt is not known, nothing
        can be replayed."""
        past, statement = self.begin.past, self.statement
        epochs = (*(Epoch(one.first, one.salt) for one in past), Epoch(statement.first, salt))
        links = (*(Link(one.first, one.run, None) for one in past), Link(statement.first, self.run, statement.chain))
        return Lineage(bare.with_epochs(epochs), links)


def checked_entry(begin: Begin, plan: Plan, keys: ClientKeys, places: int | None = None) -> Entry:
    """Refuse a statement that this client must not take part under. Whether its own weights and its own past fit, the
    replica checks. `places` is how many clients its run has; without it, as many as the roster has places."""
    statement, number = read_statement(begin.statement), keys.number
    roster, clients = keys.roster, plan.federation.clients
    if shared_plan(plan) != plan or not plan.ring.n_max:
        raise RefusalError("the statement's plan is not resolved, or holds settings of the server's own machine")
    if (statement.roster, statement.roster_hash) != (roster.number, roster.hash()):
        raise RefusalError(f"roster {statement.roster} of the statement is not this client's roster {roster.number}")
    expected = len(roster.clients) if places is None else places
    if not clients == len(statement.tiers) == expected:
        raise RefusalError(
            f"a run of {clients} clients and {len(statement.tiers)} tiers, but the roster has {expected}"
        )
    _require_past(begin, statement)
    require_enough_salt(statement, plan)
    own = [one.commitment for one in statement.commitments if one.client == number]
    if not own:
        raise RefusalError("a statement without this client's commitment; it waits for the next epoch")
    takes_snapshots = True
    require_sound_terms(plan)
    if plan.secure.mode == "malicious-server":
        require_signed_commitments(statement, roster.server_key, roster.directory())
        takes_snapshots = begin.certificate is not None
    if begin.certificate is not None:
        _require_certificate(begin.certificate, statement, plan, keys)
    return Entry(begin, statement, plan, run_of(begin.statement), own[0], takes_snapshots)


def _require_certificate(certificate: Certificate, statement: Statement, plan: Plan, keys: ClientKeys) -> None:
    """Refuse a certificate about any other state than the one that the epoch begins with."""
    about = certificate.run, certificate.round, certificate.chain
    if about != (statement.previous, statement.first, statement.chain):
        raise RefusalError("a certificate about another state than the one that the epoch begins with")
    require_certified(certificate, keys.roster.directory(), plan.per_round)


def _require_past(begin: Begin, statement: Statement) -> None:
    """Refuse epochs that do not lead to the statement."""
    past = begin.past
    previous = past[-1].run if past else NOTHING
    firsts = [*(one.first for one in past), statement.first]
    if (len(past), previous) != (statement.epoch, statement.previous) or firsts[0] != 0:
        raise RefusalError("the epochs before are not those that the statement names")
    if any(later < earlier for earlier, later in pairwise(firsts)):
        raise RefusalError("epochs that do not follow each other")
