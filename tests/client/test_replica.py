"""A client's weights: every kind of catch-up gives the server's bits, and everything else is refused."""

import os
import stat
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import pytest

from baffle.client.replica import Replica, read_saved
from baffle.core.arrays import F32
from baffle.core.messages import CatchUp, Group, Outcome, RoundRequest, encode
from baffle.core.state import Present, ServerState, chain_epoch, chain_start, pack
from baffle.errors import BaffleError, MessageError
from baffle.lineage import Lineage
from baffle.plan import Plan
from baffle.trajectory import Epoch, Trajectory, trajectory_of
from tests.support.memory import at_most

MakePlan = Callable[..., Plan]

N = 9
FIRST = 3  # the round with which the second epoch of a networked run begins

RUNS = b"a" * 32, b"b" * 32
BEYOND = Group(2, (2**30).to_bytes(4, "little") + bytes(12), 30)


@pytest.fixture
def trajectory(tiny: MakePlan) -> Trajectory:
    return trajectory_of(tiny("ring.n_max=20"), N)


class Server:
    """The states of a few rounds, and requests about them. A networked run has two epochs."""

    def __init__(self, trajectory: Trajectory, rounds: int = 6, *, networked: bool = False) -> None:
        self.trajectory = trajectory
        self.lineage = Lineage(trajectory)
        state = trajectory.rule.start(np.linspace(-1, 1, N, dtype=np.float32))
        if networked:
            self.lineage = self.lineage.in_epoch(Epoch(0, b"s" * 32, RUNS[0], chain_start(trajectory.digest, state)))
        self.presents = [self.lineage.beginning(state)]
        self.before: list[bytes] = [b""]  # the hash of the chain before a round, without the links of epochs
        self.outcomes: list[bytes] = []
        for number in range(rounds):
            totals = np.random.default_rng(number).integers(-1000, 1000, 4).astype("<i4").tobytes()
            self.outcomes.append(encode(Outcome(number, "scalars", (Group(number, totals, 30),))))
            present = self.lineage.advance(self.presents[-1], self.outcomes[-1])
            self.before.append(present.chain)
            if networked and present.round == FIRST:
                self.lineage = self.lineage.in_epoch(Epoch(FIRST, b"t" * 32, RUNS[1], present.chain))
                present = Present(FIRST, present.state, chain_epoch(present.chain, RUNS[1]))
            self.presents.append(present)

    @property
    def states(self) -> list[ServerState]:
        return [present.state for present in self.presents]

    def replica(self, at: int = 0, file: Path | None = None) -> Replica:
        return Replica(self.lineage, self.presents[at], file)

    def request(self, number: int, catch_up: CatchUp) -> RoundRequest:
        present = self.presents[number]
        return RoundRequest(number, self.trajectory.digest, present.chain, present.state.weights_hash(), catch_up)

    def proof(self) -> tuple[bytes, bytes, bytes]:
        return pack(self.states[FIRST]), self.presents[FIRST - 1].chain, self.outcomes[FIRST - 1]

    def snapshot(self, number: int) -> RoundRequest:
        """The state with which the epoch begins, and the outcomes since."""
        return self.request(number, CatchUp("snapshot", FIRST, (*self.proof(), *self.outcomes[FIRST:number])))

    def replay(self, since: int, number: int) -> RoundRequest:
        return self.request(number, CatchUp("outcomes", since, tuple(self.outcomes[since:number])))

    def hashed(self, since: int, number: int, lies: dict[int, bytes] | None = None) -> RoundRequest:
        """Outcomes with the hashes of the states between them, some of which may be lies."""
        items = list[bytes]()
        for before in range(since, number):
            items += [self.outcomes[before], (lies or {}).get(before, self.states[before + 1].digest())]
        return self.request(number, CatchUp("hashed", since, tuple(items[:-1])))

    def weights(self, number: int) -> RoundRequest:
        return self.request(number, CatchUp("weights", number, (self.states[number].weights.tobytes(),)))

    def delta(self, since: int, number: int) -> RoundRequest:
        before, after = self.states[since].weights.view(np.uint32), self.states[number].weights.view(np.uint32)
        return self.request(number, CatchUp("delta", since, ((after - before).tobytes(),)))

    def catch_up(self, kind: str, since: int, number: int) -> CatchUp:
        """The catch-up of one kind that leads from one round to another."""
        if kind == "weights":
            return self.weights(number).catch_up
        return (self.replay if kind == "replay" else self.delta)(since, number).catch_up


