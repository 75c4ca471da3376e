"""From a plan to values: which ring, which update rule, and which outcomes are refused."""

import os
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest

from baffle.core.arrays import F32
from baffle.core.messages import Group, Outcome
from baffle.core.ring import Ring
from baffle.core.seeds import Purpose
from baffle.core.state import apply
from baffle.errors import MessageError
from baffle.plan import Plan, UpdateSettings
from baffle.schedule import choose_clients, choose_groups, key_number_of
from baffle.trajectory import Epoch, Trajectory, optimizer, trajectory_of

MakePlan = Callable[..., Plan]

N = 7
SCALARS = ["ring.n_max=20"]
BACKPROP = [*SCALARS, 'estimator="backprop"']
EPOCH = [*SCALARS, 'federation.level="epoch"']


def _outcome(trajectory: Trajectory, **changes: object) -> Outcome:
    group = {"key": 3, "totals": np.arange(trajectory.length, dtype="<i4").tobytes(), "weight": 5} | changes
    return Outcome(0, trajectory.plan.outcome_kind, (Group(**group),))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "ring", "length"),
    [
        ([*SCALARS, "ring.d_max=30", "federation.participation=0.6"], Ring(2, 20, 30.0), 4),
        ([*SCALARS, "federation.tiers=[{k=3, share=0.3}, {k=2, share=0.3}]"], Ring(3, 20, 100.0, Fraction(2)), 4),
        ([*BACKPROP, "ring.update_max=9"], Ring(3, 20, 9.0), N),
        ([*EPOCH, "ring.update_max=9"], Ring(3, 20, 9.0), N),
        ([*SCALARS, "federation.seeds=own", "ring.d_max=30", "ring.update_max=9"], Ring(3, 20, 30.0), N),
    ],
)
def test_scalars_and_estimates_travel_in_a_ring_that_holds_d_max_and_vectors_in_one_of_update_max(
    tiny: MakePlan, settings: list[str], ring: Ring, length: int
) -> None:
    trajectory = trajectory_of(tiny(*settings), N)
    assert (trajectory.ring, trajectory.length) == (ring, length)
    assert trajectory.threads == os.cpu_count()


SALTS = (b"1" * 32, b"2" * 32)
MANY = ("federation.clients=40", "federation.participation=0.5", "federation.batch=5")
DRAWN = [*SCALARS, *MANY, "secure.mode=on", "secure.groups=4"]


def salted(plan: Plan, salt: bytes = b"") -> Trajectory:
    return trajectory_of(plan, N, epochs=(Epoch(0, salt),) if salt else ())


def test_runs_with_different_salts_draw_nothing_alike(tiny: MakePlan) -> None:
    """Directions, clients, groups and batches: the same plan never asks the same question twice. What a run begins with
    follows from the plan alone."""
    runs = [salted(tiny(*DRAWN), salt) for salt in (b"", *SALTS)]
    purposes: tuple[Purpose, ...] = ("init", "partition", "tiers")
    for purpose in purposes:
        assert len({trajectory.seeds(0).key(purpose) for trajectory in runs}) == 1
    assert len({(trajectory.digest, trajectory.ring) for trajectory in runs}) == 1
    for number in range(5):
        assert len({trajectory.directions(number).key for trajectory in runs}) == 3
        assert len({tuple(choose_clients(trajectory, number)) for trajectory in runs}) == 3
        assert len({str(choose_groups(trajectory, number)) for trajectory in runs}) == 3
        assert len({trajectory.seeds(number).key("batches", number, 0) for trajectory in runs}) == 3


def test_directions_of_groups_have_the_salt_of_their_round(tiny: MakePlan) -> None:
    """Key numbers count groups, epochs count rounds."""
    plan = tiny(*DRAWN, "secure.group_seeds=own")
    both = trajectory_of(plan, N, epochs=(Epoch(0, SALTS[0]), Epoch(2, b"of no round".ljust(32)), Epoch(2, SALTS[1])))
    for number in range(4):
        alone = salted(plan, SALTS[number >= 2])
        assert both.seeds(number) == alone.seeds(number)
        for group in range(4):
            key = both.key_number(number, group)
            assert both.directions(key) == alone.directions(key)
    assert len({both.directions(key).key for key in range(16)}) == 16


