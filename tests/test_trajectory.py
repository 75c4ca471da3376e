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

N = 7
SCALARS = ["ring.n_max=20"]
BACKPROP = [*SCALARS, 'estimator="backprop"']
EPOCH = [*SCALARS, 'federation.level="epoch"']


def _outcome(trajectory: Trajectory, **changes: object) -> Outcome:
    group = {"key": 3, "totals": np.arange(trajectory.length, dtype="<i4").tobytes(), "weight": 5} | changes
    return Outcome(0, trajectory.plan.outcome_kind, (Group(**group),))  # type: ignore[arg-type]


def test_scalars_travel_in_a_ring_that_holds_d_max(tiny: Callable[..., Plan]) -> None:
    trajectory = trajectory_of(tiny(*SCALARS, "ring.d_max=30", "federation.participation=0.6"), N)
    assert trajectory.ring == Ring(clients=2, n_max=20, clip=30.0)
    assert trajectory.length == 4


def test_tiers_stretch_the_ring_by_the_slowest_one(tiny: Callable[..., Plan]) -> None:
    trajectory = trajectory_of(tiny(*SCALARS, "federation.tiers=[{k=3, share=0.3}, {k=2, share=0.3}]"), N)
    assert trajectory.ring == Ring(clients=3, n_max=20, clip=100.0, tier_factor=Fraction(2))


@pytest.mark.parametrize("settings", [BACKPROP, EPOCH])
def test_vectors_travel_in_a_ring_that_holds_update_max(tiny: Callable[..., Plan], settings: list[str]) -> None:
    trajectory = trajectory_of(tiny(*settings, "ring.update_max=9"), N)
    assert trajectory.ring == Ring(clients=3, n_max=20, clip=9.0)
    assert trajectory.length == N


def test_estimates_by_own_directions_travel_in_a_ring_that_holds_d_max(tiny: Callable[..., Plan]) -> None:
    trajectory = trajectory_of(tiny(*SCALARS, "federation.seeds=own", "ring.d_max=30", "ring.update_max=9"), N)
    assert trajectory.ring == Ring(clients=3, n_max=20, clip=30.0)
    assert trajectory.length == N


SALTS = (b"1" * 32, b"2" * 32)
DRAWN = [
    *SCALARS,
    "federation.clients=40",
    "federation.participation=0.5",
    "secure.mode=on",
    "secure.groups=4",
    "federation.batch=5",
]


def salted(plan: Plan, salt: bytes = b"") -> Trajectory:
    return trajectory_of(plan, N, epochs=(Epoch(0, salt),) if salt else ())


def test_runs_with_different_salts_draw_nothing_alike(tiny: Callable[..., Plan]) -> None:
    """Directions, clients, groups and batches: the same plan never asks the same question twice."""
    runs = [salted(tiny(*DRAWN), salt) for salt in (b"", *SALTS)]
    for number in range(5):
        assert len({trajectory.directions(number).key for trajectory in runs}) == 3
        assert len({tuple(choose_clients(trajectory, number)) for trajectory in runs}) == 3
        assert len({str(choose_groups(trajectory, number)) for trajectory in runs}) == 3
        assert len({trajectory.seeds(number).key("batches", number, 0) for trajectory in runs}) == 3


def test_what_a_run_begins_with_follows_from_the_plan_alone(tiny: Callable[..., Plan]) -> None:
    runs = [salted(tiny(*DRAWN), salt) for salt in (b"", *SALTS)]
    purposes: tuple[Purpose, ...] = ("init", "partition", "tiers")
    for purpose in purposes:
        assert len({trajectory.seeds(0).key(purpose) for trajectory in runs}) == 1
    assert len({trajectory.digest for trajectory in runs}) == 1
    assert len({trajectory.ring for trajectory in runs}) == 1


def test_every_round_has_the_salt_of_its_epoch(tiny: Callable[..., Plan]) -> None:
    plan = tiny(*SCALARS)
    both = trajectory_of(plan, N, epochs=(Epoch(0, SALTS[0]), Epoch(2, b"of no round".ljust(32)), Epoch(2, SALTS[1])))
    for number in range(4):
        alone = salted(plan, SALTS[number >= 2])
        assert both.directions(number) == alone.directions(number)
        assert both.seeds(number) == alone.seeds(number)


