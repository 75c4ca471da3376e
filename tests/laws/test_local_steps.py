"""Several steps in a round: what is rebuilt from the clients' sum is the mean of where the clients went."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from baffle.core import update
from baffle.core.arrays import F32, F64
from baffle.core.directions import Support
from baffle.core.messages import Group, Outcome
from baffle.core.probe import moves
from baffle.core.ring import EXTRAS, RingVector, add
from baffle.core.state import ServerState, apply
from baffle.core.update import FLOOR, State, adam, adam_by_layers
from baffle.errors import RefusalError
from baffle.plan import Plan, load
from baffle.simulation import simulate
from baffle.trajectory import Trajectory, trajectory_of
from tests.support.one_client import SAMPLES, Bowl, Setting

N, K, CLIENTS = 12, 6, 3
HEAD = ("probe.head=exact", "probe.head_at=[8, 12, 0, 0]")
LAYERS = ("update.moments=layers", "update.layers=[[0, 5, 9, 12], [5, 9, 0, 0]]")

OPTIMIZERS = {
    "sgd": ("update.optimizer=sgd",),
    "momentum": ("update.optimizer=momentum",),
    "adam": ("update.optimizer=adam", "update.weight_decay=0.1"),
    "adam by layers": ("update.optimizer=adam", *LAYERS),
}
SHAPES: dict[str, tuple[str, ...]] = {
    "dense": (),
    "rademacher": ("probe.distribution=rademacher",),
    "exact head": HEAD,
    "tiers": ("federation.tiers=[{k=2, share=0.34}, {k=3, share=0.34}]",),
    "layers": ("probe.supports=layers", "probe.layout=[[0, 5, 0, 0, 2], [5, 12, 0, 0, 4]]"),
    "layers and an exact head": ("probe.supports=layers", "probe.layout=[[0, 5, 0, 0, 2], [5, 8, 0, 0, 4]]", *HEAD),
    "groups": ("federation.clients=6", "secure.groups=2", "secure.floor=2"),
    "own groups": ("federation.clients=6", "secure.groups=2", "secure.floor=2", "secure.group_seeds=own"),
}


def test_every_optimizer_is_tried() -> None:
    assert update.OPTIMIZERS.keys() <= OPTIMIZERS.keys()


def trajectory_for(steps: int, *changes: str) -> Trajectory:
    plan = (f"federation.clients={CLIENTS}", f"probe.k={K}", "secure.floor=2", "ring.n_max=20", "ring.d_max=4")
    local = (f"federation.local_steps={steps}", "federation.warm_up=2", "federation.batch=4")
    return trajectory_of(load("digits", [*plan, *local, *changes]), N)


def sent(trajectory: Trajectory, random: np.random.Generator, number: int, weight: int) -> RingVector:
    """What a client may send in a round: some scalars beyond the bound, and a K of its own."""
    steps, k = trajectory.steps_in(number), len(trajectory.supports)
    tiers = [k, *(tier.k for tier in trajectory.plan.federation.tiers)]
    length, head = trajectory.length // trajectory.plan.federation.local_steps, trajectory.plan.head_size
    few = int(random.choice(tiers))
    rows = [
        trajectory.ring.encode(random.normal(0, 2, few), length, weight, 1.0, 0, random.normal(0, 2, head))
        for _ in range(steps)
    ]
    return trajectory.ring.joined(rows, trajectory.length)


def outcome(trajectory: Trajectory, number: int, sums: list[list[RingVector]]) -> Outcome:
    """The outcome of a round with these vectors in each of its groups."""
    totals = [trajectory.ring.decode(add(vectors), len(vectors)) for vectors in sums]
    groups = (
        Group(trajectory.key_number(number, group), total.totals.astype("<i4").tobytes(), total.weight)
        for group, total in enumerate(totals)
    )
    return Outcome(number, "scalars", tuple(groups))


def alone(trajectory: Trajectory, number: int, group: int, vector: RingVector) -> Outcome:
    total = trajectory.ring.decode(vector, 1)
    key = trajectory.key_number(number, group)
    return Outcome(number, "scalars", (Group(key, total.totals.astype("<i4").tobytes(), total.weight),))


def begun(trajectory: Trajectory, random: np.random.Generator) -> ServerState:
    """The state after the rounds of one step."""
    state = trajectory.rule.start(random.normal(size=N).astype(np.float32))
    for number in range(2):
        vectors = [[sent(trajectory, random, number, 5)] * 2 for _ in range(trajectory.plan.secure.groups)]
        state = apply(trajectory.rule, state, outcome(trajectory, number, vectors))
    return state


@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from(list(OPTIMIZERS)),
    st.sampled_from(list(SHAPES)),
    st.integers(2, 8),
    st.lists(st.integers(1, 20), min_size=2, max_size=4),
    st.integers(0, 2**32),
)
def test_the_sum_leads_to_the_mean_of_the_clients_weights(
    optimizer: str, shape: str, steps: int, weights: list[int], seed: int
) -> None:
    random = np.random.default_rng(seed)
    trajectory = trajectory_for(steps, *OPTIMIZERS[optimizer], *SHAPES[shape])
    state, number = begun(trajectory, random), 2
    assert trajectory.steps_in(number) == steps
    sums = [
        [sent(trajectory, random, number, weight) for weight in weights] for _ in range(trajectory.plan.secure.groups)
    ]
    together = apply(trajectory.rule, state, outcome(trajectory, number, sums))
    ends, counts = list[ServerState](), list[int]()
    for group, vectors in enumerate(sums):
        for vector, weight in zip(vectors, weights, strict=True):
            ends.append(apply(trajectory.rule, state, alone(trajectory, number, group, vector)))
            counts.append(weight)
    for found, parts in (
        (together.weights, [end.weights for end in ends]),
        *((together.optimizer[0], [end.optimizer[0] for end in ends]) for _ in together.optimizer[:1]),
    ):
        mean: F64 = np.average(np.array(parts, np.float64), axis=0, weights=counts)
        spread = 1 + max(float(np.abs(part).max()) for part in parts)
        np.testing.assert_allclose(found, mean, atol=2e-6 * steps * spread)
    assert len({end.weights.tobytes() for end in ends}) > 1


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_step_of_unfrozen_adam_would_not_be_the_mean(optimizer: str) -> None:
    """The law above notices an update that is not linear."""
    trajectory = trajectory_for(4, *OPTIMIZERS[optimizer])
    usual = replace(trajectory.rule, optimizer=trajectory.rule.optimizer._replace(freeze=None))
    random = np.random.default_rng(0)
    state = begun(trajectory, random)
    vectors = [sent(trajectory, random, 2, 5) for _ in range(3)]
    together = apply(usual, state, outcome(trajectory, 2, [vectors])).weights
    ends = [apply(usual, state, alone(trajectory, 2, 0, vector)).weights for vector in vectors]
    apart = float(np.abs(np.mean(ends, axis=0, dtype=np.float64) - together).max())
    assert (apart > 1e-3) == optimizer.startswith("adam")


class Watched(Bowl):
    """Remembers the weights of every forward pass."""

    def on(self, batch: object) -> Callable[[F32], float]:
        loss = super().on(batch)  # type: ignore[arg-type]
        seen = self.seen = getattr(self, "seen", list[F32]())

        def watched(weights: F32) -> float:
            seen.append(weights.copy())
            return loss(weights)

        return watched


@pytest.fixture
def plan_for(tiny: Callable[..., Plan]) -> Callable[..., Plan]:
    local = ("federation.local_steps=3", "federation.warm_up=2", "federation.batch=6", "ring.n_max=20")
    return lambda *changes: tiny(*local, *changes)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_client_probes_where_its_own_vector_leads(plan_for: Callable[..., Plan], optimizer: str) -> None:
    """Its weights at each step are those that the rule gives if the client's vector is the whole sum. From there it
    moves along that step's directions."""
    runtime = Watched(N)
    setting = Setting(plan_for(*OPTIMIZERS[optimizer]), runtime)
    trajectory, rule, k = setting.trajectory, setting.trajectory.rule, setting.worker.k
    state = setting.state
    for number in range(2):
        vector = setting.worker.vector(number, state.weights, state.optimizer)
        state = apply(rule, state, alone(trajectory, number, 0, vector))
    runtime.seen.clear()
    vector = setting.worker.vector(2, state.weights, state.optimizer)
    assert len(runtime.seen) == 3 * (k + 1)
    frozen = rule.optimizer._replace(update=rule.optimizer.frozen(state.optimizer))
    for step in range(3):
        so_far = replace(rule, optimizer=frozen, steps=lambda _round, step=step: step)  # type: ignore[misc]
        expected = apply(so_far, state, alone(trajectory, 2, 0, vector)).weights
        here, *moved = runtime.seen[step * (k + 1) : (step + 1) * (k + 1)]
        assert np.array_equal(here, expected)
        scratch, sigma = here.copy(), trajectory.plan.probe.sigma
        along = moves(scratch, here, trajectory.directions(2, step), trajectory.supports, sigma)
        assert np.array_equal(moved, [scratch.copy() for _ in along])
    assert not np.array_equal(runtime.seen[0], runtime.seen[k + 1])


