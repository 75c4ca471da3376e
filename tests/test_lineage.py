"""Round follows round, and every epoch's statement is a link between them: anything else is refused."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baffle.core.chain import Present, chain_epoch, chain_next, chain_start
from baffle.core.messages import Group, Outcome, encode
from baffle.core.ring import GUARD
from baffle.errors import ChainError
from baffle.lineage import Lineage, Link
from baffle.plan import Plan
from baffle.trajectory import Epoch, Trajectory, trajectory_of

N = 6
CLIENTS = 4
A, B, C = b"a" * 32, b"b" * 32, b"c" * 32
SALT = b"s" * 32


@pytest.fixture(scope="module")
def trajectory(tiny: Callable[..., Plan]) -> Trajectory:
    return trajectory_of(tiny("ring.n_max=20", f"federation.clients={CLIENTS}", "ring.d_max=30"), N)


def start(lineage: Lineage) -> Present:
    return lineage.beginning(lineage.trajectory.rule.start(np.ones(N, np.float32)))


def outcome_of(number: int, total: int = 100, weight: int = 30, key: int | None = None) -> bytes:
    totals = np.array([total, -5, 7, 9], "<i4").tobytes()
    return encode(Outcome(number, "scalars", (Group(number if key is None else key, totals, weight),)))


def networked(trajectory: Trajectory, *links: Link) -> Lineage:
    lineage = Lineage(trajectory)
    for link in links:
        lineage = lineage.in_epoch(link, SALT)
    return lineage


def test_a_simulation_has_no_links(trajectory: Trajectory) -> None:
    lineage = Lineage(trajectory)
    present = start(lineage)
    assert present.chain == chain_start(trajectory.digest, present.state)
    after = lineage.advance(present, outcome_of(0))
    assert after.round == 1
    assert after.chain == chain_next(present.chain, outcome_of(0), after.state)
    assert lineage.chains(0, present.chain) == [present.chain]
    assert lineage.linked(after) == after


def test_an_epoch_is_a_link_before_its_first_round(trajectory: Trajectory) -> None:
    bare = start(Lineage(trajectory))
    lineage = networked(trajectory, Link(0, A, bare.chain))
    present = start(lineage)
    assert present.chain == chain_epoch(bare.chain, A)
    after = lineage.advance(present, outcome_of(0))
    assert after.chain == chain_next(present.chain, outcome_of(0), after.state)
    longer = lineage.in_epoch(Link(1, B, after.chain), SALT)
    again = longer.advance(present, outcome_of(0))
    assert again.chain == chain_epoch(after.chain, B)
    assert again.state.digest() == after.state.digest()


def test_several_epochs_may_begin_with_one_round(trajectory: Trajectory) -> None:
    bare = start(Lineage(trajectory)).chain
    first, second = chain_epoch(bare, A), chain_epoch(chain_epoch(bare, A), B)
    lineage = networked(trajectory, Link(0, A, bare), Link(0, B, first), Link(0, C, None))
    third = chain_epoch(second, C)
    assert lineage.chains(0, bare) == [bare, first, second, third]
    assert start(lineage).chain == third
    assert lineage.chains(0, first, after=A) == [first, second, third]
    assert lineage.chains(0, third, after=C) == [third]
    assert lineage.chains(1, bare) == [bare]
    state = lineage.trajectory.rule.start(np.ones(N, np.float32))
    assert lineage.linked(Present(0, state, second), after=B).chain == third


def test_a_lineage_under_another_name_or_order_has_another_chain(trajectory: Trajectory) -> None:
    ends = {
        start(networked(trajectory, *(Link(0, run, None) for run in runs))).chain
        for runs in ([], [A], [B], [A, B], [B, A], [A, A])
    }
    assert len(ends) == 6


def test_an_epoch_that_names_another_past_is_refused(trajectory: Trajectory) -> None:
    with pytest.raises(ChainError, match="the epoch that begins with round 0 names another past"):
        start(networked(trajectory, Link(0, A, bytes(32))))
    good = networked(trajectory, Link(0, A, None))
    bad = good.in_epoch(Link(1, B, bytes(32)), SALT)
    with pytest.raises(ChainError, match="the epoch that begins with round 1 names another past") as refused:
        bad.advance(start(good), outcome_of(0))
    assert refused.value.round_number == 1


def test_each_epoch_has_a_salt_of_its_own(trajectory: Trajectory) -> None:
    lineage = Lineage(trajectory).in_epoch(Link(0, A, None), b"1" * 32).in_epoch(Link(2, B, None), b"2" * 32)
    assert lineage.trajectory.epochs == (Epoch(0, b"1" * 32), Epoch(2, b"2" * 32))
    assert [lineage.trajectory.seeds(number).salt[:1] for number in range(4)] == [b"1", b"1", b"2", b"2"]
    assert Lineage(trajectory).trajectory.seeds(3).salt == b""


def test_a_salt_changes_where_a_round_leads(trajectory: Trajectory) -> None:
    ends = set()
    for salt in (b"1" * 32, b"2" * 32):
        lineage = Lineage(trajectory).in_epoch(Link(0, A, None), salt)
        ends.add(lineage.advance(start(lineage), outcome_of(0)).state.weights_hash())
    assert len(ends) == 2


@given(st.lists(st.integers(0, 5), max_size=5).map(sorted), st.integers(0, 5))
@settings(max_examples=50)
def test_whoever_joins_the_chain_anywhere_comes_to_its_end(
    trajectory: Trajectory, firsts: list[int], joined: int
) -> None:
    """A client that holds any earlier link gets to the same hash as a server that went through all of them."""
    links = [Link(first, bytes([65 + place]) * 32, None) for place, first in enumerate(firsts)]
    lineage = networked(trajectory, *links)
    presents = [start(lineage)]
    for number in range(6):
        presents.append(lineage.advance(presents[-1], outcome_of(number)))
    known = networked(trajectory, *[link for link in links if link.first < joined])
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
@pytest.mark.parametrize("links", [(), (Link(0, A, None),)])
def test_what_is_no_outcome_of_the_round_is_refused(
    trajectory: Trajectory, data: bytes, why: str, links: tuple[Link, ...]
) -> None:
    lineage = networked(trajectory, *links)
    with pytest.raises(ChainError, match=why) as refused:
        lineage.advance(start(lineage), data)
    assert refused.value.round_number == 0


def most_total(trajectory: Trajectory) -> int:
    return GUARD * CLIENTS // trajectory.plan.per_round


IMPOSSIBLE: dict[str, tuple[Callable[[Trajectory], bytes], Callable[[Trajectory], bytes], str]] = {
    "key": (lambda _: outcome_of(0, key=0), lambda _: outcome_of(0, key=1), "a key with the number 1"),
    "weight": (
        lambda _: outcome_of(0, weight=20 * CLIENTS),
        lambda _: outcome_of(0, weight=20 * CLIENTS + 1),
        f"a weight of {20 * CLIENTS + 1}, but {CLIENTS} clients have at most {20 * CLIENTS}",
    ),
    "total": (
        lambda trajectory: outcome_of(0, total=most_total(trajectory)),
        lambda trajectory: outcome_of(0, total=most_total(trajectory) + 1),
        "more than 4 clients can send",
    ),
    "negative total": (
        lambda trajectory: outcome_of(0, total=-most_total(trajectory)),
        lambda trajectory: outcome_of(0, total=-most_total(trajectory) - 1),
        "more than 4 clients can send",
    ),
    "smallest total": (
        lambda _: outcome_of(0),
        lambda _: outcome_of(0, total=-(2**31)),
        "more than 4 clients can send",
    ),
}


@pytest.mark.parametrize("what", IMPOSSIBLE)
def test_in_a_network_what_the_clients_cannot_have_sent_is_refused(trajectory: Trajectory, what: str) -> None:
    last_good, bad, why = IMPOSSIBLE[what]
    lineage = networked(trajectory, Link(0, A, None))
    present = start(lineage)
    assert lineage.advance(present, last_good(trajectory)).round == 1
    with pytest.raises(ChainError, match=why):
        lineage.advance(present, bad(trajectory))


def test_in_a_private_network_a_total_has_room_for_noise_and_a_sum_enough_clients(tiny: Callable[..., Plan]) -> None:
    settings = ("federation.weighting=uniform", "secure.floor=3", "privacy.noise=2.0", "privacy.clip=1.0")
    plan = tiny("ring.n_max=1", f"federation.clients={CLIENTS}", "privacy.sharers=3", *settings)
    trajectory = trajectory_of(plan, N)
    lineage = networked(trajectory, Link(0, A, None))
    present, most = start(lineage), trajectory.ring.most(CLIENTS)
    private = trajectory.private
    assert private is not None
    assert CLIENTS * private.delta_2 + 5 * (CLIENTS * float(private.share)) ** 0.5 < most < GUARD
    for good in (outcome_of(0, total=most, weight=CLIENTS), outcome_of(0, total=-most, weight=3)):
        assert lineage.advance(present, good).round == 1
    for bad, why in (
        (outcome_of(0, total=most + 1, weight=CLIENTS), "more than 4 clients can send"),
        (outcome_of(0, weight=CLIENTS + 1), "a weight of 5, but 4 clients have at most 4"),
        (outcome_of(0, weight=2), "a sum over 2 clients, but a private one has at least 3"),
    ):
        with pytest.raises(ChainError, match=why):
            lineage.advance(present, bad)


def test_journals_of_simulations_are_replayed_as_they_are(trajectory: Trajectory) -> None:
    """They may hold totals of an older version's ring; the chain alone decides."""
    lineage = Lineage(trajectory)
    for _, bad, _ in IMPOSSIBLE.values():
        assert lineage.advance(start(lineage), bad(trajectory)).round == 1


