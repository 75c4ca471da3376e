"""Round follows round, and every epoch's statement is a link between them: anything else is refused."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from baffle.core.messages import Group, Outcome, encode
from baffle.core.ring import GUARD, Ring
from baffle.core.state import Present, chain_epoch, chain_next, chain_start
from baffle.errors import ChainError
from baffle.lineage import Lineage
from baffle.plan import Plan
from baffle.trajectory import Epoch, Trajectory, trajectory_of

MakePlan = Callable[..., Plan]

N = 6
CLIENTS = 4
A, B, C = b"a" * 32, b"b" * 32, b"c" * 32
SALT = b"s" * 32


@pytest.fixture(scope="module")
def trajectory(tiny: MakePlan) -> Trajectory:
    return trajectory_of(tiny("ring.n_max=20", f"federation.clients={CLIENTS}", "ring.d_max=30"), N)


def start(lineage: Lineage) -> Present:
    return lineage.beginning(lineage.trajectory.rule.start(np.ones(N, np.float32)))


def outcome_of(number: int, total: int = 100, weight: int = 30, key: int | None = None) -> bytes:
    totals = np.array([total, -5, 7, 9], "<i4").tobytes()
    return encode(Outcome(number, "scalars", (Group(number if key is None else key, totals, weight),)))


def networked(trajectory: Trajectory, *epochs: Epoch) -> Lineage:
    return Lineage(trajectory.with_epochs(epochs))


def test_an_epoch_is_a_link_before_its_first_round(trajectory: Trajectory) -> None:
    """A simulation has none. A skipped round changes nothing but the chain."""
    simulation, skipped = Lineage(trajectory), encode(Outcome(0, "skipped", ()))
    bare = start(simulation)
    assert bare.chain == chain_start(trajectory.digest, bare.state)
    assert simulation.chains(0, bare.chain) == [bare.chain]
    unchanged = simulation.advance(bare, skipped)
    assert unchanged.state is bare.state
    assert (unchanged.round, unchanged.chain) == (1, chain_next(bare.chain, skipped, bare.state))
    lineage = networked(trajectory, Epoch(0, SALT, A, bare.chain))
    present = start(lineage)
    assert present.chain == chain_epoch(bare.chain, A)
    after = lineage.advance(present, outcome_of(0))
    assert after.chain == chain_next(present.chain, outcome_of(0), after.state)
    longer = lineage.in_epoch(Epoch(1, SALT, B, after.chain))
    again = longer.advance(present, outcome_of(0))
    assert again.chain == chain_epoch(after.chain, B)
    assert again.state.digest() == after.state.digest()


def test_several_epochs_may_begin_with_one_round(trajectory: Trajectory) -> None:
    bare = start(Lineage(trajectory)).chain
    first, second = chain_epoch(bare, A), chain_epoch(chain_epoch(bare, A), B)
    lineage = networked(trajectory, Epoch(0, SALT, A, bare), Epoch(0, SALT, B, first), Epoch(0, SALT, C))
    third = chain_epoch(second, C)
    assert lineage.chains(0, bare) == [bare, first, second, third]
    assert start(lineage).chain == third
    assert start(networked(trajectory, Epoch(0, SALT, B), Epoch(0, SALT, A), Epoch(0, SALT, C))).chain != third
    assert lineage.chains(0, first, after=A) == [first, second, third]
    assert lineage.chains(0, third, after=C) == [third]
    assert lineage.chains(1, bare) == [bare]
    state = lineage.trajectory.rule.start(np.ones(N, np.float32))
    assert lineage.linked(Present(0, state, second), after=B).chain == third


def test_an_epoch_that_names_another_past_is_refused(trajectory: Trajectory) -> None:
    with pytest.raises(ChainError, match="the epoch that begins with round 0 names another past"):
        start(networked(trajectory, Epoch(0, SALT, A, bytes(32))))
    good = networked(trajectory, Epoch(0, SALT, A))
    bad = good.in_epoch(Epoch(1, SALT, B, bytes(32)))
    with pytest.raises(ChainError, match="the epoch that begins with round 1 names another past") as refused:
        bad.advance(start(good), outcome_of(0))
    assert refused.value.round_number == 1


@given(st.lists(st.integers(0, 5), max_size=5).map(sorted), st.integers(0, 5))
@settings(max_examples=50)
def test_a_client_that_joins_the_chain_anywhere_comes_to_its_end(
    trajectory: Trajectory, firsts: list[int], joined: int
) -> None:
    """A client that holds any earlier link gets to the same hash as a server that went through all of them."""
    epochs = [Epoch(first, SALT, bytes([65 + place]) * 32) for place, first in enumerate(firsts)]
    lineage = networked(trajectory, *epochs)
    presents = [start(lineage)]
    for number in range(6):
        presents.append(lineage.advance(presents[-1], outcome_of(number)))
    known = networked(trajectory, *[epoch for epoch in epochs if epoch.first < joined])
    present = start(known)
    for number in range(joined):
        present = (known if number < joined - 1 else lineage).advance(present, outcome_of(number))
    present = lineage.linked(present) if joined == 0 else present
    for number in range(joined, 6):
        assert present.chain == presents[number].chain
        present = lineage.advance(present, outcome_of(number))
    assert present.chain == presents[-1].chain


# Rounds that cannot follow


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "round 0 cannot be replayed: expected a message of type Outcome"),
        (outcome_of(1), "round 0 holds the outcome of round 1"),
        (encode(Outcome(0, "vector", ())), "round 0 cannot be replayed: round 0 has 0 groups of kind vector"),
        (outcome_of(0, weight=0), "round 0 cannot be replayed.*positive weight"),
    ],
)
@pytest.mark.parametrize("epochs", [(), (Epoch(0, SALT, A),)])
def test_what_is_no_outcome_of_the_round_is_refused(
    trajectory: Trajectory, data: bytes, why: str, epochs: tuple[Epoch, ...]
) -> None:
    lineage = networked(trajectory, *epochs)
    with pytest.raises(ChainError, match=why) as refused:
        lineage.advance(start(lineage), data)
    assert refused.value.round_number == 0


MOST = Ring(CLIENTS, 20, 30.0).most(CLIENTS, weight=30)
IMPOSSIBLE = {
    "key": (outcome_of(0, key=0), outcome_of(0, key=1), "a key with the number 1"),
    "weight": (outcome_of(0, weight=80), outcome_of(0, weight=81), "a weight of 81, but 4 clients have at most 80"),
    "total": (outcome_of(0, total=MOST), outcome_of(0, total=MOST + 1), "more than 4 clients of weight 30 can send"),
    "negative total": (outcome_of(0, total=-MOST), outcome_of(0, total=-MOST - 1), "more than 4 clients of weight 30"),
    "divisor": (outcome_of(0, total=MOST), outcome_of(0, total=MOST, weight=29), "more than 4 clients of weight 29"),
    "smallest total": (outcome_of(0), outcome_of(0, total=-(2**31)), "more than 4 clients of weight 30 can send"),
}


@pytest.mark.parametrize("what", IMPOSSIBLE)
def test_in_a_network_what_the_clients_cannot_have_sent_is_refused(trajectory: Trajectory, what: str) -> None:
    """Journals of simulations are replayed as they are: they may hold totals of an older version's ring."""
    last_good, bad, why = IMPOSSIBLE[what]
    lineage = networked(trajectory, Epoch(0, SALT, A))
    present = start(lineage)
    assert lineage.advance(present, last_good).round == 1
    with pytest.raises(ChainError, match=why):
        lineage.advance(present, bad)
    simulation = Lineage(trajectory)
    assert simulation.advance(start(simulation), bad).round == 1