def test_directions_of_groups_have_the_salt_of_their_round(tiny: Callable[..., Plan]) -> None:
    """Key numbers count groups, epochs count rounds."""
    plan = tiny(*DRAWN, "secure.group_seeds=own")
    both = trajectory_of(plan, N, epochs=(Epoch(0, SALTS[0]), Epoch(2, SALTS[1])))
    for number in range(4):
        alone = salted(plan, SALTS[number >= 2])
        for group in range(4):
            key = both.key_number(number, group)
            assert both.directions(key) == alone.directions(key)
    assert len({both.directions(key).key for key in range(16)}) == 16


def test_a_gradient_is_rebuilt_along_the_salted_directions(tiny: Callable[..., Plan]) -> None:
    plan = tiny(*SCALARS, "update.optimizer=sgd", "update.ema=0")
    ends = []
    for salt in (b"", *SALTS):
        trajectory = salted(plan, salt)
        state = apply(trajectory.rule, trajectory.rule.start(np.zeros(N, np.float32)), _outcome(trajectory))
        along = trajectory.directions(3).draw(range(4), 0, N).T @ np.arange(4)
        assert np.array_equal(np.sign(state.weights), -np.sign(along))
        ends.append(state.weights_hash())
    assert len(set(ends)) == 3


def test_a_trajectory_with_the_same_epochs_is_the_same(tiny: Callable[..., Plan]) -> None:
    trajectory = trajectory_of(tiny(*SCALARS), N, block=64)
    assert trajectory.with_epochs(()) is trajectory
    other = trajectory.with_epochs((Epoch(0, SALTS[0]),))
    assert other.block == 64
    assert other.epochs == (Epoch(0, SALTS[0]),)
    assert other.with_epochs(other.epochs) is other


def test_a_clients_directions_are_those_of_its_group(tiny: Callable[..., Plan]) -> None:
    trajectory = salted(tiny(*DRAWN, "secure.group_seeds=own"), SALTS[0])
    for number in range(3):
        for group, clients in enumerate(choose_groups(trajectory, number)):
            assert {key_number_of(trajectory, number, client) for client in clients} == {4 * number + group}
    shared = salted(tiny(*DRAWN), SALTS[0])
    assert {key_number_of(shared, 2, client) for client in range(40)} == {2}


def test_directions_belong_to_a_key_number_and_a_distribution(tiny: Callable[..., Plan]) -> None:
    trajectory = trajectory_of(tiny(*SCALARS), N)
    assert trajectory.directions(3) == trajectory.directions(3)
    assert trajectory.directions(3).key != trajectory.directions(4).key
    assert trajectory.directions(3).distribution.name == "rademacher"
    gaussian = trajectory_of(tiny(*SCALARS, "probe.distribution=gaussian"), N)
    assert gaussian.directions(3).distribution.name == "gaussian"
    assert gaussian.directions(3).key != trajectory.directions(3).key


def _step(update: UpdateSettings, gradient: F32, weights: F32) -> F32:
    transform = optimizer(update)
    return transform.update(transform.init(weights), gradient, weights)[1]


def test_the_gradient_is_clipped_before_weights_decay_and_before_the_step() -> None:
    gradient, weights = np.array([4, -2], np.float32), np.array([10, 20], np.float32)
    step = _step(UpdateSettings(optimizer="sgd", rate=0.5, clip=1.0, weight_decay=0.25), gradient, weights)
    np.testing.assert_array_equal(step, [-0.5 * (1 + 2.5), -0.5 * (-0.5 + 5)])


def test_zero_turns_clip_and_decay_off() -> None:
    gradient, weights = np.array([4, -2], np.float32), np.array([10, 20], np.float32)
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