def test_a_step_beyond_norm_max_is_refused(tiny: Callable[..., Plan]) -> None:
    def stepped(cap: float) -> Present:
        trajectory = trajectory_of(tiny("ring.n_max=20", f"update.norm_max={cap}", "update.rate=1"), N)
        lineage = networked(trajectory, Link(0, A, None))
        return lineage.advance(start(lineage), outcome_of(0, total=10**8, weight=1))

    free = stepped(0)
    length = float(np.linalg.norm(free.state.weights.astype(np.float64) - 1))
    assert stepped(length * 1.01).chain != bytes(32)
    with pytest.raises(ChainError, match=r"its step is longer than update\.norm_max"):
        stepped(length * 0.99)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_step_that_is_not_finite_is_refused(tiny: Callable[..., Plan]) -> None:
    trajectory = trajectory_of(tiny("ring.n_max=20", "update.rate=3e38", "update.optimizer=sgd"), N)
    lineage = networked(trajectory, Link(0, A, None))
    with pytest.raises(ChainError, match="not finite"):
        lineage.advance(start(lineage), outcome_of(0, total=10**8, weight=1))


def test_a_skipped_round_changes_nothing_but_the_chain(trajectory: Trajectory) -> None:
    lineage = networked(trajectory, Link(0, A, None))
    present = start(lineage)
    skipped = encode(Outcome(0, "skipped", ()))
    after = lineage.advance(present, skipped)
    assert after.state is present.state
    assert after.chain == chain_next(present.chain, skipped, present.state)


def test_the_group_of_a_key_must_be_the_rounds(tiny: Callable[..., Plan]) -> None:
    settings = ("ring.n_max=20", "federation.clients=6", "secure.mode=on", "secure.groups=2", "secure.group_seeds=own")
    lineage = networked(trajectory_of(tiny(*settings), N), Link(0, A, None))
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
