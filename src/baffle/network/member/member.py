"""A client in a network: how it answers each message, over any transport.

It needs no PyTorch. Its caller supplies a function that equips it for a plan.
"""

import time
from collections.abc import Callable
from dataclasses import InitVar, dataclass, field, replace
from pathlib import Path

import msgspec

from baffle.aggregation.client.marks import MarksFile
from baffle.aggregation.client.session import ClientSession
from baffle.aggregation.context import state_text
from baffle.client.abstaining import RateLimitedLog, Tell, abstention
from baffle.client.client import Client, contribution_bytes
from baffle.client.replica import Replica
from baffle.client.worker import Worker
from baffle.core.messages import Message, Number, RoundRequest, decode, encode
from baffle.errors import BaffleError, MessageError, RefusalError, RunFolderError, first_line, one_line
from baffle.network import joining
from baffle.network.joining import UNREADY, Begin, Done, Openings, Ready, Unready
from baffle.network.keys.folders import ClientKeys
from baffle.network.link.envelope import most_joining_bytes, most_request_bytes
from baffle.network.member.consent import AcceptedEpoch, Consent
from baffle.network.member.equipment import Equip, Equipment
from baffle.network.member.policy import Policy
from baffle.plan import Plan
from baffle.schedule import policy_of
from baffle.statement import ready_text, salt_of
from baffle.trajectory import trajectory_of

