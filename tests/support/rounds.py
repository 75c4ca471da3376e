"""Rounds of secure sums over a network that fails on purpose."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from baffle.aggregation.candid import CandidSum
from baffle.aggregation.client_policy import ClientPolicy
from baffle.aggregation.messages import (
    Agree,
    Hello,
    MaskedRequest,
    Request,
    Turn,
    decode_request,
)
from baffle.aggregation.server.secure_sum import SecureSum
from baffle.client.abstaining import abstention
from baffle.core.messages import Contribution, Message, RoundRequest, encode
from baffle.core.ports import Collected
from baffle.core.ring import EXTRAS, Ring, RingVector, Sum, add
from baffle.errors import BaffleError, RefusalError
from tests.support.federation import LENGTH, Federation, about

Spoil = Callable[[int, str, bytes], bytes | None]


def phase_of(asked: Request) -> str:
    match asked:
        case Hello():
            return "hello"
        case MaskedRequest():
            return "vector"
        case Turn(unmask=None):
            return "seal"
        case Agree():
            return "agree"
        case _:
            return "unmask"


class Network:
    """Carries messages to sessions. `deaf` loses requests; `spoil` changes replies, or with none loses them."""

    def __init__(
        self,
        federation: Federation,
        ring: Ring,
        *,
        deaf: Callable[[int, str], bool] = lambda _client, _phase: False,
        spoil: Spoil = lambda _client, _phase, data: data,
    ) -> None:
        self.federation = federation
        self.ring = ring
        self.deaf = deaf
        self.spoil = spoil
        self.exchanges: list[dict[int, str]] = []
        self.tell: Callable[[int, str], None] = lambda _client, _why: None
        self.plain: dict[tuple[int, int], RingVector] = {}
        self.up: dict[int, int] = {}
        self.down: dict[int, int] = {}

    def exchange(self, requests: Mapping[int, bytes]) -> Mapping[int, bytes]:
        self.exchanges.append({client: phase_of(decode_request(data)) for client, data in requests.items()})
        replies: dict[int, bytes] = {}
        for client, data in requests.items():
            self.down[client] = self.down.get(client, 0) + len(data)
            phase = phase_of(decode_request(data))
            if self.deaf(client, phase):
                continue
            reply = self.spoil(client, phase, self._answer(client, data))
            if reply is not None:
                replies[client] = reply
                self.up[client] = self.up.get(client, 0) + len(reply)
        return replies

    def _answer(self, client: int, data: bytes) -> bytes:
        try:
            return encode(self._reply(client, decode_request(data)))
        except BaffleError as fault:
            self.tell(client, f"abstained: {fault}")
            return abstention(data)

    def _reply(self, client: int, asked: Request) -> Message:
        session = self.federation.sessions[client]
        match asked:
            case Hello():
                return session.advertise(asked.slot)
            case Agree():
                return session.agree(asked)
            case Turn():
                return session.turn(asked, lambda words: self.tell(client, words))
            case MaskedRequest():
                vector = session.mask(asked, lambda: self._vector(client, asked.request.round))
                return Contribution(asked.request.round, vector.tobytes())
            case _:
                raise RefusalError("a request without masks")

    def _vector(self, client: int, round_number: int) -> RingVector:
        values = np.random.default_rng([client, round_number]).normal(size=LENGTH)
        vector = self.ring.encode(values, LENGTH, 1 + client, 0.5)
        self.plain[round_number, client] = vector
        return vector


class MemoryStore:
    """A crash store that outlives its server."""

    def __init__(self) -> None:
        self.data: bytes | None = None

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
        return SecureSum(self.ring, LENGTH, federation.run, federation.directory, self.policy, self.crash_store)

    def play(self, number: int, request: RoundRequest | None = None) -> tuple[Sum | None, dict[int, str]]:
        """One round of one group."""
        collected = self.play_groups(number, request)
        (total,) = collected.sums
        return total, dict(collected.events)

    def play_groups(self, number: int, request: RoundRequest | None = None) -> Collected:
        """Play one round, and require every sum to be the plain sum over exactly the clients that contributed. The
        record says why clients abstained, as in a simulation."""
        before = len(self.network.exchanges)
        self.network.up = {}
        self.network.down = {}
        groups = self.groups(number)
        asked = request or about(number)
        candid = CandidSum(self.sum)
        self.network.tell = lambda client, why: candid.log_of(client)(why)
        collected = candid.collect([dict.fromkeys(group, asked) for group in groups], self.network)
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
