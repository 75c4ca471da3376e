"""A client in a network: how it answers each message, over any transport.

It needs no PyTorch. Its caller supplies a function that equips it for a plan.
"""

from dataclasses import InitVar, dataclass, field, replace
from pathlib import Path

import msgspec

from baffle.aggregation.client.marks import MarksFile
from baffle.aggregation.client.session import ClientSession
from baffle.aggregation.context import state_text
from baffle.client.abstaining import Sparingly, Tell, abstention
from baffle.client.client import Client, contribution_bytes
from baffle.client.replica import Replica
from baffle.core.messages import Message, Number, RoundRequest, decode, encode
from baffle.errors import BaffleError, MessageError, RefusalError, RunFolderError, first_line, one_line
from baffle.network.consent import Consent, CountSamples, Equip, Equipment
from baffle.network.entering import Entry
from baffle.network.joining import (
    UNREADY,
    Asked,
    Begin,
    Behind,
    Done,
    Halt,
    Introduce,
    NewRoster,
    Openings,
    Over,
    Ready,
    Salted,
    Unready,
    decode_asked,
)
from baffle.network.keys import ClientKeys
from baffle.network.link.limits import most_joining_bytes, most_request_bytes
from baffle.network.policy import Policy
from baffle.plan import Plan
from baffle.schedule import policy_of
from baffle.statement import (
    ready_text,
    salt_of,
)
from baffle.trajectory import trajectory_of

NEEDS_WORK = {"introduce", "begin", "request", "masked-request"}
"""The types of messages that a client needs its samples or its model to answer."""


class FrozenMember(Message, frozen=True, tag="frozen-member"):
    """What a client must keep between two messages: the statement that it was told last, the one that it takes part
    under with its nonces, and what its run has come to. Its marks are on its disk."""

    told: Begin | None
    begun: Begin | None
    nonces: bytes
    weights: Number
    session: bytes | None
    replica: bytes


