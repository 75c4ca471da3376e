"""What a client checks before it takes part: roster, plan, statement, marks and budget. It agrees, or refuses with a
reason for its own log."""

import secrets
from dataclasses import dataclass, field, replace
from itertools import pairwise

from baffle import statement as statements
from baffle.aggregation.client.marks import Memory
from baffle.client.abstaining import Tell
from baffle.client.replica import Reach
from baffle.client.worker import Worker
from baffle.errors import BaffleError, KeysError, PlanError, RefusalError
from baffle.lineage import Lineage
from baffle.network.joining import Begin, Introduce, Introduction, NewRoster, RosterTaken
from baffle.network.keys.folders import ClientKeys
from baffle.network.keys.rosters import Roster, RosterFile, keep_roster, newer_roster, require_not_expired
from baffle.network.member.equipment import Equip, Equipment, require_most_weights
from baffle.network.member.policy import Policy
from baffle.network.settling import (
    differences,
    require_clients_of_their_own,
    require_fewer_directions_than_weights,
    require_sound_terms,
    with_places,
)
from baffle.plan import Plan, check, read_toml, settings_of
from baffle.plan.arithmetic import require_vouched
from baffle.plan.plan import LYING
from baffle.plan.privacy import with_noise
from baffle.privacy.accounting import Budget, Charge, Release, spent
from baffle.statement import NONCE_BYTES, NOTHING, Statement, commitment_text, commitment_to, read_statement
from baffle.trajectory import Epoch, Trajectory

EXPOSED = (
    "the plan has no [privacy]: a server that lies can subtract sums over changing clients and add up what it measures "
    "over rounds, so it gets what this client alone sends, and with a model of its own choice the samples themselves"
)
"""What a client tells its owner where a server may lie and there is no noise."""


@dataclass(frozen=True)
class AcceptedEpoch:
    """An epoch that a client may enter, by its statement."""

    begin: Begin
    statement: Statement
    plan: Plan
    run: bytes
    commitment: bytes  # this client's own, in the statement
    excluded: tuple[bytes, ...]  # the identities of clients that have not opened their nonces for an earlier statement
    takes_snapshots: bool  # whether it may begin with the state that the epoch begins with, if need be certified

    def lineage(self, bare: Trajectory, salt: bytes) -> Lineage:
        """The run up to this epoch. `bare` is its trajectory without salts. Without a salt nothing is replayed."""
        past = [Epoch(one.first, one.salt, one.run) for one in self.begin.past]
        last = Epoch(self.statement.first, salt, self.run, self.statement.chain)
        return Lineage(bare.with_epochs((*past, last)))