def test_every_step_has_the_next_batch_and_directions_of_its_own(plan_for: Callable[..., Plan]) -> None:
    runtime = Bowl(N)
    setting = Setting(plan_for("update.optimizer=sgd"), runtime)
    for number in range(12):
        setting.worker.vector(number, setting.state.weights)
    assert len(runtime.batches) == 2 + 10 * 3 == setting.trajectory.steps_before(12)
    laps = np.concatenate(runtime.batches)[: 9 * SAMPLES].reshape(9, SAMPLES)
    for lap in laps:
        assert sorted(lap) == list(range(SAMPLES))
    keys = {setting.trajectory.directions(number, step).key for number in range(12) for step in range(3)}
    assert len(keys) == 36


def test_rounds_of_one_step_are_those_of_a_plan_without_local_steps(
    tiny: Callable[..., Plan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Plan, "trajectory_digest", lambda _: bytes(32))  # so that both draw the same directions
    one = simulate(tiny("rounds=5", "secure.mode=on"), tmp_path / "one")
    plan = tiny("rounds=5", "secure.mode=on", "federation.local_steps=4", "federation.warm_up=5")
    assert simulate(plan, tmp_path / "many")["weights_sha256"] == one["weights_sha256"]


@pytest.mark.parametrize("when", [1, 5, 9])
@pytest.mark.parametrize("private", [(), ("federation.weighting=uniform", "privacy.noise=1e-4", "privacy.clip=9")])
def test_a_loss_that_is_not_finite_costs_nobody_time_and_sends_zeros(
    plan_for: Callable[..., Plan], when: int, private: tuple[str, ...]
) -> None:
    plan = plan_for("probe.k=4", *private, *(["privacy.sharers=3"] if private else []))
    runtime = Bowl(N, loss=float("nan"), when=when)
    setting = Setting(plan, runtime)
    state, ring, length = setting.state, setting.trajectory.ring, setting.trajectory.length
    worker = replace(setting.worker, random=bytes)
    vector = worker.vector(2, state.weights, state.optimizer)
    assert runtime.forwards == 3 * 5
    if not private:
        assert np.array_equal(vector, ring.nothing(length, SAMPLES))
    assert vector[-EXTRAS] == (1 if private else SAMPLES)
    quiet = replace(setting.worker, random=bytes, borrow=Setting(plan, Bowl(N, loss=float("nan"))).worker.borrow)
    assert np.array_equal(vector, quiet.vector(2, state.weights, state.optimizer))


def test_without_the_optimizers_state_a_client_takes_no_part(plan_for: Callable[..., Plan]) -> None:
    setting = Setting(plan_for(), Bowl(N))
    setting.worker.vector(1, setting.state.weights)
    with pytest.raises(RefusalError, match="needs the optimizer's state"):
        setting.worker.vector(2, setting.state.weights)


def test_adams_second_moments_have_a_floor_for_a_round() -> None:
    layers = [Support(0, 2), Support(2, 4)]
    for optimizer, square in (
        (adam(0.1), np.array([0, 1, 4, 1], np.float32)),
        (adam_by_layers(layers, 0.1), np.array([0, 4], np.float32)),
    ):
        half = np.full(1, 0.5, np.float32)
        state: State = (np.zeros(4, np.float32), square, half, half)
        (mean, later, *_), step = optimizer.frozen(state)(state, np.ones(4, np.float32), np.zeros(4, np.float32))
        least = np.sqrt(FLOOR * square.mean() / 0.5)
        assert step[0] == pytest.approx(-0.1 * (mean[0] / (1 - 0.45)) / least)
        assert step[2] == pytest.approx(-0.1 * (mean[2] / (1 - 0.45)) / np.sqrt(4 / 0.5))
        assert later[0] == pytest.approx(0.01)  # what is remembered has none


def test_before_there_are_second_moments_a_round_moves_no_weight() -> None:
    trajectory = trajectory_for(3)
    random = np.random.default_rng(0)
    state = trajectory.rule.start(random.normal(size=N).astype(np.float32))
    after = apply(trajectory.rule, state, outcome(trajectory, 2, [[sent(trajectory, random, 2, 5)]]))
    assert np.array_equal(after.weights, state.weights)
    assert after.optimizer[1].any()