def test_at_epoch_level_the_server_takes_the_clients_step_as_it_is(tiny: Callable[..., Plan]) -> None:
    trajectory = trajectory_of(tiny(*EPOCH), N)
    state = trajectory.rule.start(np.ones(N, np.float32))
    moved = apply(trajectory.rule, state, _outcome(trajectory))
    expected = 1 - np.arange(N) / (trajectory.ring.scale * 5)
    np.testing.assert_allclose(moved.weights, expected, rtol=1e-6)
    assert moved.optimizer == ()


def test_an_average_of_zero_is_none(tiny: Callable[..., Plan]) -> None:
    trajectory = trajectory_of(tiny(*SCALARS, "update.ema=0"), N)
    state = apply(trajectory.rule, trajectory.rule.start(np.ones(N, np.float32)), _outcome(trajectory))
    assert state.average == ()
    assert trajectory.rule.smooth_weights(state) is state.weights


def test_an_average_follows_the_weights(tiny: Callable[..., Plan]) -> None:
    trajectory = trajectory_of(tiny(*SCALARS), N)
    start = trajectory.rule.start(np.ones(N, np.float32))
    state = apply(trajectory.rule, start, _outcome(trajectory))
    np.testing.assert_allclose(
        trajectory.rule.smooth_weights(state), 0.1 * start.weights + 0.9 * state.weights, rtol=1e-6
    )


def test_a_skipped_round_changes_nothing(tiny: Callable[..., Plan]) -> None:
    trajectory = trajectory_of(tiny(*SCALARS), N)
    state = trajectory.rule.start(np.ones(N, np.float32))
    assert apply(trajectory.rule, state, Outcome(0, "skipped", ())) is state


@pytest.mark.parametrize("settings", [SCALARS, BACKPROP, EPOCH])
@pytest.mark.parametrize(
    "change",
    [{"weight": 0}, {"weight": -1}, {"key": -1}, {"totals": b""}, {"totals": b"abc"}, {"totals": bytes(4 * 99)}],
    ids=str,
)
def test_a_malformed_group_is_refused(
    tiny: Callable[..., Plan], settings: list[str], change: dict[str, object]
) -> None:
    trajectory = trajectory_of(tiny(*settings), N)
    state = trajectory.rule.start(np.ones(N, np.float32))
    apply(trajectory.rule, state, _outcome(trajectory))
    with pytest.raises(MessageError, match="round 0"):
        apply(trajectory.rule, state, _outcome(trajectory, **change))


@pytest.mark.parametrize("settings", [SCALARS, BACKPROP])
def test_an_outcome_of_the_other_kind_or_with_another_number_of_groups_is_refused(
    tiny: Callable[..., Plan], settings: list[str]
) -> None:
    trajectory = trajectory_of(tiny(*settings), N)
    state = trajectory.rule.start(np.ones(N, np.float32))
    good = _outcome(trajectory)
    other = {"scalars": "vector", "vector": "scalars"}[good.kind]
    for bad in (
        Outcome(0, other, good.groups),  # type: ignore[arg-type]
        Outcome(0, good.kind, ()),
        Outcome(0, good.kind, good.groups * 2),
    ):
        with pytest.raises(MessageError, match="round 0"):
            apply(trajectory.rule, state, bad)