@dataclass
class Consent:
    """One client's consent to rosters, plans and statements. Member says what its fields mean."""

    keys: ClientKeys
    memory: Memory
    equip: Equip
    affords: int = 0
    pinned: Plan | None = None
    policy: Policy | None = None
    tell: Tell = lambda _words: None
    revoked: str = ""  # why this client's key will never take part again; empty as long as it may
    _equipped: tuple[bytes, Equipment] | None = field(default=None, repr=False)  # for the trajectory of this digest
    _beyond_it: str = field(default="", repr=False)  # the text of a plan for which it could not equip itself

    def __post_init__(self) -> None:
        self._file = RosterFile(self.keys.folder, self.keys.authority, self.keys.roster)

    def is_behind(self, asked: Introduce | Begin) -> bool:
        """Whether the server has a later roster than this client, also after a look into its own folder."""
        self._take_roster_of_folder()
        number = asked.roster if isinstance(asked, Introduce) else read_statement(asked.statement).roster
        return number > self.keys.roster.number

    def take_roster(self, asked: NewRoster) -> RosterTaken:
        self._take_roster_of_folder()
        roster = newer_roster(self.keys.roster, self.keys.authority, asked.roster)
        if roster != self.keys.roster:
            self._use(roster, keep=True)
        return RosterTaken()

    def _take_roster_of_folder(self) -> None:
        """Take a later roster from the client's folder: one from the server must not replace it by an earlier one."""
        try:
            roster = self._file.reread()
        except KeysError as fault:
            self.tell(f"{fault}; this client goes on with roster {self.keys.roster.number}")
            return
        if roster and roster.number > self.keys.roster.number:
            self._use(roster)

    def _use(self, roster: Roster, *, keep: bool = False) -> None:
        """Go on with a later roster. With `keep`, it is on disk before anything builds on it."""
        if roster.server != self.keys.roster.server:
            raise RefusalError(f"roster {roster.number} names another server than the one that this client talks to")
        if keep:
            keep_roster(self.keys.folder, roster)
        known = {client.identity for client in self.keys.roster.clients if client}
        strange = sum(client is not None and client.identity not in known for client in roster.clients)
        try:
            self.keys = self.keys.under(roster)
        except KeysError as fault:
            self.revoked = str(fault)
            raise
        changed = f"; new keys: {strange} of {len(roster.clients)}" if strange else ""
        self.tell(f"goes on with roster {roster.number}{changed}")

    def require_valid_roster(self) -> None:
        """Refuse to go on under a roster that has expired: only the authority can say who still belongs."""
        require_not_expired(f"roster {self.keys.roster.number}", self.keys.roster)

    def introduce(self, asked: Introduce) -> Introduction:
        """Commit to a nonce for an epoch of a plan, which this client must find acceptable by its text. Neither samples
        nor a model are looked at: an answer that depended on them would tell a server about them, question after
        question, and cost this client whatever a server asks for."""
        roster = self.keys.roster
        self.require_valid_roster()
        if asked.roster < roster.number:
            raise RefusalError(
                f"the server has roster {asked.roster}, but this client has roster {roster.number} and never goes "
                "back; the server needs the later one, too"
            )
        if (asked.roster, asked.roster_hash) != (roster.number, roster.hash()):
            raise RefusalError(f"roster {asked.roster} of the server is not this client's roster {roster.number}")
        plan = self._offered(asked.plan)
        self._require_acceptable(plan)
        if plan.outcome_kind == "scalars":  # then what is promised does not depend on the number of weights
            with_noise(plan, 1)
        if asked.plan == self._beyond_it:  # the server knows: a statement of this plan was not entered
            raise RefusalError("this client could not begin with this plan; when that is mended, start it again")
        commitment = self.memory.unopened()
        if commitment is None:
            nonce = secrets.token_bytes(NONCE_BYTES)
            commitment = commitment_to(nonce)
            self.memory.commit(commitment, nonce)
        text = commitment_text(roster.server_key, asked.plan, asked.roster_hash, asked.epoch, commitment)
        return Introduction(self.affords, commitment, self.keys.identity.sign(text))

    def agree(self, begin: Begin) -> AcceptedEpoch:
        """The epoch of a statement, if this client may and will enter it."""
        self.require_valid_roster()
        self._require_acceptable(self._offered(read_statement(begin.statement).plan))
        epoch = self.checked(begin)
        plan, on_roster = epoch.plan, len(self.keys.roster.clients)
        runs = [epoch.run, *(past.run for past in begin.past)]
        if plan.federation.clients < on_roster and self.memory.run not in runs:
            raise RefusalError("a run with fewer places than the roster, and not the one that this client is in")
        tier = epoch.statement.tiers[self.keys.number] * plan.federation.local_steps
        if self.affords and tier > self.affords:
            raise RefusalError(f"{tier} directions a round, but this client affords {self.affords}")
        self._require_marks(epoch)
        try:
            worker = self.equipment(plan).worker
            require_fewer_directions_than_weights(worker.trajectory)
            self._require_budget(plan, worker.trajectory)
        except BaffleError:
            self._beyond_it = epoch.statement.plan
            raise
        self._tell_of_batch(worker, self._rules.largest_share(plan))
        if plan.secure.mode == LYING and not plan.privacy.on:
            self.tell(EXPOSED)
        return epoch

    def checked(self, begin: Begin) -> AcceptedEpoch:
        """The epoch of a statement, without the checks of what this client has agreed to before."""
        plan = self._offered(read_statement(begin.statement).plan)
        return checked_epoch(begin, plan, self.keys, self._places(plan))

    def equipment(self, plan: Plan) -> Equipment:
        """What this client computes with, loaded once for all epochs of a run. What follows from settings that do not
        determine the weights, such as secure.mode, follows from this plan and not from the one that it was loaded for.
        """
        digest, rules = plan.trajectory_digest(), self._rules
        if self._equipped is None or self._equipped[0] != digest:
            equipped = self.equip(plan, rules.most_weights)
            require_most_weights(equipped.worker.trajectory.n, rules.most_weights)
            self._equipped = digest, equipped
        worker, initial = self._equipped[1]
        batch, trajectory = rules.batch(plan, len(worker.indices)), replace(worker.trajectory, plan=plan)
        return Equipment(replace(worker, trajectory=trajectory, batch=batch, most_step=rules.most_step), initial)

    def reach(self, plan: Plan) -> Reach:
        """How far outcomes may move this client's weights in a run."""
        return Reach(self._rules.most_step, self._rules.most_distance, lambda: self.equipment(plan).initial())

    def _tell_of_batch(self, worker: Worker, share: float) -> None:
        """Say if this client uses fewer samples than the plan says: only its own log may know how many it has."""
        federation, samples, rules = worker.trajectory.plan.federation, len(worker.indices), self._rules
        if worker.batch == 0:
            self.tell(
                f"has {samples} samples, too few for the policy: least_batch asks for at least {rules.least_batch} in "
                f"a round, largest_batch allows {share:g} of all; so it sends zeros"
            )
        elif worker.batch and worker.batch < min(federation.batch, samples):
            self.tell(
                f"uses {worker.batch} of its {samples} samples at once instead of {federation.batch}: largest_batch "
                f"allows {share:g} of all in a round"
            )

    def charge(self, trajectory: Trajectory) -> Charge | None:
        """What this client pays for a vector, by its own account, and the budget that it keeps to."""
        private = trajectory.private
        return Charge(private.release, self._budget(trajectory.plan, private.release)) if private else None

    def _budget(self, plan: Plan, release: Release) -> Budget | None:
        """The policy's budget. Without a policy, a pinned plan may cost as much as all its own rounds do."""
        budget = self._rules.budget(plan)
        if budget is None or self.pinned is None or self.policy:
            return budget
        whole = replace(release, count=min(plan.rounds, self.pinned.rounds))  # with fewer rounds, each may cost more
        return replace(budget, epsilon=max(budget.epsilon, spent([whole], budget.delta)))

    def told_cost(self, trajectory: Trajectory) -> str:
        """What a private run may cost this client, for its own log; empty if the run is not private."""
        charge, plan = self.charge(trajectory), trajectory.plan
        if charge is None:
            return ""
        delta = charge.budget.delta if charge.budget else plan.privacy.delta
        before = self.memory.ledger.epsilon(delta)
        after = self.memory.ledger.epsilon(delta, replace(charge.release, count=plan.rounds))
        ends = charge.budget is not None and after > charge.budget.epsilon
        sooner = ", and the budget ends this client's part sooner" if ends else ""
        return (
            f"the run is private: ε = {before:.3g} at δ = {delta:g} was spent before it in all runs, and {after:.3g} "
            f"would be after {plan.rounds:,} rounds{sooner}"
        )

    def _require_budget(self, plan: Plan, trajectory: Trajectory) -> None:
        """Refuse a private plan that keeps less than it says, or of which this client cannot afford another vector."""
        with_noise(plan, trajectory.n)
        if charge := self.charge(trajectory):
            self.memory.ledger.require(charge)

    @property
    def _rules(self) -> Policy:
        """The policy that this client was given, or the one that it has otherwise."""
        return self.policy or (Policy.beside(self.pinned) if self.pinned else Policy())

    def _require_marks(self, epoch: AcceptedEpoch) -> None:
        """Refuse to go on without the marks of a round that this client contributed to: they are on its disk before
        anything is sent. A server that lies about it only loses this client. Rounds leave marks in secure sums only."""
        answered, is_secure = epoch.begin.answered, epoch.plan.secure.mode != "off"
        if is_secure and answered > epoch.statement.first and self.memory.marks(epoch.run).slot + 1 < answered:
            raise RefusalError(
                f"this client contributed to round {answered - 1}, but its marks do not say so, so they were lost or "
                "are an older copy; without its marks it could be asked twice: it needs a new key"
            )

    def _places(self, plan: Plan) -> int:
        """How many clients a run must have: as many as the roster has places. A server that could choose would sum one
        client with few others, all its own. A run that this client is in keeps its places when the roster gets more."""
        clients, on_roster = plan.federation.clients, len(self.keys.roster.clients)
        return clients if self.memory.run and clients == self.memory.places < on_roster else on_roster

    def _offered(self, text: str) -> Plan:
        """The plan that a server offers. Some checks take time that grows with its clients, so they come last."""
        try:
            plan = settings_of(read_toml(text, "the server's plan"), Plan)
            clients, expected = plan.federation.clients, self._places(plan)
            if clients != expected:
                waits = ": a client that has not been in that run waits for the next one" if clients < expected else ""
                raise RefusalError(f"a run of {clients} clients, but the roster has {expected}{waits}")
            check(plan)
            require_clients_of_their_own(plan)
        except PlanError as fault:
            raise RefusalError(f"the server's plan is not valid: {fault}") from None
        return plan

    def _require_acceptable(self, plan: Plan) -> None:
        """Refuse a plan that is not the pinned one, or not within the policy."""
        if self.pinned is None:
            self._rules.require(plan)
            return
        if differing := differences(with_places(self.pinned, plan.federation.clients), plan):
            raise RefusalError(f"the server's plan is another than this client's --plan: {differing}")
        self._rules.require(plan, named=True)
        require_vouched(plan)


