"""What a client looks at before it takes part: the plan, the roster, its marks. It agrees, or refuses with a reason for
its own log."""

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from baffle.aggregation.client.marks import Memory
from baffle.client.worker import Worker
from baffle.core.arrays import F32
from baffle.errors import PlanError, RefusalError
from baffle.network.entering import Entry, checked_entry
from baffle.network.joining import Begin, Introduce, Introduction
from baffle.network.keys import ClientKeys
from baffle.network.policy import Policy
from baffle.network.same_plan import differences, for_roster
from baffle.plan import Plan, check, read_toml, settings_of
from baffle.statement import NONCE_BYTES, commitment_text, commitment_to, read_statement


class Equipment(NamedTuple):
    """What a client computes with, and the weights that it begins with, which it made or loaded itself."""

    worker: Worker
    initial: Callable[[], F32]


Equip = Callable[[Plan], Equipment]
"""A plan → what this client computes with. Its worker evaluates all directions."""

CountSamples = Callable[[Plan], int]
"""A plan → how many samples this client has for it."""


@dataclass
class Consent:
    """One client's consent to plans and statements. Member says what its fields mean."""

    keys: ClientKeys
    memory: Memory
    samples: CountSamples
    equip: Equip
    affords: int = 0
    pinned: Plan | None = None
    policy: Policy | None = None
    _equipped: tuple[bytes, Equipment] | None = field(default=None, repr=False)  # for the trajectory of this digest

    def introduce(self, asked: Introduce) -> Introduction:
        """Commit to a nonce for an epoch of a plan, which this client must find acceptable."""
        plan = self._offered(asked.plan)
        self._require_acceptable(plan)
        roster = self.keys.roster
        if (asked.roster, asked.roster_hash) != (roster.number, roster.hash()):
            raise RefusalError(f"roster {asked.roster} of the server is not this client's roster {roster.number}")
        self._require_acceptable(plan, self.samples(plan))
        self.equipment(plan)  # loaded now, so that nobody has to wait for it later
        commitment = self.memory.unopened()
        if commitment is None:
            nonce = secrets.token_bytes(NONCE_BYTES)
            commitment = commitment_to(nonce)
            self.memory.commit(commitment, nonce)
        text = commitment_text(roster.server_key, asked.plan, asked.roster_hash, asked.epoch, commitment)
        return Introduction(self.affords, commitment, self.keys.identity.sign(text))

    def agree(self, begin: Begin) -> Entry:
        """The epoch of a statement, if this client may and will enter it."""
        plan = self._offered(read_statement(begin.statement).plan)
        self._require_acceptable(plan)
        entry = checked_entry(begin, plan, self.keys)
        tier = entry.statement.tiers[self.keys.number]
        if self.affords and tier > self.affords:
            raise RefusalError(f"{tier} directions a round, but this client affords {self.affords}")
        self._require_marks(entry)
        self._require_acceptable(plan, len(self.equipment(plan).worker.indices))
        return entry

    def checked(self, begin: Begin) -> Entry:
        """The epoch of a statement that this client has agreed to before."""
        return checked_entry(begin, self._offered(read_statement(begin.statement).plan), self.keys)

    def equipment(self, plan: Plan) -> Equipment:
        """What this client computes with, loaded once for all epochs of a run."""
        digest = plan.trajectory_digest()
        if self._equipped is None or self._equipped[0] != digest:
            self._equipped = digest, self.equip(plan)
        return self._equipped[1]

    def _require_marks(self, entry: Entry) -> None:
        """Refuse to go on without the marks of a round that this client contributed to: they are on its disk before
        anything is sent. A server that lies about it only loses this client."""
        answered = entry.begin.answered
        if entry.plan.secure.mode == "off":  # without secure sums there are no marks of rounds
            return
        if answered > entry.statement.first and self.memory.marks(entry.run).slot + 1 < answered:
            raise RefusalError(
                f"this client contributed to round {answered - 1}, but its marks do not say so, so they were lost or "
                "are an older copy; without its marks it could be asked twice: it needs a new key"
            )

    def _offered(self, text: str) -> Plan:
        """The plan that a server offers. Some checks of a plan take time that grows with its number of clients, so
        that is compared first."""
        try:
            plan = settings_of(read_toml(text, "the server's plan"), Plan)
            clients, expected = plan.federation.clients, len(self.keys.roster.clients)
            if clients != expected:
                raise RefusalError(f"a run of {clients} clients, but the roster has {expected}")
            check(plan)
        except PlanError as fault:
            raise RefusalError(f"the server's plan is none: {fault}") from None
        return plan

    def _require_acceptable(self, plan: Plan, samples: int | None = None) -> None:
        """Refuse a plan that is not the pinned one, or not within the policy. Some rules need the number of samples."""
        if self.pinned is None:
            (self.policy or Policy()).require(plan, samples)
            return
        if differing := differences(for_roster(self.pinned, self.keys.roster), plan):
            raise RefusalError(f"the server's plan is another than this client's --plan: {differing}")
        (self.policy or Policy.beside(self.pinned)).require(plan, samples, named=True)