def test_a_gradient_is_rebuilt_along_the_salted_directions(tiny: MakePlan) -> None:
    plan = tiny(*SCALARS, "update.optimizer=sgd", "update.ema=0")
    ends = []
    for salt in (b"", *SALTS):
        trajectory = salted(plan, salt)
        state = apply(trajectory.rule, trajectory.rule.start(np.zeros(N, np.float32)), _outcome(trajectory))
        along = trajectory.directions(3).draw(range(4), 0, N).T @ np.arange(4)
        assert np.array_equal(np.sign(state.weights), -np.sign(along))
        ends.append(state.weights_hash())
    assert len(set(ends)) == 3


def test_a_trajectory_with_the_same_epochs_is_the_same(tiny: MakePlan) -> None:
    trajectory = trajectory_of(tiny(*SCALARS), N, block=64)
    assert trajectory.with_epochs(()) is trajectory
    other = trajectory.with_epochs((Epoch(0, SALTS[0]),))
    assert other.block == 64
    assert other.epochs == (Epoch(0, SALTS[0]),)
    assert other.with_epochs(other.epochs) is other


def test_a_clients_directions_are_those_of_its_group(tiny: MakePlan) -> None:
    trajectory = salted(tiny(*DRAWN, "secure.group_seeds=own"), SALTS[0])
    for number in range(3):
        for group, clients in enumerate(choose_groups(trajectory, number)):
            assert {key_number_of(trajectory, number, client) for client in clients} == {4 * number + group}
    shared = salted(tiny(*DRAWN), SALTS[0])
    assert {key_number_of(shared, 2, client) for client in range(40)} == {2}


def _step(update: UpdateSettings, gradient: F32, weights: F32) -> F32:
    transform = optimizer(update)
    return transform.update(transform.init(weights), gradient, weights)[1]


def test_the_gradient_is_clipped_before_weights_decay_and_before_the_step() -> None:
    gradient, weights = np.array([4, -2], np.float32), np.array([10, 20], np.float32)
    step = _step(UpdateSettings(optimizer="sgd", rate=0.5, clip=1.0, weight_decay=0.25), gradient, weights)
    np.testing.assert_array_equal(step, [-0.5 * (1 + 2.5), -0.5 * (-0.5 + 5)])
    np.testing.assert_array_equal(_step(UpdateSettings(optimizer="sgd", rate=0.5), gradient, weights), [-2, 1])


def test_the_plan_names_the_optimizer_and_its_settings() -> None:
    gradient, weights = np.array([4, -2], np.float32), np.zeros(2, np.float32)
    momentum = optimizer(UpdateSettings(optimizer="momentum", rate=1.0, momentum=0.5))
    state, _ = momentum.update(momentum.init(weights), gradient, weights)
    np.testing.assert_array_equal(momentum.update(state, gradient, weights)[1], [-6, 3])
    adam = optimizer(UpdateSettings(optimizer="adam", rate=0.25, betas=(0.5, 0.75)))
    state, step = adam.update(adam.init(weights), gradient, weights)
    np.testing.assert_allclose(step, [-0.25, 0.25], rtol=1e-6)
    _, step = adam.update(state, -gradient, weights)
    mean, square = -0.25 / 0.75 * gradient, gradient**2
    np.testing.assert_allclose(step, -0.25 * mean / np.sqrt(square), rtol=1e-6)


def test_at_epoch_level_the_server_takes_the_clients_step_as_it_is(tiny: MakePlan) -> None:
    trajectory = trajectory_of(tiny(*EPOCH), N)
    state = trajectory.rule.start(np.ones(N, np.float32))
    moved = apply(trajectory.rule, state, _outcome(trajectory))
    expected = 1 - np.arange(N) / (trajectory.ring.scale * 5)
    np.testing.assert_allclose(moved.weights, expected, rtol=1e-6)
    assert moved.optimizer == ()


def test_an_average_follows_the_weights(tiny: MakePlan) -> None:
    trajectory = trajectory_of(tiny(*SCALARS), N)
    start = trajectory.rule.start(np.ones(N, np.float32))
    state = apply(trajectory.rule, start, _outcome(trajectory))
    expected = 0.1 * start.weights + 0.9 * state.weights
    np.testing.assert_allclose(trajectory.rule.smooth_weights(state), expected, rtol=1e-6)
    without = trajectory_of(tiny(*SCALARS, "update.ema=0"), N)
    state = apply(without.rule, without.rule.start(np.ones(N, np.float32)), _outcome(without))
    assert state.average == ()
    assert without.rule.smooth_weights(state) is state.weights