def checked_epoch(begin: Begin, plan: Plan, keys: ClientKeys, places: int | None = None) -> AcceptedEpoch:
    """Refuse a statement that this client must not take part under. Whether its own weights and its own past fit, the
    replica checks. `places` is how many clients its run has; without it, as many as the roster has places."""
    statement, number = read_statement(begin.statement), keys.number
    if statement.protocol != statements.PROTOCOL:
        raise RefusalError(
            f"the server speaks version {statement.protocol} of the protocol, this client version "
            f"{statements.PROTOCOL}; both need the same version of BAFFLE"
        )
    roster, clients = keys.roster, plan.federation.clients
    if statements.shared_plan(plan) != plan or not plan.ring.n_max:
        raise RefusalError("the statement's plan is not resolved, or holds settings of the server's own machine")
    if (statement.roster, statement.roster_hash) != (roster.number, roster.hash()):
        raise RefusalError(f"roster {statement.roster} of the statement is not this client's roster {roster.number}")
    expected, tiers = len(roster.clients) if places is None else places, len(statement.tiers)
    if not clients == tiers == expected:
        raise RefusalError(f"a run of {clients} clients and {tiers} tiers, but the roster has {expected}")
    firsts = [*(one.first for one in begin.past), statement.first]
    previous = begin.past[-1].run if begin.past else NOTHING
    if (len(begin.past), previous) != (statement.epoch, statement.previous) or firsts[0] != 0:
        raise RefusalError("the epochs before are not those that the statement names")
    if any(later < earlier for earlier, later in pairwise(firsts)):
        raise RefusalError("epochs that do not follow each other")
    statements.require_enough_salt(statement, plan)
    own = [one.commitment for one in statement.commitments if one.client == number]
    if not own:
        raise RefusalError("a statement without this client's commitment; it waits for the next epoch")
    require_sound_terms(plan)
    certificate, may_lie = begin.certificate, plan.secure.mode == "malicious-server"
    if may_lie and set(statement.tiers) != {plan.probe.k}:
        raise RefusalError("directions that only some clients evaluate: their sums would hide a client among few")
    if may_lie:
        statements.require_signed_commitments(statement, roster.server_key, roster.directory())
    statements.require_evidence(statement, roster.server_key, roster.directory())
    if certificate is not None:
        about = certificate.run, certificate.round, certificate.chain
        if about != (statement.previous, statement.first, statement.chain):
            raise RefusalError("a certificate about another state than the one that the epoch begins with")
        statements.require_certified(certificate, roster.directory(), statements.least_signers(plan))
    takes_snapshots = certificate is not None or not may_lie
    excluded, run = (roster.directory()[one.client] for one in statement.unopened), statements.run_of(begin.statement)
    return AcceptedEpoch(begin, statement, plan, run, own[0], tuple(excluded), takes_snapshots)