@dataclass
class Member:
    """One client of a network. What it must never forget lies beside its key. Its folder holds a copy of the weights,
    with which it continues when it is restarted.

    It takes part within its `policy`; without one, within the default. With a `pinned` plan it takes part in no other,
    and without a policy beside it the plan stands for what it fixes.

    `tell` is its own log: it gets the whole reason of everything that it refuses or cannot do. The server learns none.
    """

    own: InitVar[ClientKeys]
    folder: Path | None
    samples: InitVar[CountSamples]
    equip: InitVar[Equip]
    affords: InitVar[int] = 0
    pinned: InitVar[Plan | None] = None
    tell: Tell = lambda _words: None
    policy: InitVar[Policy | None] = None
    over: bool = False
    """Whether its run has ended."""
    _entry: Entry | None = field(default=None, repr=False)  # the epoch that it was last told about
    _begun: Entry | None = field(default=None, repr=False)  # the epoch that `_client` is in
    _nonces: bytes = field(default=b"", repr=False)
    _client: Client | None = field(default=None, repr=False)
    _run: bytes = field(default=b"", repr=False)  # the run that `_client` is in

    def __post_init__(
        self,
        own: ClientKeys,
        samples: CountSamples,
        equip: Equip,
        affords: int,
        pinned: Plan | None,
        policy: Policy | None,
    ) -> None:
        self.memory = MarksFile(own.marks)
        self.consent = Consent(
            own, self.memory, samples, equip, affords, pinned, policy, lambda words: self.tell(words)
        )
        self._tell_sparingly = Sparingly(lambda words: self.tell(words))

    @property
    def keys(self) -> ClientKeys:
        """This client's keys, under the latest roster that it knows."""
        return self.consent.keys

    @property
    def revoked(self) -> str:
        """Why this client's key will never take part again; empty as long as it may."""
        return self.consent.revoked

    def answer(self, data: bytes) -> bytes:
        """The reply to whatever a server sends. Nothing that it sends ends this client, not even a mistake of ours."""
        try:
            asked = decode_asked(data)
            return self._answer_round(data) if asked is None else encode(self._answer(asked))
        except (BaffleError, OSError) as fault:
            self._tell_sparingly(f"will not take part: {fault}")
        except Exception as fault:
            self._tell_sparingly(f"abstained: a mistake in BAFFLE: {type(fault).__name__}: {first_line(fault)}")
        return abstention(data)

    @property
    def most_request_bytes(self) -> int:
        """The most bytes that a request may have: before this client has a plan, enough for one."""
        clients = len(self.keys.roster.clients)
        if self._client is None:
            return most_joining_bytes(clients)
        trajectory = self._client.replica.trajectory
        return most_request_bytes(clients, trajectory.n, contribution_bytes(trajectory))

    def frozen(self) -> bytes:
        """Everything that another member needs to continue in place of this one. It contains secrets: keep it in
        memory only."""
        client, entry = self._client, self._entry
        return encode(
            FrozenMember(
                entry.begin if entry else None,
                self._begun.begin if client and self._begun else None,
                self._nonces if client else b"",
                client.replica.trajectory.n if client else 0,
                client.session.frozen() if client and client.session else None,
                client.replica.frozen() if client else b"",
            )
        )

    def thaw(self, frozen: bytes, *, idle: bool) -> None:
        """Continue in place of another member. With `idle`, load neither samples nor a model: that saves time if the
        next message does not need them."""
        if not frozen:
            return
        known = decode(frozen, FrozenMember)
        if known.told:
            self._entry = self.consent.checked(known.told)
        if known.begun:
            begun = self.consent.checked(known.begun)
            equipment = None if idle else self.consent.equipment(begun.plan)
            self._take_part(begun, known.nonces, equipment, known)

    def close(self) -> None:
        """Save the replica, so that a restarted client can continue from it."""
        try:
            if self._client:
                self._client.replica.save()
        except RunFolderError as fault:
            self.tell(f"the weights are not saved: {fault}")

    def _answer_round(self, data: bytes) -> bytes:
        if self._client is None or self._begun is None:
            return UNREADY
        if self._begun.statement.roster != self.keys.roster.number:  # its epoch is over
            return UNREADY
        self.consent.require_valid_roster()
        reply = self._client.answer(data)
        return UNREADY if self._lost_its_way(self._client.replica) else reply

    def _lost_its_way(self, replica: Replica) -> bool:
        """Whether this client was told another story than its own replay. If so, the run is over for it."""
        if not replica.astray:
            return False
        self.tell(
            "what the server says does not lead to its weights by this client's own account: either one of them is "
            "damaged, or the server tells different clients different things; this client takes no further part in "
            "this run"
        )
        self.memory.leave()
        self._client = None
        return True

    def _answer(self, asked: Asked) -> Message:
        if self.revoked:
            raise RefusalError(self.revoked)
        match asked:
            case Introduce() | Begin() if self.consent.is_behind(asked):
                return Behind()
            case Introduce():
                return self.consent.introduce(asked)
            case NewRoster():
                return self.consent.take_roster(asked)
            case Begin():
                return self._begin(asked)
            case Openings():
                return self._open(asked)
            case Halt():
                return self._sign_state(asked.request)
            case Over():
                return self._end(asked.request)

    def _begin(self, asked: Begin) -> Ready:
        entry = self.consent.agree(asked)
        replica = self._replica(entry, self.consent.equipment(entry.plan))
        nonce = self.memory.open(entry.commitment, entry.run, limited=entry.plan.secure.mode != "off")
        self._entry = entry
        signature = self.keys.identity.sign(ready_text(entry.run))
        return Ready(nonce, signature, replica.round, self.memory.marks(entry.run).slot + 1)

    def _open(self, asked: Openings) -> Message:
        entry = self._entry
        if entry is None or entry.run != asked.run:
            return Unready()
        salt = salt_of(entry.run, entry.statement, asked.nonces)
        if self._client is None or self._run != entry.run:  # a new session would lose keys that others rely on
            number, roster = self.keys.number, self.keys.roster
            self.memory.enter(entry.run, entry.plan.federation.clients)
            replica = self._take_part(entry, asked.nonces, self.consent.equipment(entry.plan)).replica
            at = f", from round {replica.round + 1} on" if replica.round else ""
            self.tell(
                f"takes part in {one_line(entry.plan.name, 80)!r} as client {number} of {len(roster.clients)}{at}"
            )
            if cost := self.consent.told_cost(replica.trajectory):
                self.tell(cost)
        return Salted(salt)

    def _sign_state(self, last: RoundRequest) -> Message:
        """Go on to a state and sign it, once for each round of a run."""
        if self._client is None:
            return Unready()
        replica, marks = self._client.replica, self.memory.marks(self._run)
        try:
            replica.weights_for(last)
        except MessageError:
            if not self._lost_its_way(replica):
                raise
            return Unready()
        if last.round < marks.signed:
            raise RefusalError(f"the state before round {marks.signed} was signed before")
        self.memory.remember(self._run, msgspec.structs.replace(marks, signed=last.round))
        text = state_text(self._run, last.round, last.chain)
        return Done(last.weights_hash, self.keys.identity.sign(text))

    def _end(self, last: RoundRequest) -> Message:
        done = self._sign_state(last)
        if isinstance(done, Done) and self._client:
            self._client.replica.save()
            self.over = True
            self.memory.leave()
        return done

    def _replica(self, entry: Entry, equipment: Equipment, salt: bytes = b"") -> Replica:
        """This client's copy of the weights, in the run that it enters. It goes on with the copy that it has, if that
        belongs to the same run."""
        bare = replace(equipment.worker.trajectory, plan=entry.plan)
        lineage = entry.lineage(bare, salt)
        if self._client and self._run in [link.run for link in lineage.links]:
            replica = self._client.replica
            return replica.in_epoch(lineage, snapshots=entry.takes_snapshots)
        initial = bare.rule.start(equipment.initial())
        if initial.digest() != entry.statement.initial:
            raise RefusalError(
                "the run begins with other weights than this client's own; take the model from the same plan, version "
                "and export as the server"
            )
        snapshots = entry.takes_snapshots
        return Replica(lineage, lineage.beginning(initial), self._replica_file(), snapshots=snapshots)

    def _replica_file(self) -> Path | None:
        if self.folder is None:
            return None
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as fault:
            raise RunFolderError(f"{self.folder} cannot be used: {fault.strerror or fault}") from None
        return self.folder / "replica"

    def _take_part(
        self, entry: Entry, nonces: bytes, equipment: Equipment | None, known: FrozenMember | None = None
    ) -> Client:
        """Become a client of the run: a new one, or one that takes over what another member froze."""
        number = self.keys.number
        tiers = dict(enumerate(entry.statement.tiers))
        salt = salt_of(entry.run, entry.statement, nonces)
        if known:
            bare = equipment.worker.trajectory if equipment else trajectory_of(entry.plan, known.weights)
            lineage = entry.lineage(replace(bare, plan=entry.plan), salt)
            replica = Replica.thawed(lineage, known.replica, self._replica_file(), snapshots=entry.takes_snapshots)
        else:
            assert equipment is not None
            replica = self._replica(entry, equipment, salt)
        worker = None
        if equipment:
            worker = replace(equipment.worker, k=tiers[number], trajectory=replica.trajectory)
        session = None
        if entry.plan.secure.mode != "off":
            session = ClientSession(
                number,
                self.keys.identity,
                self.keys.roster.directory(),
                entry.run,
                policy_of(replica.trajectory, tiers, salt),
                memory=self.memory,
                charge=self.consent.charge(replica.trajectory),
                frozen=known.session if known else None,
            )
        self._client = Client(replica, worker, session, self._tell_sparingly)
        self._begun, self._run, self._nonces = entry, entry.run, nonces
        return self._client
