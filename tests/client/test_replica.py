"""A client's weights: every kind of catch-up gives the server's bits, and everything else is refused."""

import os
import stat
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import msgspec
import numpy as np
import pytest

from baffle.client.replica import Replica
from baffle.core.arrays import F32
from baffle.core.messages import CatchUp, Group, Outcome, RoundRequest, encode
from baffle.core.state import ServerState, apply, pack
from baffle.errors import BaffleError, MessageError
from baffle.plan import Plan
from baffle.trajectory import Trajectory, trajectory_of
from tests.support.memory import at_most

N = 9


@pytest.fixture
def trajectory(tiny: Callable[..., Plan]) -> Trajectory:
    return trajectory_of(tiny("ring.n_max=20"), N)


class Server:
    """The states of a few rounds, and requests about them."""

    def __init__(self, trajectory: Trajectory, rounds: int = 6) -> None:
        self.trajectory = trajectory
        self.states: list[ServerState] = [trajectory.rule.start(np.linspace(-1, 1, N, dtype=np.float32))]
        self.outcomes: list[bytes] = []
        for number in range(rounds):
            totals = np.random.default_rng(number).integers(-1000, 1000, 4).astype("<i4").tobytes()
            outcome = Outcome(number, "scalars", (Group(number, totals, 30),))
            self.outcomes.append(encode(outcome))
            self.states.append(apply(trajectory.rule, self.states[-1], outcome))

    def request(self, number: int, catch_up: CatchUp) -> RoundRequest:
        return RoundRequest(number, number, self.trajectory.digest, self.states[number].weights_hash(), catch_up)

    def snapshot(self, number: int) -> RoundRequest:
        return self.request(number, CatchUp("snapshot", number, (pack(self.states[number]),)))

    def replay(self, since: int, number: int) -> RoundRequest:
        return self.request(number, CatchUp("outcomes", since, tuple(self.outcomes[since:number])))

    def weights(self, number: int) -> RoundRequest:
        return self.request(number, CatchUp("weights", number, (self.states[number].weights.tobytes(),)))

    def delta(self, since: int, number: int) -> RoundRequest:
        before, after = self.states[since].weights.view(np.uint32), self.states[number].weights.view(np.uint32)
        return self.request(number, CatchUp("delta", since, ((after - before).tobytes(),)))

    def catch_up(self, kind: str, since: int, number: int) -> CatchUp:
        """The catch-up of one kind that leads from one round to another."""
        match kind:
            case "snapshot":
                request = self.snapshot(number)
            case "weights":
                request = self.weights(number)
            case "replay":
                request = self.replay(since, number)
            case _:
                request = self.delta(since, number)
        return request.catch_up


@pytest.fixture
def server(trajectory: Trajectory) -> Server:
    return Server(trajectory)


def _same(left: F32, right: F32) -> bool:
    return left.tobytes() == right.tobytes()


@pytest.mark.parametrize("stops", [[1, 2, 3, 4, 5, 6], [6], [2, 6], [1, 4, 5]])
def test_replayed_outcomes_give_the_servers_bits(server: Server, trajectory: Trajectory, stops: list[int]) -> None:
    replica, at = Replica(trajectory), 0
    assert _same(replica.weights_for(server.snapshot(0)), server.states[0].weights)
    for number in stops:
        assert _same(replica.weights_for(server.replay(at, number)), server.states[number].weights)
        at = number


def test_outcomes_that_the_client_has_already_are_not_replayed_twice(server: Server, trajectory: Trajectory) -> None:
    replica = Replica(trajectory)
    replica.weights_for(server.snapshot(2))
    assert _same(replica.weights_for(server.replay(0, 3)), server.states[3].weights)
    assert _same(replica.weights_for(server.replay(1, 3)), server.states[3].weights)
    assert _same(replica.weights_for(server.replay(1, 6)), server.states[6].weights)


