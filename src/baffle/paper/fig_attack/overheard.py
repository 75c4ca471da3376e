"""What a server sees of a round: each client's scalars, secure sums of them, or masked vectors."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from baffle.aggregation.client.session import ClientSession
from baffle.aggregation.client_policy import ClientPolicy
from baffle.aggregation.messages import Hello, MaskedRequest, Turn, decode_request
from baffle.aggregation.plain import PlainSum
from baffle.aggregation.server.secure_sum import SecureSum
from baffle.client.worker import Worker
from baffle.core.arrays import F32, F64, I64
from baffle.core.messages import CatchUp, Contribution, Message, RoundRequest, encode
from baffle.core.ring import EXTRAS, RingVector
from baffle.errors import RefusalError
from baffle.task.load import Runtimes, Task
from baffle.trajectory import Trajectory, trajectory_of

Group = tuple[list[int], F64]
"""The clients of a sum, and their mean scalars."""


@dataclass(frozen=True)
class Overheard:
    """One round of real clients. Each has its own batch; weights and directions are the same for all."""

    trajectory: Trajectory
    request: RoundRequest
    batches: Sequence[I64]
    vectors: Mapping[int, RingVector]  # each client's contribution, before masks

    def singly(self) -> list[Group]:
        """What the server reads without the secure sum: every client alone."""
        plain = PlainSum(self.trajectory.ring, self.trajectory.length)
        groups = [{client: self.request} for client in self.vectors]
        replies = {client: encode(_contribution(self.request, vector)) for client, vector in self.vectors.items()}
        sums = plain.collect(groups, Replies(replies)).sums
        return [([client], self._scalars(own.totals, own.weight)) for client, own in enumerate(sums) if own]

    def summed(self, size: int) -> tuple[list[Group], dict[int, RingVector]]:
        """What the server reads with secure sums over groups of this size, and the masked vectors that it receives on
        the way."""
        clients = list(self.vectors)
        groups = [clients[start : start + size] for start in range(0, len(clients) - size + 1, size)]
        policy = ClientPolicy(floor=min(3, size), groups_of=lambda _: groups)
        run = secrets.token_bytes(32)
        identities = {client: Ed25519PrivateKey.generate() for client in clients}
        directory = {client: identity.public_key().public_bytes_raw() for client, identity in identities.items()}
        sessions = {client: ClientSession(client, own, directory, run, policy) for client, own in identities.items()}
        tap = Tap(sessions, self.vectors)
        server = SecureSum(self.trajectory.ring, self.trajectory.length, run, directory, policy)
        sums = server.collect([dict.fromkeys(group, self.request) for group in groups], tap).sums
        collected = [(group, total) for group, total in zip(groups, sums, strict=True) if total]
        return [(group, self._scalars(total.totals, total.weight)) for group, total in collected], tap.masked

    def read(self, vector: RingVector) -> F64:
        """The scalars of a vector, read as if it were one client's plain contribution."""
        weight = self.trajectory.weight_of(len(self.batches[0]))
        return self._scalars(vector[:-EXTRAS].view(np.int32), weight)

    def _scalars(self, totals: np.ndarray[tuple[int], np.dtype[np.int32]], weight: int) -> F64:
        return totals / (self.trajectory.ring.scale * weight)


def overhear(task: Task, weights: F32, batches: Sequence[I64], number: int) -> Overheard:
    """Let one client for each batch answer the request of a round."""
    trajectory = trajectory_of(task.plan, len(weights))
    sent = weights.astype("<f4").tobytes()
    catch_up = CatchUp("weights", 0, (sent,))
    request = RoundRequest(number, trajectory.digest, bytes(32), sha256(sent).digest(), catch_up)
    runtimes, k, train = Runtimes(task, 1), task.plan.probe.k, task.source.train
    vectors = {
        client: Worker(client, k, trajectory, train, batch, runtimes.borrow).vector(number, weights)
        for client, batch in enumerate(batches)
    }
    return Overheard(trajectory, request, batches, vectors)


@dataclass(frozen=True)
class Replies:
    """A transport that already has the replies."""

    replies: Mapping[int, bytes]

    def exchange(self, requests: Mapping[int, bytes]) -> Mapping[int, bytes]:
        return {client: self.replies[client] for client in requests}


@dataclass(frozen=True)
class Tap:
    """A transport to clients whose vectors are already computed. It keeps the masked vectors that they send."""

    sessions: Mapping[int, ClientSession]
    vectors: Mapping[int, RingVector]
    masked: dict[int, RingVector] = field(default_factory=dict)

    def exchange(self, requests: Mapping[int, bytes]) -> Mapping[int, bytes]:
        return {client: encode(self._reply(client, data)) for client, data in requests.items()}

    def _reply(self, client: int, data: bytes) -> Message:
        session = self.sessions[client]
        match decode_request(data):
            case Hello() as request:
                return session.advertise(request.slot)
            case Turn() as request:
                return session.turn(request)
            case MaskedRequest() as request:
                self.masked[client] = session.mask(request, lambda: self.vectors[client])
                return _contribution(request.request, self.masked[client])
            case request:
                raise RefusalError(f"a {type(request).__name__} has no place in a secure sum that trusts its server")


def _contribution(request: RoundRequest, vector: RingVector) -> Contribution:
    return Contribution(request.round, vector.astype("<u4").tobytes())
