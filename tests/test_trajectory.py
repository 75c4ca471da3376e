"""From a plan to values: which ring, which update rule, and which outcomes are refused."""

from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest

from baffle.core.arrays import F32
from baffle.core.messages import Group, Outcome
from baffle.core.ring import Ring
from baffle.core.state import apply
from baffle.errors import MessageError
from baffle.plan import Plan, Update
from baffle.trajectory import Trajectory, optimizer, trajectory

N = 7
SCALARS = ["ring.n_max=20"]
BACKPROP = [*SCALARS, 'estimator="backprop"']
EPOCH = [*SCALARS, 'federation.level="epoch"']


def _outcome(course: Trajectory, **changes: object) -> Outcome:
    group = {"key": 3, "totals": np.arange(course.length, dtype="<i4").tobytes(), "weight": 5} | changes
    return Outcome(0, course.plan.outcome_kind, (Group(**group),))  # type: ignore[arg-type]


def test_scalars_travel_in_a_ring_that_holds_d_max(tiny: Callable[..., Plan]) -> None:
    course = trajectory(tiny(*SCALARS, "ring.d_max=30", "federation.participation=0.6"), N)
    assert course.ring == Ring(clients=2, n_max=20, clip=30.0)
    assert course.length == 4


def test_tiers_stretch_the_ring_by_the_slowest_one(tiny: Callable[..., Plan]) -> None:
    course = trajectory(tiny(*SCALARS, "federation.tiers=[{k=3, share=0.3}, {k=2, share=0.3}]"), N)
    assert course.ring == Ring(clients=3, n_max=20, clip=100.0, stretch=Fraction(2))


@pytest.mark.parametrize("settings", [BACKPROP, EPOCH])
def test_vectors_travel_in_a_ring_that_holds_update_max(tiny: Callable[..., Plan], settings: list[str]) -> None:
    course = trajectory(tiny(*settings, "ring.update_max=9"), N)
    assert course.ring == Ring(clients=3, n_max=20, clip=9.0)
    assert course.length == N


def test_directions_belong_to_a_key_number_and_a_distribution(tiny: Callable[..., Plan]) -> None:
    course = trajectory(tiny(*SCALARS), N)
    assert course.directions(3) == course.directions(3)
    assert course.directions(3).key != course.directions(4).key
    assert course.directions(3).distribution.name == "rademacher"
    gaussian = trajectory(tiny(*SCALARS, "probe.distribution=gaussian"), N)
    assert gaussian.directions(3).distribution.name == "gaussian"
    assert gaussian.directions(3).key != course.directions(3).key


def _step(update: Update, gradient: F32, weights: F32) -> F32:
    transform = optimizer(update)
    return transform.update(transform.init(weights), gradient, weights)[1]


def test_the_gradient_is_clipped_before_weights_decay_and_before_the_step() -> None:
    gradient, weights = np.array([4, -2], np.float32), np.array([10, 20], np.float32)
    found = _step(Update(optimizer="sgd", rate=0.5, clip=1.0, weight_decay=0.25), gradient, weights)
    np.testing.assert_array_equal(found, [-0.5 * (1 + 2.5), -0.5 * (-0.5 + 5)])


def test_zero_turns_clip_and_decay_off() -> None:
    gradient, weights = np.array([4, -2], np.float32), np.array([10, 20], np.float32)
    np.testing.assert_array_equal(_step(Update(optimizer="sgd", rate=0.5), gradient, weights), [-2, 1])


def test_the_plan_names_the_optimizer_and_its_settings() -> None:
    gradient, weights = np.array([4, -2], np.float32), np.zeros(2, np.float32)
    momentum = optimizer(Update(optimizer="momentum", rate=1.0, momentum=0.5))
    state, _ = momentum.update(momentum.init(weights), gradient, weights)
    np.testing.assert_array_equal(momentum.update(state, gradient, weights)[1], [-6, 3])
    adam = optimizer(Update(optimizer="adam", rate=0.25, betas=(0.5, 0.75)))
    state, step = adam.update(adam.init(weights), gradient, weights)
    np.testing.assert_allclose(step, [-0.25, 0.25], rtol=1e-6)
    _, step = adam.update(state, -gradient, weights)
    mean, square = -0.25 / 0.75 * gradient, gradient**2
    np.testing.assert_allclose(step, -0.25 * mean / np.sqrt(square), rtol=1e-6)


def test_at_epoch_level_the_server_takes_the_clients_step_as_it_is(tiny: Callable[..., Plan]) -> None:
    course = trajectory(tiny(*EPOCH), N)
    state = course.rule.start(np.ones(N, np.float32))
    moved = apply(course.rule, state, _outcome(course))
    expected = 1 - np.arange(N) / (course.ring.scale * 5)
    np.testing.assert_allclose(moved.weights, expected, rtol=1e-6)
    assert moved.optimizer == ()


def test_an_average_of_zero_is_none(tiny: Callable[..., Plan]) -> None:
    course = trajectory(tiny(*SCALARS, "update.ema=0"), N)
    state = apply(course.rule, course.rule.start(np.ones(N, np.float32)), _outcome(course))
    assert state.average == ()
    assert course.rule.smooth_weights(state) is state.weights


def test_an_average_follows_the_weights(tiny: Callable[..., Plan]) -> None:
    course = trajectory(tiny(*SCALARS), N)
    start = course.rule.start(np.ones(N, np.float32))
    state = apply(course.rule, start, _outcome(course))
    np.testing.assert_allclose(course.rule.smooth_weights(state), 0.1 * start.weights + 0.9 * state.weights, rtol=1e-6)


def test_a_skipped_round_changes_nothing(tiny: Callable[..., Plan]) -> None:
    course = trajectory(tiny(*SCALARS), N)
    state = course.rule.start(np.ones(N, np.float32))
    assert apply(course.rule, state, Outcome(0, "skipped", ())) is state


@pytest.mark.parametrize("settings", [SCALARS, BACKPROP, EPOCH])
@pytest.mark.parametrize(
    "change",
    [{"weight": 0}, {"weight": -1}, {"key": -1}, {"totals": b""}, {"totals": b"abc"}, {"totals": bytes(4 * 99)}],
    ids=str,
)
def test_a_malformed_group_is_refused(
    tiny: Callable[..., Plan], settings: list[str], change: dict[str, object]
) -> None:
    course = trajectory(tiny(*settings), N)
    state = course.rule.start(np.ones(N, np.float32))
    apply(course.rule, state, _outcome(course))
    with pytest.raises(MessageError, match="round 0"):
        apply(course.rule, state, _outcome(course, **change))


@pytest.mark.parametrize("settings", [SCALARS, BACKPROP])
def test_an_outcome_of_the_other_kind_or_with_another_number_of_groups_is_refused(
    tiny: Callable[..., Plan], settings: list[str]
) -> None:
    course = trajectory(tiny(*settings), N)
    state = course.rule.start(np.ones(N, np.float32))
    good = _outcome(course)
    other = {"scalars": "vector", "vector": "scalars"}[good.kind]
    for bad in (
        Outcome(0, other, good.groups),  # type: ignore[arg-type]
        Outcome(0, good.kind, ()),
        Outcome(0, good.kind, good.groups * 2),
    ):
        with pytest.raises(MessageError, match="round 0"):
            apply(course.rule, state, bad)