THREE = ("federation.clients=9", "secure.groups=3")
GROUPS = {
    "shared mean": [*SCALARS, *THREE],
    "shared median": [*SCALARS, *THREE, "secure.combine=median"],
    "own median": [*SCALARS, *THREE, "secure.group_seeds=own", "secure.combine=median"],
    "epoch median": [*EPOCH, *THREE, "secure.combine=median"],
    "backprop mean": [*BACKPROP, *THREE, "secure.group_seeds=own"],
}


def _grouped(trajectory: Trajectory, rows: list[list[int]], weights: list[int], number: int = 2) -> Outcome:
    groups = tuple(
        Group(trajectory.key_number(number, index), np.array(row, "<i4").tobytes(), weight)
        for index, (row, weight) in enumerate(zip(rows, weights, strict=True))
    )
    return Outcome(number, trajectory.plan.outcome_kind, groups)


def _rows(trajectory: Trajectory, count: int) -> list[list[int]]:
    random = np.random.default_rng(count)
    return [random.integers(-(2**20), 2**20, trajectory.length).tolist() for _ in range(count)]


@pytest.mark.parametrize("estimator", [SCALARS, BACKPROP, EPOCH])
def test_shared_directions_and_a_mean_give_the_gradient_of_one_sum(tiny: MakePlan, estimator: list[str]) -> None:
    many = trajectory_of(tiny(*estimator, *THREE), N)
    # Directions follow from the digest, which covers the groups: one group of three may hold the whole sum.
    alone = many if estimator is SCALARS else trajectory_of(tiny(*estimator, "federation.clients=9"), N)
    rows = _rows(many, 3)
    whole = alone.rule.gradient(_grouped(alone, [np.sum(rows, axis=0).tolist()], [32]))
    assert np.array_equal(whole, many.rule.gradient(_grouped(many, rows, [5, 20, 7])))


@pytest.mark.parametrize("name", ["shared median", "own median", "epoch median"])
def test_one_group_of_three_moves_no_median_gradient_beyond_the_others(tiny: MakePlan, name: str) -> None:
    """The median is over scalars if groups share directions, and over weights if they do not."""
    trajectory = trajectory_of(tiny(*GROUPS[name]), N)
    (row,) = _rows(trajectory, 1)
    liar = [(-1) ** place * 2**28 for place in range(trajectory.length)]
    honest = [
        trajectory.rule.gradient(Outcome(2, trajectory.plan.outcome_kind, (group,)))
        for group in _grouped(trajectory, [row, row], [6, 6]).groups
    ]
    gradient = trajectory.rule.gradient(_grouped(trajectory, [row, row, liar], [6, 6, 1]))
    low, high = np.min(honest, axis=0), np.max(honest, axis=0)
    assert (gradient >= low - 1e-5).all()
    assert (gradient <= high + 1e-5).all()


@pytest.mark.parametrize("name", GROUPS)
def test_groups_that_do_not_fit_the_plan_are_refused(tiny: MakePlan, name: str) -> None:
    trajectory = trajectory_of(tiny(*GROUPS[name]), N)
    good = _grouped(trajectory, _rows(trajectory, 3), [1, 2, 3])
    state = trajectory.rule.start(np.ones(N, np.float32))
    apply(trajectory.rule, state, good)
    apply(trajectory.rule, state, Outcome(2, good.kind, good.groups[1:]))
    first, *rest = good.groups
    other_key = rest[0].key if trajectory.plan.own_seeds else first.key + 1
    bad = [
        ((), good.kind),
        ((*good.groups, first), good.kind),
        ((Group(other_key, first.totals, first.weight), *rest), good.kind),
        ((Group(-1, first.totals, first.weight), *rest), good.kind),
        ((Group(first.key, first.totals, 0), *rest), good.kind),
        ((Group(first.key, first.totals[:-4], 1), *rest), good.kind),
        (good.groups, "vector" if good.kind == "scalars" else "scalars"),
    ]
    for groups, kind in bad:
        with pytest.raises(MessageError, match="round 2"):
            apply(trajectory.rule, state, Outcome(2, kind, groups))