GROUPS = {
    "shared mean": [*SCALARS, "federation.clients=9", "secure.groups=3"],
    "shared median": [*SCALARS, "federation.clients=9", "secure.groups=3", "secure.combine=median"],
    "own mean": [*SCALARS, "federation.clients=9", "secure.groups=3", "secure.group_seeds=own"],
    "own median": [
        *SCALARS,
        "federation.clients=9",
        "secure.groups=3",
        "secure.group_seeds=own",
        "secure.combine=median",
    ],
    "epoch median": [*EPOCH, "federation.clients=9", "secure.groups=3", "secure.combine=median"],
    "backprop mean": [*BACKPROP, "federation.clients=9", "secure.groups=3", "secure.group_seeds=own"],
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
def test_shared_directions_and_a_mean_give_the_gradient_of_one_sum(
    tiny: Callable[..., Plan], estimator: list[str]
) -> None:
    ungrouped = trajectory_of(tiny(*estimator, "federation.clients=9"), N)
    many = trajectory_of(tiny(*estimator, "federation.clients=9", "secure.groups=3"), N)
    rows, weights = _rows(many, 3), [5, 20, 7]
    whole = np.sum(rows, axis=0).tolist()
    if estimator is not SCALARS:
        gradients = [
            ungrouped.rule.gradient(_grouped(ungrouped, [whole], [32])),
            many.rule.gradient(_grouped(many, rows, weights)),
        ]
        assert np.array_equal(gradients[0], gradients[1])
        return
    # Directions follow from the digest, which covers the groups: one group of three may hold the whole sum.
    alone = many.rule.gradient(_grouped(many, [whole], [32]))
    assert np.array_equal(alone, many.rule.gradient(_grouped(many, rows, weights)))


def test_groups_with_own_seeds_have_directions_of_their_own(tiny: Callable[..., Plan]) -> None:
    own, shared = (trajectory_of(tiny(*GROUPS[name]), N) for name in ("own mean", "shared mean"))
    keys = [own.key_number(number, group) for number in range(3) for group in range(3)]
    assert len(set(keys)) == 9
    assert len({own.directions(key).key for key in keys}) == 9
    assert {shared.key_number(4, group) for group in range(3)} == {4}


@pytest.mark.parametrize("name", GROUPS)
def test_identical_groups_give_the_gradient_of_one(tiny: Callable[..., Plan], name: str) -> None:
    trajectory = trajectory_of(tiny(*GROUPS[name]), N)
    (row,) = _rows(trajectory, 1)
    gradient = trajectory.rule.gradient(_grouped(trajectory, [row] * 3, [6] * 3))
    alone = [
        trajectory.rule.gradient(Outcome(2, trajectory.plan.outcome_kind, (group,)))
        for group in _grouped(trajectory, [row] * 3, [6] * 3).groups
    ]
    if trajectory.plan.own_seeds:
        combined = np.median if trajectory.plan.secure.combine == "median" else np.mean
        np.testing.assert_allclose(gradient, combined(np.stack(alone).astype(np.float64), axis=0), rtol=1e-5, atol=1e-7)
    else:
        assert np.array_equal(gradient, alone[0])


@pytest.mark.parametrize("name", ["shared median", "own median", "epoch median"])
def test_one_group_of_three_moves_no_median_gradient_beyond_the_others(tiny: Callable[..., Plan], name: str) -> None:
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
def test_groups_that_do_not_fit_the_plan_are_refused(tiny: Callable[..., Plan], name: str) -> None:
    trajectory = trajectory_of(tiny(*GROUPS[name]), N)
    good = _grouped(trajectory, _rows(trajectory, 3), [1, 2, 3])
    state = trajectory.rule.start(np.ones(N, np.float32))
    apply(trajectory.rule, state, good)
    apply(trajectory.rule, state, Outcome(2, good.kind, good.groups[1:]))
    first, *rest = good.groups
    other_key = rest[0].key if trajectory.plan.own_seeds else first.key + 1
    for groups in (
        (),
        (*good.groups, first),
        (Group(other_key, first.totals, first.weight), *rest),
        (Group(first.key, first.totals, 0), *rest),
        (Group(first.key, first.totals[:-4], 1), *rest),
    ):
        with pytest.raises(MessageError, match="round 2"):
            apply(trajectory.rule, state, Outcome(2, good.kind, groups))


def test_the_number_of_threads_changes_no_state(tiny: Callable[..., Plan]) -> None:
    n, digests = 300_001, set()
    for workers in (1, 2, 5):
        trajectory = trajectory_of(tiny(*SCALARS, f"run.workers={workers}"), n)
        assert trajectory.threads == workers
        state = trajectory.rule.start(np.linspace(-1, 1, n, dtype=np.float32))
        for _ in range(2):
            state = apply(trajectory.rule, state, _outcome(trajectory))
        digests.add(state.digest())
    assert len(digests) == 1


def test_a_plan_without_workers_gets_a_thread_per_core(tiny: Callable[..., Plan]) -> None:
    assert trajectory_of(tiny(*SCALARS), N).threads == os.cpu_count()
