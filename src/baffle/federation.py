"""All clients of a run in one process: their workers, the sum of their replies, and the exchange with them."""

import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from baffle.aggregation.client.peers import reader
from baffle.aggregation.client.session import ClientSession
from baffle.aggregation.client_policy import ClientPolicy
from baffle.aggregation.plain import PlainSum
from baffle.aggregation.server.secure_sum import SecureSum
from baffle.client.client import Client
from baffle.client.replica import Replica
from baffle.client.worker import BorrowRuntime, Compute, IsAway, Stack, Worker
from baffle.core.arrays import F32
from baffle.core.messages import RoundRequest
from baffle.core.ports import Aggregation, Collected, Transport
from baffle.core.ring import RingVector
from baffle.core.state import Present
from baffle.core.update import State
from baffle.errors import ABSTAINED
from baffle.lineage import Lineage
from baffle.plan.privacy import least_survivors
from baffle.privacy.skellam import Randomness
from baffle.schedule import policy_of
from baffle.server.downlink import Downlink
from baffle.task.load import Task
from baffle.trajectory import Trajectory

RandomnessOf = Callable[[int], Randomness]  # a client's number → the source of its noise
Sums = tuple[Aggregation, Mapping[int, ClientSession]]
"""How replies become a sum, and each client's side of a secure one."""


def system_randomness(_: int) -> Randomness:
    """The operating system's randomness, for every client."""
    return os.urandom


class AwayError(Exception):
    """A client that does not answer in a round. No reply leaves it, not even an abstention."""


@dataclass(frozen=True)
class _Place:
    """Computes a client's contributions, but only in the rounds in which it is not away."""

    number: int
    compute: Compute
    is_away: IsAway

    def vector(self, round_number: int, weights: F32, optimizer: State) -> RingVector:
        if self.is_away(round_number, self.number):
            raise AwayError
        return self.compute(round_number, weights, optimizer)


@dataclass
class Federation:
    """The clients of a run: the transport to them, and the aggregation of their replies.

    The pool's threads answer for the clients. A server in a network never learns why a client abstains; the records of
    these rounds say why.
    """

    pool: ThreadPoolExecutor
    sums: Aggregation
    sessions: Mapping[int, ClientSession]
    is_away: IsAway
    clients: dict[int, Client] = field(default_factory=dict)
    _reasons: dict[int, list[str]] = field(default_factory=dict)

    def enter(
        self, lineage: Lineage, present: Present, workers: list[Worker], downlink: Downlink, stack: Stack | None = None
    ) -> None:
        """Make the clients anew, at the present of a lineage. They share one replica: their weights are identical."""
        replica = Replica(lineage, present)
        for number, worker in enumerate(workers):
            tell = self._reasons.setdefault(number, []).append
            place = _Place(number, partial(stack.vector, number) if stack else worker.vector, self.is_away)
            self.clients[number] = Client(replica, place, self.sessions.get(number), tell)
            downlink.holds(number, present.round)

    def exchange(self, requests: Mapping[int, bytes]) -> Mapping[int, bytes]:
        """The replies, in the order of the requests. Clients that are away are missing."""
        answers = self.pool.map(self._answer, requests.keys(), requests.values())
        return {client: reply for client, reply in zip(requests, answers, strict=True) if reply is not None}

    def _answer(self, client: int, request: bytes) -> bytes | None:
        try:
            return self.clients[client].answer(request)
        except AwayError:
            return None

    def collect(self, groups: Sequence[Mapping[int, RoundRequest]], transport: Transport) -> Collected:
        """The sums of the groups, with the clients' own reasons in place of their abstentions."""
        for reasons in self._reasons.values():
            reasons.clear()
        return with_reasons(self.sums.collect(groups, transport), self._reasons)

    def forget(self, client: int) -> None:
        self.sums.forget(client)


def with_reasons(collected: Collected, reasons: Mapping[int, Sequence[str]]) -> Collected:
    """A round's end with the clients' own reasons, in order, in place of their abstentions."""
    told = {client: iter(own) for client, own in reasons.items()}
    refusals = [
        (client, next(told[client], why) if why == ABSTAINED and client in told else why)
        for client, why in collected.refusals
    ]
    first = dict(reversed(refusals))
    events = {client: first[client] if event == ABSTAINED else event for client, event in collected.events.items()}
    return collected._replace(events=events, refusals=refusals)


@contextmanager
def federation(
    threads: int,
    sums: Sums,
    is_away: IsAway = lambda _round, _client: False,
) -> Iterator[Federation]:
    """A federation that no client has entered yet, with so many threads."""
    with ThreadPoolExecutor(threads, thread_name_prefix="client") as pool:
        yield Federation(pool, *sums, is_away)


def workers_of(
    task: Task,
    trajectory: Trajectory,
    borrow: BorrowRuntime,
    tiers: Sequence[int] | None = None,
    randomness: RandomnessOf = system_randomness,
    passed: Callable[[int], None] = lambda _passes: None,
) -> list[Worker]:
    """What computes each client's contributions, with the tiers of the task if no others are given."""
    derivatives = task.plan.run.derivatives
    return [
        Worker(
            number,
            k,
            trajectory,
            task.source.train,
            share,
            borrow,
            randomness(number),
            passed=passed,
            derivatives=derivatives,
        )
        for number, (k, share) in enumerate(zip(task.tiers if tiers is None else tiers, task.shares, strict=True))
    ]


def sums_of(trajectory: Trajectory, task: Task) -> Sums:
    """The sums that a plan asks for, plain or secure."""
    plan = trajectory.plan
    if plan.secure.mode == "off":
        return PlainSum(trajectory.ring, trajectory.length, least_survivors(plan) if plan.privacy.on else 1), {}
    tiers = dict(enumerate(task.tiers))
    return secure_sums(trajectory, range(plan.federation.clients), lambda run: policy_of(trajectory, tiers, run))


def secure_sums(
    trajectory: Trajectory, clients: Iterable[int], policy_for: Callable[[bytes], ClientPolicy]
) -> tuple[SecureSum, dict[int, ClientSession]]:
    """A secure sum over these clients, and their sessions. The run's name and the identities are new in every process;
    `policy_for` gets the name."""
    run = secrets.token_bytes(32)
    policy = policy_for(run)
    identities = {number: Ed25519PrivateKey.generate() for number in clients}
    directory = {number: identity.public_key().public_bytes_raw() for number, identity in identities.items()}
    read_keys = lru_cache(maxsize=4096)(reader(directory, run))
    sessions = {
        number: ClientSession(number, identity, directory, run, policy, read_keys=read_keys)
        for number, identity in identities.items()
    }
    return SecureSum(trajectory.ring, trajectory.length, run, directory, policy), sessions