def test_a_snapshot_brings_optimizer_and_average_too(server: Server, trajectory: Trajectory) -> None:
    replica = Replica(trajectory)
    replica.weights_for(server.snapshot(3))
    assert _same(replica.weights_for(server.replay(3, 5)), server.states[5].weights)
    replica.weights_for(server.snapshot(1))
    assert _same(replica.weights_for(server.replay(1, 2)), server.states[2].weights)


def test_weights_and_differences_give_the_servers_bits(server: Server, trajectory: Trajectory) -> None:
    replica = Replica(trajectory)
    assert _same(replica.weights_for(server.weights(1)), server.states[1].weights)
    assert _same(replica.weights_for(server.delta(1, 2)), server.states[2].weights)
    assert _same(replica.weights_for(server.delta(2, 6)), server.states[6].weights)
    assert _same(replica.weights_for(server.weights(3)), server.states[3].weights)


def test_a_difference_of_bit_patterns_knows_no_rounding(server: Server, trajectory: Trajectory) -> None:
    odd = np.array([0, -0.0, 1e-45, -1e-45, 3e38, np.inf, -np.inf, 1e-30, 1], np.float32)
    server.states[2] = replace(server.states[2], weights=odd)
    replica = Replica(trajectory)
    replica.weights_for(server.weights(1))
    assert _same(replica.weights_for(server.delta(1, 2)), odd)
    assert _same(replica.weights_for(server.delta(2, 3)), server.states[3].weights)


def test_another_plan_is_refused(server: Server, trajectory: Trajectory) -> None:
    request = server.snapshot(0)
    other = RoundRequest(0, 0, bytes(32), request.weights_hash, request.catch_up)
    with pytest.raises(MessageError, match="another plan"):
        Replica(trajectory).weights_for(other)


@pytest.mark.parametrize("kind", ["snapshot", "weights", "replay", "delta"])
def test_weights_other_than_the_named_ones_are_refused(server: Server, trajectory: Trajectory, kind: str) -> None:
    replica = Replica(trajectory)
    replica.weights_for(server.snapshot(2))
    lie = RoundRequest(3, 3, trajectory.digest, server.states[4].weights_hash(), server.catch_up(kind, 2, 3))
    with pytest.raises(MessageError, match="round 3: this client's weights"):
        replica.weights_for(lie)


@pytest.mark.parametrize("kind", ["snapshot", "weights", "replay", "delta"])
def test_a_refused_catch_up_leaves_the_client_where_it_was(server: Server, trajectory: Trajectory, kind: str) -> None:
    replica = Replica(trajectory)
    replica.weights_for(server.snapshot(2))
    with pytest.raises(MessageError):
        replica.weights_for(server.request(3, server.catch_up(kind, 2, 4)))
    assert _same(replica.weights_for(server.replay(2, 3)), server.states[3].weights)


