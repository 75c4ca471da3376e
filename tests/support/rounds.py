"""Rounds of secure sums over a network that fails on purpose."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np

from baffle.aggregation.client_policy import ClientPolicy
from baffle.aggregation.messages import decode_request, phase_of
from baffle.aggregation.server.crash_record import CrashFile
from baffle.aggregation.server.secure_sum import SecureSum
from baffle.client.client import Client
from baffle.client.replica import Held, Replica
from baffle.core.arrays import F32
from baffle.core.messages import RoundRequest
from baffle.core.ports import Collected
from baffle.core.ring import EXTRAS, Ring, RingVector, Sum, add
from baffle.core.update import State
from baffle.federation import with_reasons
from tests.support.federation import LENGTH, Federation, about

Spoil = Callable[[int, str, bytes], bytes | None]


@dataclass(frozen=True)
class Computes:
    """A client's worker, and its replica of weights that nobody looks at."""

    vector: Callable[[int, F32, State], RingVector]

    def held_for(self, _request: RoundRequest) -> Held:
        return Held(np.zeros(1, np.float32), ())


@dataclass
class Network:
    """Carries messages to clients. `deaf` loses requests; `spoil` changes replies, or with none loses them."""

    federation: Federation
    ring: Ring
    deaf: Callable[[int, str], bool] = lambda _client, _phase: False
    spoil: Spoil = lambda _client, _phase, data: data
    tell: Callable[[int, str], None] = lambda _client, _why: None
    exchanges: list[dict[int, str]] = field(default_factory=list)
    plain: dict[tuple[int, int], RingVector] = field(default_factory=dict)
    up: dict[int, int] = field(default_factory=dict)
    down: dict[int, int] = field(default_factory=dict)

    def exchange(self, requests: Mapping[int, bytes]) -> Mapping[int, bytes]:
        self.exchanges.append({client: phase_of(decode_request(data)) for client, data in requests.items()})
        replies: dict[int, bytes] = {}
        for client, data in requests.items():
            self.down[client] = self.down.get(client, 0) + len(data)
            phase = phase_of(decode_request(data))
            if self.deaf(client, phase):
                continue
            reply = self.spoil(client, phase, self._client(client).answer(data))
            if reply is not None:
                replies[client] = reply
                self.up[client] = self.up.get(client, 0) + len(reply)
        return replies

    def _client(self, number: int) -> Client:
        computes = Computes(lambda round_number, _weights, _optimizer: self._vector(number, round_number))
        session = self.federation.sessions[number]
        return Client(cast(Replica, computes), computes, session, lambda words: self.tell(number, words))

    def _vector(self, client: int, round_number: int) -> RingVector:
        values = np.random.default_rng([client, round_number]).normal(size=LENGTH)
        vector = self.ring.encode(values, LENGTH, 1 + client, 0.5)
        self.plain[round_number, client] = vector
        return vector


@dataclass
class MemoryStore:
    """A crash record in memory that outlives its server."""

    data: bytes | None = None

    def write(self, record: bytes) -> None:
        self.data = record

    def read(self) -> bytes | None:
        return self.data


class Rounds:
    """Secure sums over a network, round after round."""

    def __init__(
        self,
        n: int,
        *,
        participants: Callable[[int], Sequence[int]] | None = None,
        groups: Callable[[int], Sequence[Sequence[int]]] | None = None,
        floor: int = 2,
        threshold: int = 0,
        agreement: bool = False,
        crash_store: MemoryStore | None = None,
    ) -> None:
        self.participants = participants or (lambda _: range(n))
        self.groups = groups or (lambda number: [list(self.participants(number))])
        self.policy = ClientPolicy(floor, threshold, agreement, groups_of=lambda number: self.groups(number))
        self.federation = Federation(n, policy=self.policy)
        self.ring = Ring(clients=n, n_max=2 * n, clip=4.0)
        self.network = Network(self.federation, self.ring)
        self.crash_store = crash_store
        self.sum = self.new_server()

    def new_server(self) -> SecureSum:
        """A server that has just been started: only the crash store outlives it."""
        federation = self.federation
        store = cast(CrashFile | None, self.crash_store)
        return SecureSum(self.ring, LENGTH, federation.run, federation.directory, self.policy, store)

    def play(self, number: int, request: RoundRequest | None = None) -> tuple[Sum | None, dict[int, str]]:
        """One round of one group."""
        collected = self.play_groups(number, request)
        (total,) = collected.sums
        return total, dict(collected.events)

    def play_groups(self, number: int, request: RoundRequest | None = None) -> Collected:
        """Play one round, and require every sum to be the plain sum over exactly the clients that contributed. The
        record says why clients abstained, as in a simulation."""
        before, groups, asked = len(self.network.exchanges), self.groups(number), request or about(number)
        self.network.up, self.network.down = {}, {}
        reasons: dict[int, list[str]] = {}
        self.network.tell = lambda client, why: reasons.setdefault(client, []).append(why)
        silent = self.sum.collect([dict.fromkeys(group, asked) for group in groups], self.network)
        collected = with_reasons(silent, reasons)
        self.exchanges = self.network.exchanges[before:]
        assert collected.events.keys() == {client for group in groups for client in group}
        assert dict(collected.uplink) == self.network.up
        assert dict(collected.downlink) == self.network.down
        assert len(collected.sums) == len(groups)
        for group, total in zip(groups, collected.sums, strict=True):
            contributed = [client for client in group if collected.events[client] == "contributed"]
            if total is None:
                assert not contributed
                continue
            plain = add([self.network.plain[number, client] for client in contributed])
            self.require_same(total, self.ring.decode(plain, len(contributed)))
            assert len(plain) == LENGTH + EXTRAS
        return collected

    @staticmethod
    def require_same(one: Sum, other: Sum) -> None:
        assert np.array_equal(one.totals, other.totals)
        assert one[1:] == other[1:]
