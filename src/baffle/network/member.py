"""A client in a network: how it answers each message, over any transport.

It needs no PyTorch. Its caller supplies a function that makes a `Worker` for a plan.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from baffle.aggregation.client.marks import MARKS, Marks, MarksFile
from baffle.aggregation.client.session import ClientSession
from baffle.client.abstaining import Sparingly, Tell, abstention
from baffle.client.client import Client, contribution_bytes
from baffle.client.replica import Replica
from baffle.client.worker import Worker
from baffle.core.messages import Message, Number, RoundRequest, decode, encode
from baffle.errors import BaffleError, MessageError, PlanError, RefusalError, RunFolderError, first_line, one_line
from baffle.network.joining import (
    UNREADY,
    Asked,
    Begin,
    Done,
    Introduce,
    Introduction,
    Over,
    Ready,
    Unready,
    decode_asked,
)
from baffle.network.keys import ClientKeys
from baffle.network.link.limits import PLAN_BYTES, most_request_bytes
from baffle.network.policy import Policy
from baffle.network.same_plan import differences, for_roster
from baffle.plan import Plan, check, parse, read_toml, settings_of
from baffle.schedule import policy_of
from baffle.trajectory import Trajectory, trajectory_of

NEEDS_WORK = {"request", "masked-request"}
"""The types of messages that a client needs its samples and its model to answer."""

Equip = Callable[[Plan, int], Worker]
"""A plan, and how many of its directions this client evaluates → the worker that computes for it."""

CountSamples = Callable[[Plan], int]
"""A plan → how many samples this client has for it."""


class FrozenMember(Message, frozen=True, tag="frozen-member"):
    """What a client of a run must keep between two messages."""

    begun: Begin
    weights: Number
    session: bytes | None
    replica: bytes


@dataclass
class Member:
    """One client of a network. Its folder holds, for each run, what it must not forget: its marks and its replica.
    Without a folder it remembers them only in memory, or for as long as its caller keeps what `frozen` returns.

    It takes part within its `policy`; without one, within the default. With a `pinned` plan it takes part in no other,
    and without a policy beside it the plan stands for what it fixes.

    `tell` is its own log: it gets the whole reason of everything that it refuses or cannot do. The server learns none.
    """

    keys: ClientKeys
    folder: Path | None
    samples: CountSamples
    equip: Equip
    affords: int = 0
    pinned: Plan | None = None
    tell: Tell = lambda _words: None
    policy: Policy | None = None
    over: bool = False
    """Whether its run has ended."""
    _begun: Begin | None = field(default=None, repr=False)
    _client: Client | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self._tell_sparingly = Sparingly(lambda words: self.tell(words))

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
        if self._client is None:
            return PLAN_BYTES
        trajectory = self._client.replica.trajectory
        return most_request_bytes(len(self.keys.roster.clients), trajectory.n, contribution_bytes(trajectory))

    def frozen(self) -> bytes:
        """Everything that another member needs to continue in place of this one. It contains secrets: keep it in
        memory only."""
        if self._client is None or self._begun is None:
            return b""
        session = self._client.session
        return encode(
            FrozenMember(
                self._begun,
                self._client.replica.trajectory.n,
                session.frozen() if session else None,
                self._client.replica.frozen(),
            )
        )

    def thaw(self, frozen: bytes, *, idle: bool) -> None:
        """Continue in place of another member. With `idle`, load neither samples nor a model: that saves time if the
        next message does not need them."""
        if frozen:
            known = decode(frozen, FrozenMember)
            plan = parse(known.begun.plan)
            if idle:
                self._take_part(known.begun, trajectory_of(plan, known.weights), None, known)
            else:
                worker = self.equip(plan, known.begun.tiers[self.keys.number])
                self._take_part(known.begun, worker.trajectory, worker, known)

    def close(self) -> None:
        """Save the replica, so that a restarted client can continue from it."""
        try:
            if self._client:
                self._client.replica.save()
        except RunFolderError as fault:
            self.tell(f"the weights are not saved: {fault}")

    def _answer_round(self, data: bytes) -> bytes:
        if self._client is None:
            return UNREADY
        reply = self._client.answer(data)
        return UNREADY if self._lost_its_way(self._client.replica) else reply

    def _lost_its_way(self, replica: Replica) -> bool:
        """Whether the weights of this client turned out to differ from the server's. If so it forgets them. When it
        introduces itself again, the server sends it the whole state."""
        if not replica.astray:
            return False
        self._tell_sparingly("this client's weights are not the server's; it asks for them whole")
        replica.forget()
        return True

    def _answer(self, asked: Asked) -> Message:
        match asked:
            case Introduce():
                plan = self._offered(asked)
                self._require_acceptable(plan)
                samples = self.samples(plan)
                self._require_acceptable(plan, samples)
                held, answered = self._holds(asked.run) + 1, self._marks(asked.run).slot + 1
                return Introduction(samples, self.affords, held, answered)
            case Begin():
                self._begin(asked)
                assert self._client is not None
                return Ready(self._client.replica.trajectory.digest)
            case Over():
                return self._end(asked.request)

    def _end(self, last: RoundRequest) -> Message:
        if self._client is None:
            return Unready()
        replica = self._client.replica
        try:
            replica.weights_for(last)
        except MessageError:
            if not self._lost_its_way(replica):
                raise
            return Unready()
        replica.save()
        self.over = True
        return Done(last.weights_hash)

    def _begin(self, asked: Begin) -> None:
        plan = self._offered(asked)
        self._require_acceptable(plan)
        number, roster = self.keys.number, self.keys.roster
        if len(asked.tiers) != len(roster.clients):
            raise RefusalError(f"{len(asked.tiers)} tiers, but the roster has {len(roster.clients)} clients")
        if self.affords and asked.tiers[number] > self.affords:
            raise RefusalError(f"{asked.tiers[number]} directions a round, but this client affords {self.affords}")
        if plan.secure.mode != "off":
            self._require_marks(asked)
        if self._client and self._in(asked.run) and self._client.replica.trajectory.digest == plan.trajectory_digest():
            self._go_on(self._client, asked, plan)
            return
        worker = self.equip(plan, asked.tiers[number])
        self._require_acceptable(plan, len(worker.indices))
        replica = self._take_part(asked, worker.trajectory, worker).replica
        at = f", from round {replica.round + 1} on" if replica.round >= 0 else ""
        self.tell(f"takes part in {one_line(plan.name, 80)!r} as client {number} of {len(roster.clients)}{at}")

    def _require_marks(self, asked: Begin) -> None:
        """Refuse to go on without the marks of a round that this client contributed to: they are on its disk before
        anything is sent. A server that lies about it only loses this client."""
        if self._marks(asked.run).slot + 1 < asked.answered:
            raise RefusalError(
                f"this client contributed to round {asked.answered - 1}, but its state folder has no mark of it, so it "
                "was lost or is an older copy; without its marks it could be asked twice: put the right folder back, "
                "or wait for the next run"
            )

    def _go_on(self, client: Client, asked: Begin, plan: Plan) -> None:
        """The server repeats itself, or the run has another number of rounds now. A new session would lose keys that
        the other clients still rely on."""
        assert self._begun is not None
        trajectory = client.replica.trajectory
        if plan.secure != trajectory.plan.secure or asked.tiers != self._begun.tiers:
            raise RefusalError("other secure.* settings or tiers than before, but a run keeps them to its end")
        longer = replace(trajectory, plan=msgspec.structs.replace(trajectory.plan, rounds=plan.rounds))
        if client.session:
            client.session.go_on_under(policy_of(longer, dict(enumerate(asked.tiers))))
        self._begun = msgspec.structs.replace(self._begun, plan=longer.plan.to_toml())

    def _take_part(
        self, begun: Begin, trajectory: Trajectory, worker: Worker | None, known: FrozenMember | None = None
    ) -> Client:
        """Become a client of the run: a new one, or one that takes over what another member froze."""
        number, folder = self.keys.number, self._folder(begun.run)
        session = None
        if trajectory.plan.secure.mode != "off":
            marks = MarksFile(folder / MARKS) if folder else None
            session = ClientSession(
                number,
                self.keys.identity,
                self.keys.roster.directory(),
                begun.run,
                policy_of(trajectory, dict(enumerate(begun.tiers))),
                marks=marks.marks if marks else None,
                remember=marks.remember if marks else lambda _marks: None,
                frozen=known.session if known else None,
            )
        replica = Replica(trajectory, folder / "replica" if folder else None)
        if known:
            replica.thaw(known.replica)
        self._client = Client(replica, worker, session, self._tell_sparingly)
        self._begun = msgspec.structs.replace(begun, plan=trajectory.plan.to_toml())  # the plan as resolved
        return self._client

    def _in(self, run: bytes) -> bool:
        return self._begun is not None and self._begun.run == run

    def _offered(self, asked: Introduce | Begin) -> Plan:
        """The plan that a server offers. Some checks of a plan take time that grows with its number of clients, so
        that is compared first."""
        try:
            plan = settings_of(read_toml(asked.plan, "the server's plan"), Plan)
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

    def _holds(self, run: bytes) -> int:
        """The round of a run whose weights this client holds or has saved; −1 for none. The plan may not be settled
        yet, so the saved state itself is not unpacked."""
        if self._client and self._in(run):
            return self._client.replica.round
        folder = self._folder(run)
        return Replica.round_in(folder / "replica") if folder else -1

    def _marks(self, run: bytes) -> Marks:
        """What this client remembers of a run."""
        if self._client and self._in(run):
            return self._client.session.marks if self._client.session else Marks()
        folder = self._folder(run)
        return MarksFile(folder / MARKS).marks if folder else Marks()

    def _folder(self, run: bytes) -> Path | None:
        if self.folder is None:
            return None
        folder = self.folder / run.hex()[:16]
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as fault:
            raise RunFolderError(f"{folder} cannot be used: {fault.strerror or fault}") from None
        return folder