@pytest.fixture
def server(trajectory: Trajectory) -> Server:
    return Server(trajectory)


@pytest.fixture
def sending(tiny: MakePlan) -> Server:
    """A server whose plan says that it sends weights, or their differences."""
    return Server(trajectory_of(tiny("ring.n_max=20", "run.downlink=delta"), N))


@pytest.fixture
def networked(trajectory: Trajectory) -> Server:
    return Server(trajectory, networked=True)


def _same(left: F32, right: F32) -> bool:
    return left.tobytes() == right.tobytes()


@pytest.mark.parametrize("stops", [[1, 2, 6], [6], [2, 6], [1, 4, 5]])
@pytest.mark.parametrize("kind", ["server", "networked"])
def test_outcomes_with_the_hashes_between_them_give_the_servers_bits(
    kind: str, request: pytest.FixtureRequest, stops: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client hashes only the last state itself, and the one with which an epoch begins."""
    server: Server = request.getfixturevalue(kind)
    replica, at, digest, hashed = server.replica(), 0, ServerState.digest, list[bytes]()
    requests = [server.hashed(since, number) for since, number in pairwise([0, *stops])]
    requests.append(server.hashed(0, 6))  # what it has already is not replayed twice
    plain = server.replica()
    for asked in (server.replay(0, stops[0]), server.replay(0, 6)):
        assert _same(plain.weights_for(asked), server.states[asked.round].weights)
        assert plain.chain == server.presents[asked.round].chain

    def counted(state: ServerState) -> bytes:
        hashed.append(digest(state))
        return hashed[-1]

    monkeypatch.setattr(ServerState, "digest", counted)
    for asked in requests:
        hashed.clear()
        assert _same(replica.weights_for(asked), server.states[asked.round].weights)
        assert replica.chain == server.presents[asked.round].chain
        assert len(hashed) == (asked.round > at) + (kind == "networked" and at < FIRST < asked.round)
        at = max(at, asked.round)


@pytest.mark.parametrize("at", [0, FIRST - 1, 4])
@pytest.mark.parametrize("kind", ["server", "networked"])
def test_a_lie_about_a_state_between_is_noticed(kind: str, request: pytest.FixtureRequest, at: int) -> None:
    """The hash of the chain is that of the true states, and a client's own last state must be in it."""
    server: Server = request.getfixturevalue(kind)
    lie = b"a lie".ljust(32, b".")
    replica = server.replica()
    if kind == "networked" and at == FIRST - 1:
        replica.weights_for(server.hashed(0, 6, {at: lie}))  # an epoch begins with this state, so the client hashes it
        return
    with pytest.raises(MessageError):
        replica.weights_for(server.hashed(0, 6, {at: lie}))
    assert replica.diverged
    assert (replica.round, replica.chain) == (0, server.presents[0].chain)
    assert _same(replica.weights_for(server.hashed(0, 6, {3: b""})), server.states[6].weights)


def test_where_the_server_may_lie_a_client_hashes_every_state(tiny: MakePlan) -> None:
    """Otherwise a lie about a round that no client saw would lead to a chain that no auditor can follow."""
    for mode, taken in (("on", True), ("malicious-server", False)):
        server = Server(trajectory_of(tiny("ring.n_max=20", f"secure.mode={mode}"), N))
        present, lie = server.presents[0], bytes(32)
        for number, outcome in enumerate(server.outcomes):
            present = server.lineage.advance(present, outcome, lie if number == 2 else b"")
        request = server.hashed(0, 6, {2: lie})
        forged = RoundRequest(6, request.trajectory, present.chain, request.weights_hash, request.catch_up)
        replica = server.replica()
        if taken:
            assert _same(replica.weights_for(forged), server.states[6].weights)
        else:
            with pytest.raises(MessageError, match="are not the ones"):
                replica.weights_for(forged)
        assert _same(server.replica().weights_for(server.hashed(0, 6)), server.states[6].weights)


def test_a_difference_of_bit_patterns_knows_no_rounding(sending: Server) -> None:
    server = sending
    odd = np.array([0, -0.0, 1e-45, -1e-45, 3e38, np.inf, -np.inf, 1e-30, 1], np.float32)
    server.presents[2] = replace(server.presents[2], state=replace(server.states[2], weights=odd))
    replica = server.replica()
    replica.weights_for(server.weights(1))
    assert _same(replica.weights_for(server.delta(1, 2)), odd)
    assert _same(replica.weights_for(server.delta(2, 3)), server.states[3].weights)


@pytest.mark.parametrize(("held", "number"), [(0, FIRST), (2, 6)])
def test_the_state_that_an_epoch_begins_with_is_taken_if_it_leads_to_the_statement(
    networked: Server, held: int, number: int
) -> None:
    replica = networked.replica(held)
    assert _same(replica.weights_for(networked.snapshot(number)), networked.states[number].weights)
    assert replica.chain == networked.presents[number].chain


def test_a_state_is_taken_only_where_snapshots_are(networked: Server) -> None:
    """A client that has held a replica of the run never takes a state without a certificate."""
    replica = Replica(networked.lineage, networked.presents[0], snapshots=False)
    with pytest.raises(MessageError, match="a state that no certificate vouches for"):
        replica.weights_for(networked.snapshot(FIRST))
    assert _same(replica.weights_for(networked.replay(0, 6)), networked.states[6].weights)


def test_any_other_state_is_refused(networked: Server, server: Server) -> None:
    """A state that differs by one bit, whatever the server says about it; and any state in the middle of an epoch."""
    state, before, outcome = networked.proof()
    weights = networked.states[FIRST].weights.copy()
    weights[4] = np.nextafter(weights[4], np.float32(9))
    shifted = replace(networked.states[FIRST], weights=weights)
    lies = [
        (pack(shifted), before, outcome),
        (state, bytes(32), outcome),
        (state, before, networked.outcomes[0]),
        (state, before),
        (b"noise", before, outcome),
    ]
    for lie in lies:
        replica = networked.replica()
        request = networked.request(FIRST, CatchUp("snapshot", FIRST, lie))
        about_it = RoundRequest(FIRST, request.trajectory, request.chain, shifted.weights_hash(), request.catch_up)
        for asked in (request, about_it):
            with pytest.raises(MessageError):
                replica.weights_for(asked)
            assert replica.diverged
    middle = networked.request(4, CatchUp("snapshot", 4, (pack(networked.states[4]), before, outcome)))
    with pytest.raises(MessageError, match="nothing proves"):
        networked.replica().weights_for(middle)
    with pytest.raises(MessageError, match="nothing proves"):
        server.replica().weights_for(server.request(4, CatchUp("snapshot", 4, (pack(server.states[4]), b"", b""))))


def test_a_client_that_is_told_another_past_refuses(networked: Server) -> None:
    """The right weights after other rounds: another chain, so other masks."""
    for number in (1, 4):
        request = networked.replay(0, number)
        other = RoundRequest(number, request.trajectory, bytes(32), request.weights_hash, request.catch_up)
        with pytest.raises(MessageError, match="are not the ones"):
            networked.replica().weights_for(other)
        replica = networked.replica()
        replica.weights_for(request)
        with pytest.raises(MessageError):  # also at weights that it holds already
            replica.weights_for(other)


def skipped(number: int) -> bytes:
    return encode(Outcome(number, "skipped", ()))


MALFORMED: dict[str, CatchUp] = {
    "no item": CatchUp("snapshot", 3, ()),
    "two items": CatchUp("weights", 3, (bytes(4 * N), bytes(4 * N))),
    "weights too short": CatchUp("weights", 3, (bytes(4 * N - 4),)),
    "delta of broken numbers": CatchUp("delta", 2, (bytes(4 * N - 1),)),
    "delta from another round": CatchUp("delta", 1, (bytes(4 * N),)),
    "snapshot of noise": CatchUp("snapshot", 3, (b"noise", bytes(32), b"")),
    "outcomes of noise": CatchUp("outcomes", 2, (b"noise",)),
    "outcomes from the future": CatchUp("outcomes", 3, (skipped(3),)),
    "more than the clients can send": CatchUp("outcomes", 2, (encode(Outcome(2, "scalars", (BEYOND,))),)),
    "no outcomes": CatchUp("outcomes", 2, ()),
    "a hash behind the last": CatchUp("hashed", 2, (skipped(2), bytes(32))),
    "a short hash": CatchUp("hashed", 1, (skipped(1), b"hash", skipped(2))),
}


@pytest.mark.parametrize("kind", ["server", "sending", "networked"])
def test_a_malformed_or_wrong_catch_up_is_refused_and_does_no_harm(kind: str, request: pytest.FixtureRequest) -> None:
    server: Server = request.getfixturevalue(kind)
    replica = server.replica(2)
    wrong = {each: server.catch_up(each, 2, 4) for each in ("weights", "replay", "delta")}
    for catch_up in (MALFORMED | wrong).values():
        with pytest.raises(MessageError):
            replica.weights_for(server.request(3, catch_up))
    for each in ("weights", "delta") if kind != "sending" else ():
        with pytest.raises(MessageError, match=f"a catch-up by {each}, but in this run clients apply outcomes"):
            replica.weights_for(server.request(3, server.catch_up(each, 2, 3)))
        assert not replica.diverged
    right = server.replay(2, 3)
    with pytest.raises(MessageError, match="another plan"):
        replica.weights_for(RoundRequest(3, bytes(32), right.chain, right.weights_hash, right.catch_up))
    with pytest.raises(MessageError, match="round 3: this client's weights"):
        replica.weights_for(RoundRequest(3, right.trajectory, right.chain, bytes(32), right.catch_up))
    assert _same(replica.weights_for(right), server.states[3].weights)


@pytest.mark.parametrize("kind", ["replay", "weights", "delta"])
def test_a_thawed_replica_continues_from_any_round(sending: Server, kind: str) -> None:
    server = sending
    replica = server.replica()
    for number in range(7):
        other = Replica.thawed(server.lineage, replica.frozen())
        assert (other.round, other.frozen()) == (replica.round, replica.frozen())
        replica, since = other, max(0, number - 1)
        if kind == "replay":
            request = server.replay(since, number)
        else:
            request = server.delta(since, number) if number and kind == "delta" else server.weights(number)
        assert _same(replica.weights_for(request), server.states[number].weights)


@pytest.mark.parametrize("at", [0, FIRST - 1, FIRST])
def test_a_replica_goes_on_in_the_next_epoch(networked: Server, at: int) -> None:
    """Also one that was saved when the next epoch was not known, at the very round that it begins with."""
    one_epoch = Lineage(networked.trajectory.with_epochs(networked.lineage.epochs[:1]))
    present = networked.presents[at]
    before = Present(at, present.state, networked.before[at] if at == FIRST else present.chain)
    replica = Replica(one_epoch, before).in_epoch(networked.lineage)
    assert replica.chain == present.chain
    assert _same(replica.weights_for(networked.replay(at, 6)), networked.states[6].weights)


def test_a_saved_replica_is_used_in_its_own_run_alone(networked: Server, tmp_path: Path) -> None:
    file = tmp_path / "replica"
    replica = networked.replica(0, file)
    replica.weights_for(networked.replay(0, 4))
    before = os.umask(0)
    replica.save()
    os.umask(before)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert read_saved(file, networked.trajectory).round == 4
    assert networked.replica(0, file).round == 4
    other = Lineage(networked.trajectory).in_epoch(Epoch(0, b"s" * 32, b"c" * 32))
    assert Replica(other, networked.presents[0], file).round == 0
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    assert networked.replica(0, file).round == 0


HOSTILE = [
    b"",
    b"\xdd\xff\xff\xff\xff",
    b"\x96\xc6\xff\xff\xff\xff",
    b"\x91" * 100_000,
    msgspec.msgpack.encode(("text", b"", 1, b"", b"")),
]


@pytest.mark.parametrize("kind", ["server", "networked"])
def test_a_saved_replica_that_is_of_no_use_is_forgotten(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """A client can begin again by itself, and apply the outcomes again."""
    server: Server = request.getfixturevalue(kind)
    file, run = tmp_path / "replica", RUNS[1] if kind == "networked" else b""
    useless = [
        msgspec.msgpack.encode((server.trajectory.digest, run, 4, server.presents[4].chain, state))
        for state in (b"", b"noise", b"\x91" * 10_000, pack(server.states[4])[:-1])
    ]
    for content in (b"", b"short", b"\x93" * 100, *(sha256(data).digest() + data for data in HOSTILE + useless)):
        file.write_bytes(content)
        with at_most(1 << 20):
            assert server.replica(1, file).round == 1
    os.truncate(file, 1 << 40)
    with at_most(1 << 20):
        assert server.replica(1, file).round == 1
    file.unlink()
    os.mkfifo(file)
    assert server.replica(1, file).round == 1


def test_what_was_frozen_under_another_plan_or_cut_off_is_refused(sending: Server, tiny: MakePlan) -> None:
    server, replica = sending, sending.replica()
    replica.weights_for(server.weights(1))
    with pytest.raises(MessageError, match="another plan"):
        Replica.thawed(Lineage(trajectory_of(tiny("ring.n_max=21"), N)), replica.frozen())
    with pytest.raises(BaffleError):
        Replica.thawed(server.lineage, replica.frozen()[:-1])