MALFORMED: dict[str, CatchUp] = {
    "no item": CatchUp("snapshot", 3, ()),
    "two items": CatchUp("weights", 3, (bytes(4 * N), bytes(4 * N))),
    "delta of two": CatchUp("delta", 2, (bytes(4 * N), bytes(4 * N))),
    "weights too short": CatchUp("weights", 3, (bytes(4 * N - 4),)),
    "weights too long": CatchUp("weights", 3, (bytes(4 * N + 4),)),
    "delta of broken numbers": CatchUp("delta", 2, (bytes(4 * N - 1),)),
    "delta from another round": CatchUp("delta", 1, (bytes(4 * N),)),
    "snapshot of noise": CatchUp("snapshot", 3, (b"noise",)),
    "snapshot of nothing": CatchUp("snapshot", 3, (b"\x90",)),
    "outcomes of noise": CatchUp("outcomes", 2, (b"noise",)),
    "outcomes from the future": CatchUp("outcomes", 3, (encode(Outcome(3, "skipped", ())),)),
    "outcomes of another kind": CatchUp("outcomes", 2, (encode(Outcome(2, "vector", (Group(2, bytes(36), 1),))),)),
    "no outcomes": CatchUp("outcomes", 2, ()),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_catch_up_is_refused_and_does_no_harm(server: Server, trajectory: Trajectory, name: str) -> None:
    replica = Replica(trajectory)
    replica.weights_for(server.snapshot(2))
    with pytest.raises(BaffleError):
        replica.weights_for(server.request(3, MALFORMED[name]))
    assert _same(replica.weights_for(server.replay(2, 3)), server.states[3].weights)


@pytest.mark.parametrize("kind", ["replay", "delta"])
def test_a_client_that_holds_nothing_needs_a_whole_state(server: Server, trajectory: Trajectory, kind: str) -> None:
    with pytest.raises(MessageError):
        Replica(trajectory).weights_for(server.request(1, server.catch_up(kind, 0, 1)))


def test_a_snapshot_of_another_model_is_refused(
    server: Server, trajectory: Trajectory, tiny: Callable[..., Plan]
) -> None:
    other = trajectory_of(tiny("ring.n_max=20"), N + 1).rule.start(np.zeros(N + 1, np.float32))
    with pytest.raises(BaffleError):
        Replica(trajectory).weights_for(server.request(3, CatchUp("snapshot", 3, (pack(other),))))
    plain = trajectory_of(tiny("ring.n_max=20", 'update.optimizer="sgd"'), N).rule.start(server.states[3].weights)
    with pytest.raises(BaffleError):
        Replica(trajectory).weights_for(server.request(3, CatchUp("snapshot", 3, (pack(plain),))))


@pytest.mark.parametrize("kind", ["replay", "weights", "delta"])
def test_a_thawed_replica_continues_from_any_round(server: Server, trajectory: Trajectory, kind: str) -> None:
    replica = Replica(trajectory)
    for number in range(7):
        other = Replica(trajectory)
        other.thaw(replica.frozen())
        assert (other.round, other.frozen()) == (replica.round, replica.frozen())
        replica, since = other, number - 1
        if kind == "replay":
            request = server.replay(since, number) if number else server.snapshot(0)
        else:
            request = server.delta(since, number) if number and kind == "delta" else server.weights(number)
        assert _same(replica.weights_for(request), server.states[number].weights)


def test_what_was_frozen_under_another_plan_or_cut_off_is_refused(
    server: Server, trajectory: Trajectory, tiny: Callable[..., Plan]
) -> None:
    replica = Replica(trajectory)
    replica.weights_for(server.weights(1))
    with pytest.raises(MessageError, match="another plan"):
        Replica(trajectory_of(tiny("ring.n_max=21"), N)).thaw(replica.frozen())
    with pytest.raises(MessageError):
        Replica(trajectory).thaw(replica.frozen()[:-1])


def test_a_saved_replica_is_its_owners_alone(trajectory: Trajectory, tmp_path: Path) -> None:
    replica = Replica(trajectory, tmp_path / "replica")
    replica.weights_for(Server(trajectory).snapshot(2))
    before = os.umask(0)
    replica.save()
    os.umask(before)
    assert stat.S_IMODE((tmp_path / "replica").stat().st_mode) == 0o600
    assert Replica.round_in(tmp_path / "replica") == Replica(trajectory, tmp_path / "replica").round == 2


def test_a_saved_replica_that_is_of_no_use_is_forgotten(trajectory: Trajectory, tmp_path: Path) -> None:
    """The server can send the state again."""
    file = tmp_path / "replica"
    for content in (b"", b"short", b"\x93" * 100, *(sha256(data).digest() + data for data in HOSTILE)):
        file.write_bytes(content)
        with at_most(1 << 20):
            assert Replica.round_in(file) == Replica(trajectory, file).round == -1
    os.truncate(file, 1 << 40)
    with at_most(1 << 20):
        assert Replica.round_in(file) == Replica(trajectory, file).round == -1
    file.unlink()
    os.mkfifo(file)
    assert Replica.round_in(file) == -1


HOSTILE = [
    b"",
    b"\xdd\xff\xff\xff\xff",
    b"\x93\xc6\xff\xff\xff\xff",
    b"\x91" * 100_000,
    msgspec.msgpack.encode(("text", 1, b"")),
]