def test_in_a_private_network_a_total_has_room_for_noise_and_a_sum_enough_clients(tiny: MakePlan) -> None:
    settings = ("federation.weighting=uniform", "secure.floor=3", "privacy.noise=2.0", "privacy.clip=1.0")
    plan = tiny("ring.n_max=1", f"federation.clients={CLIENTS}", "privacy.sharers=3", *settings)
    trajectory = trajectory_of(plan, N)
    lineage = networked(trajectory, Epoch(0, SALT, A))
    present, most = start(lineage), trajectory.ring.most(CLIENTS, CLIENTS)
    private = trajectory.private
    assert private is not None
    assert CLIENTS * private.delta_2 + 5 * (CLIENTS * float(private.share)) ** 0.5 < most < GUARD
    for good in (outcome_of(0, total=most, weight=CLIENTS), outcome_of(0, total=-trajectory.ring.most(3, 3), weight=3)):
        assert lineage.advance(present, good).round == 1
    for bad, why in (
        (outcome_of(0, total=most + 1, weight=CLIENTS), "more than 4 clients of weight 4 can send"),
        (outcome_of(0, weight=CLIENTS + 1), "a weight of 5, but 4 clients have at most 4"),
        (outcome_of(0, weight=2), "a sum over 2 clients, but a private one has at least 3"),
    ):
        with pytest.raises(ChainError, match=why):
            lineage.advance(present, bad)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_step_beyond_norm_max_or_that_is_not_finite_is_refused(tiny: MakePlan) -> None:
    def stepped(cap: float, *settings: str) -> Present:
        trajectory = trajectory_of(tiny("ring.n_max=20", f"update.norm_max={cap}", "update.rate=1", *settings), N)
        lineage = networked(trajectory, Epoch(0, SALT, A))
        return lineage.advance(start(lineage), outcome_of(0, total=6 * 10**6, weight=1))

    free = stepped(0)
    length = float(np.linalg.norm(free.state.weights.astype(np.float64) - 1))
    assert stepped(length * 1.01).chain != bytes(32)
    with pytest.raises(ChainError, match=r"its step is longer than update\.norm_max"):
        stepped(length * 0.99)
    with pytest.raises(ChainError, match="not finite"):
        stepped(0, "update.rate=3e38", "update.optimizer=sgd")


def test_the_group_of_a_key_must_be_the_rounds(tiny: MakePlan) -> None:
    settings = ("ring.n_max=20", "federation.clients=6", "secure.mode=on", "secure.groups=2", "secure.group_seeds=own")
    lineage = networked(trajectory_of(tiny(*settings), N), Epoch(0, SALT, A))
    totals = np.ones(4, "<i4").tobytes()

    def outcome(*keys: int) -> bytes:
        return encode(Outcome(0, "scalars", tuple(Group(key, totals, 30) for key in keys)))

    for keys in ((0, 1), (0,), (1,)):
        assert lineage.advance(start(lineage), outcome(*keys)).round == 1
    for keys in ((2,), (0, 2), (2, 3)):
        with pytest.raises(ChainError, match="expected that of round 0"):
            lineage.advance(start(lineage), outcome(*keys))
    with pytest.raises(ChainError, match="with the keys"):
        lineage.advance(start(lineage), outcome(1, 1))