# The types of messages that a client needs its samples or its model to answer
NEEDS_WORK = {"begin", "request", "masked-request"}


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
    with which it continues when it is restarted. It takes part within its `policy`; without one, within the default.
    With a `pinned` plan it takes part in no other, and without a policy beside it the plan stands for what it fixes.
    `tell` is its own log: it gets the whole reason of everything that it refuses or cannot do. The server learns none.
    `now` gives the seconds that its marks count days by.
    """

    own: InitVar[ClientKeys]
    folder: Path | None
    equip: InitVar[Equip]
    affords: InitVar[int] = 0
    pinned: InitVar[Plan | None] = None
    tell: Tell = lambda _words: None
    policy: InitVar[Policy | None] = None
    now: InitVar[Callable[[], float]] = time.time
    over: bool = False  # whether its run has ended
    _agreed: AcceptedEpoch | None = field(default=None, repr=False)  # the epoch that it was last told about
    _begun: AcceptedEpoch | None = field(default=None, repr=False)  # the epoch that `_client` is in
    _nonces: bytes = field(default=b"", repr=False)
    _client: Client | None = field(default=None, repr=False)
    _run: bytes = field(default=b"", repr=False)  # the run that `_client` is in

    def __post_init__(
        self,
        own: ClientKeys,
        equip: Equip,
        affords: int,
        pinned: Plan | None,
        policy: Policy | None,
        now: Callable[[], float],
    ) -> None:
        def tell(words: str) -> None:
            self.tell(words)

        self.memory = MarksFile(own.marks, now)
        self.consent = Consent(own, self.memory, equip, affords, pinned, policy, tell)
        self._tell_sparingly = RateLimitedLog(tell)

    @property
    def keys(self) -> ClientKeys:
        return self.consent.keys

    @property
    def revoked(self) -> str:
        return self.consent.revoked

    def answer(self, data: bytes) -> bytes:
        """The reply to whatever a server sends. Nothing that it sends ends this client, not even a mistake of ours."""
        try:
            asked = joining.decode_asked(data)
            return self._answer_round(data) if asked is None else encode(self._answer(asked))
        except (BaffleError, OSError) as fault:
            self._tell_sparingly(f"will not take part: {fault}")
        except Exception as fault:
            self._tell_sparingly(f"abstained: a mistake in BAFFLE: {type(fault).__name__}: {first_line(fault)}")
        return abstention(data)

    def _answer(self, asked: joining.Asked) -> Message:
        """The reply to a message about joining. The cases are in the order of the messages."""
        if self.revoked:
            raise RefusalError(self.revoked)
        match asked:
            case joining.Introduce() | Begin() if self.consent.is_behind(asked):
                return joining.Behind()
            case joining.Introduce():
                return self.consent.introduce(asked)
            case joining.NewRoster():
                return self.consent.take_roster(asked)
            case Begin():
                return self._agree(asked)
            case Openings():
                return self._enter(asked)
            case joining.Halt():
                return self._sign_state(asked.request)
            case joining.Over():
                return self._end(asked.request)

    def _agree(self, asked: Begin) -> Ready:
        """Open this client's nonce for a statement that it agrees to."""
        epoch = self.consent.agree(asked)
        replica = self._replica(epoch, self.consent.equipment(epoch.plan))
        is_secure = epoch.plan.secure.mode != "off"
        nonce = self.memory.open(epoch.commitment, epoch.run, limited=is_secure, excluded=epoch.excluded)
        self._agreed = epoch
        signature = self.keys.identity.sign(ready_text(epoch.run))
        return Ready(nonce, signature, replica.round, self.memory.marks(epoch.run).slot + 1)

    def _enter(self, asked: Openings) -> Message:
        """Take part in the run, with the salt that follows from all nonces."""
        epoch = self._agreed
        if epoch is None or epoch.run != asked.run:
            return Unready()
        salt = salt_of(epoch.run, epoch.statement, asked.nonces)
        if self._client is None or self._run != epoch.run:  # a new session would lose keys that others rely on
            self.memory.enter(epoch.run, epoch.plan.federation.clients)
            replica = self._take_part(epoch, asked.nonces, self.consent.equipment(epoch.plan)).replica
            at = f", from round {replica.round + 1} on" if replica.round else ""
            place = f"client {self.keys.number} of {len(self.keys.roster.clients)}"
            self.tell(f"takes part in {one_line(epoch.plan.name, 80)!r} as {place}{at}")
            if cost := self.consent.told_cost(replica.trajectory):
                self.tell(cost)
        return joining.Salted(salt)

    def _replica(self, epoch: AcceptedEpoch, equipment: Equipment, salt: bytes = b"") -> Replica:
        """This client's copy of the weights in the run that it enters: the one that it has, if it is of that run."""
        bare = equipment.worker.trajectory
        lineage = epoch.lineage(bare, salt)
        if self._client and self._run in [one.run for one in lineage.epochs]:
            return self._client.replica.in_epoch(lineage, snapshots=epoch.takes_snapshots)
        initial = bare.rule.start(equipment.initial())
        if initial.digest() != epoch.statement.initial:
            raise RefusalError(
                "the run begins with other weights than this client's own; take the model from the same plan, version "
                "and export as the server"
            )
        beginning, reach = lineage.beginning(initial), self.consent.reach(epoch.plan)
        return Replica(lineage, beginning, self._replica_file(), snapshots=epoch.takes_snapshots, reach=reach)

    def _replica_file(self) -> Path | None:
        if self.folder is None:
            return None
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as fault:
            raise RunFolderError(f"{self.folder} cannot be used: {fault.strerror or fault}") from None
        return self.folder / "replica"

    def _take_part(
        self, epoch: AcceptedEpoch, nonces: bytes, equipment: Equipment | None, known: FrozenMember | None = None
    ) -> Client:
        """Become a client of the run: a new one, or one that takes over what another member froze."""
        number, tiers = self.keys.number, dict(enumerate(epoch.statement.tiers))
        salt = salt_of(epoch.run, epoch.statement, nonces)
        if known:
            bare = equipment.worker.trajectory if equipment else trajectory_of(epoch.plan, known.weights)
            lineage = epoch.lineage(bare, salt)
            file, reach = self._replica_file(), self.consent.reach(epoch.plan)
            replica = Replica.thawed(lineage, known.replica, file, snapshots=epoch.takes_snapshots, reach=reach)
        else:
            assert equipment is not None
            replica = self._replica(epoch, equipment, salt)
        trajectory, session = replica.trajectory, None
        worker = replace(equipment.worker, k=tiers[number], trajectory=trajectory) if equipment else None
        if epoch.plan.secure.mode != "off":
            session = ClientSession(
                number,
                self.keys.identity,
                self.keys.roster.directory(),
                epoch.run,
                policy_of(trajectory, tiers, salt),
                memory=self.memory,
                charge=self.consent.charge(trajectory),
                frozen=known.session if known else None,
            )
        self._client = Client(replica, worker, session, self._tell_sparingly)
        self._begun, self._run, self._nonces = epoch, epoch.run, nonces
        return self._client

    def _answer_round(self, data: bytes) -> bytes:
        """The reply to a message of a round. Under a later roster, the epoch is over."""
        if self._client is None or self._begun is None or self._begun.statement.roster != self.keys.roster.number:
            return UNREADY
        self.consent.require_valid_roster()
        reply = self._client.answer(data)
        return UNREADY if self._diverged(self._client.replica) else reply

    def _diverged(self, replica: Replica) -> bool:
        """Whether the server's history differs from this client's own replay. The run is over for this client then, and
        if the server moves the weights too far. That is no more than an abstention to the server."""
        if not replica.diverged and not replica.out_of_reach:
            return False
        different = (
            "the server's history does not match this client's replay: either one of them is damaged, or the server "
            "tells different clients different things"
        )
        self.tell(f"{replica.out_of_reach or different}; this client takes no further part in this run")
        self.memory.leave()
        self._client = None
        return replica.diverged

    def _sign_state(self, last: RoundRequest) -> Message:
        """Go on to a state and sign it, once for each round of a run."""
        if self._client is None:
            return Unready()
        replica, marks = self._client.replica, self.memory.marks(self._run)
        if last.round > (most := replica.trajectory.plan.rounds):
            raise RefusalError(f"the state before round {last.round} of a run of {most} rounds")
        try:
            replica.weights_for(last)
        except MessageError:
            if not self._diverged(replica):
                raise
            return Unready()
        if last.round < marks.signed:
            raise RefusalError(f"the state before round {marks.signed} was signed before")
        self.memory.remember(self._run, msgspec.structs.replace(marks, signed=last.round))
        text = state_text(self._run, last.round, last.chain)
        return Done(last.weights_hash, self.keys.identity.sign(text))

    def _end(self, last: RoundRequest) -> Message:
        """Save the last weights and sign their state. The run is over."""
        done = self._sign_state(last)
        if isinstance(done, Done) and self._client:
            self._client.replica.save()
            if isinstance(worker := self._client.worker, Worker) and worker.passes:
                probes, gradients = worker.passes["probes"], worker.passes["gradient"]
                self.tell(f"made {gradients or probes:,} {'backward' if gradients else 'forward'} passes in this run")
            self.over = True
            self.memory.leave()
        return done

    @property
    def most_request_bytes(self) -> int:
        """The most bytes that a request may have: before this client has a plan, enough for one."""
        clients = len(self.keys.roster.clients)
        if self._client is None:
            return most_joining_bytes(clients)
        trajectory = self._client.replica.trajectory
        return most_request_bytes(clients, trajectory.n, contribution_bytes(trajectory))

    def frozen(self) -> bytes:
        """All that another member needs to continue in place of this one. It contains secrets: keep it in memory."""
        client, told = self._client, self._agreed.begin if self._agreed else None
        if client is None or self._begun is None:
            return encode(FrozenMember(told, None, b"", 0, None, b""))
        session, replica = client.session.frozen() if client.session else None, client.replica
        frozen = FrozenMember(told, self._begun.begin, self._nonces, replica.trajectory.n, session, replica.frozen())
        return encode(frozen)

    def thaw(self, frozen: bytes, *, idle: bool) -> None:
        """Continue in place of another member. With `idle`, load neither samples nor a model, to save time."""
        if not frozen:
            return
        known = decode(frozen, FrozenMember)
        if known.told:
            self._agreed = self.consent.checked(known.told)
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
