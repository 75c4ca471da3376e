"""The half of a client that computes: which samples it uses, what it sends, how much it weighs, alone or stacked."""

from collections.abc import Callable
from dataclasses import replace
from itertools import permutations, product
from pathlib import Path

import numpy as np
import pytest

from baffle.client.worker import Stack, Worker, forwards_of
from baffle.core.arrays import F32
from baffle.core.directions import DISTRIBUTIONS, Directions
from baffle.core.messages import Contribution, Group, Outcome
from baffle.core.ports import Batch
from baffle.core.probe import SCHEMES
from baffle.core.ring import EXTRAS, RingVector, add
from baffle.federation import workers_of
from baffle.plan import Plan
from baffle.schedule import choose_clients
from baffle.task.load import Runtimes, Task, load_task
from baffle.trajectory import Trajectory, trajectory_of
from tests.support.one_client import BACKPROP, CENTRAL, EPOCH, FORWARD, OWN, SAMPLES, STEPS, Bowl, Setting, plan_for


def test_every_sample_is_used_once_before_any_is_used_twice(tiny: Callable[..., Plan]) -> None:
    runtime = Bowl(5)
    setting = Setting(plan_for(tiny), runtime)
    for number in range(SAMPLES):
        setting.sent(number)
    assert {len(batch) for batch in runtime.batches} == {6}
    used = np.concatenate(runtime.batches).reshape(6, SAMPLES)
    for lap in used:
        assert sorted(lap) == list(range(SAMPLES))
    assert used[0].tolist() != used[1].tolist()


def test_clients_use_their_own_samples_in_their_own_order(tiny: Callable[..., Plan]) -> None:
    first, second = Bowl(5), Bowl(5)
    Setting(plan_for(tiny), first, number=0).sent()
    Setting(plan_for(tiny), second, number=1).sent()
    assert first.batches != second.batches
    for batch in (0, 7, 12):
        few = Bowl(5)
        Setting(plan_for(tiny, f"federation.batch={batch}"), few, held=7).sent(3)
        assert [sorted(used) for used in few.batches] == [list(range(7))]


def test_an_epoch_goes_through_all_samples_in_a_new_order(tiny: Callable[..., Plan]) -> None:
    runtime = Bowl(5)
    setting = Setting(plan_for(tiny, *EPOCH), runtime)
    setting.sent(4)
    assert [len(batch) for batch in runtime.batches] == [6, 6, 6, 2] * 3
    laps = np.concatenate(runtime.batches).reshape(3, SAMPLES)
    for lap in laps:
        assert sorted(lap) == list(range(SAMPLES))
    assert len({tuple(lap) for lap in laps}) == 3
    runtime.batches.clear()
    setting.sent(5)
    assert np.concatenate(runtime.batches)[:SAMPLES].tolist() != laps[0].tolist()


@pytest.mark.parametrize(("epochs", "batch"), [(1, 0), (3, 6), (3, 20)])
@pytest.mark.parametrize("estimator", [FORWARD, BACKPROP])
def test_steps_and_epochs_of_the_same_length_give_the_same_reply(
    tiny: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch, epochs: int, batch: int, estimator: list[str]
) -> None:
    monkeypatch.setattr(Plan, "trajectory_digest", lambda _: bytes(32))  # so that both draw the same directions
    settings = [*estimator, 'federation.level="epoch"', f"federation.batch={batch}"]
    in_epochs, in_steps = Bowl(5), Bowl(5)
    by_epochs = Setting(plan_for(tiny, *settings, f"federation.epochs={epochs}"), in_epochs)
    steps = epochs * (-(-SAMPLES // batch) if batch else 1)
    by_steps = Setting(plan_for(tiny, *settings, f"federation.steps={steps}"), in_steps)
    assert by_steps.client.answer(by_steps.request(4)) == by_epochs.client.answer(by_epochs.request(4))
    assert in_epochs.batches == in_steps.batches


@pytest.mark.parametrize(("steps", "sizes"), [(1, [6]), (3, [6, 6, 6]), (6, [6, 6, 6, 2, 6, 6])])
def test_steps_go_through_the_samples_lap_after_lap(tiny: Callable[..., Plan], steps: int, sizes: list[int]) -> None:
    runtime = Bowl(5)
    Setting(plan_for(tiny, 'federation.level="epoch"', f"federation.steps={steps}"), runtime).sent(4)
    assert [len(batch) for batch in runtime.batches] == sizes
    first = np.concatenate(runtime.batches[:4]).tolist()
    assert len(set(first)) == len(first)


@pytest.mark.parametrize(
    ("level", "scheme"),
    [*product([[], EPOCH, STEPS], [FORWARD, CENTRAL, BACKPROP]), *product([OWN], [FORWARD, CENTRAL])],
)
def test_forwards_are_counted_right(tiny: Callable[..., Plan], level: list[str], scheme: list[str]) -> None:
    for batch, held in ((0, 20), (6, 20), (6, 3)):
        runtime = Bowl(5)
        setting = Setting(plan_for(tiny, *level, *scheme, f"federation.batch={batch}"), runtime, held=held)
        setting.sent(2)
        assert forwards_of(setting.trajectory, 4, held) == runtime.forwards


def test_forwards_of_a_slow_client(tiny: Callable[..., Plan]) -> None:
    runtime = Bowl(5)
    setting = Setting(plan_for(tiny, "federation.tiers=[{k=2, share=0.5}]"), runtime, k=2)
    setting.sent()
    assert forwards_of(setting.trajectory, 2, SAMPLES) == runtime.forwards == 3


@pytest.mark.parametrize("scheme", [FORWARD, CENTRAL])
def test_scalars_are_the_directional_derivatives_of_the_rounds_directions(
    tiny: Callable[..., Plan], scheme: list[str]
) -> None:
    plan = plan_for(tiny, "federation.batch=0", *scheme)
    setting = Setting(plan, Bowl(5))
    everything = Batch(np.zeros((SAMPLES, 1), np.float32), np.arange(SAMPLES))
    for number in (0, 3):
        directions = setting.trajectory.directions(number)
        expected = SCHEMES[plan.probe.scheme](
            Bowl(5).on(everything), setting.state.weights, directions, setting.trajectory.supports, plan.probe.sigma
        )
        np.testing.assert_allclose(setting.values(number), expected.scalars, atol=1e-5)
        assert setting.sent(number).loss == pytest.approx(expected.base, abs=1e-4)


@pytest.mark.parametrize(("scheme", "distribution"), [(FORWARD, "rademacher"), (CENTRAL, "sphere")])
def test_with_own_seeds_a_client_sends_the_mean_of_its_scalars_times_its_own_directions(
    tiny: Callable[..., Plan], scheme: list[str], distribution: str
) -> None:
    plan = plan_for(tiny, "federation.batch=0", *OWN, *scheme, f"probe.distribution={distribution}")
    everything = Batch(np.zeros((SAMPLES, 1), np.float32), np.arange(SAMPLES))
    for client, number in ((0, 0), (2, 0), (2, 3)):
        setting = Setting(plan, Bowl(5), number=client)
        key = setting.trajectory.seeds(number).key("local", number, client, 0)
        directions, supports = Directions(key, DISTRIBUTIONS[distribution]), setting.trajectory.supports
        probed = SCHEMES[plan.probe.scheme](
            Bowl(5).on(everything), setting.state.weights, directions, supports, plan.probe.sigma
        )
        z = directions.draw(range(4), 0, 5) * directions.distribution.unit
        np.testing.assert_allclose(setting.values(number), probed.scalars @ z / 4, atol=1e-5)


def test_in_any_order_own_estimates_add_up_to_their_weighted_mean(tiny: Callable[..., Plan]) -> None:
    plan = plan_for(tiny, *OWN, "federation.clients=4")
    settings = [Setting(plan, Bowl(5), number=number, held=5 * (number + 1)) for number in range(4)]
    replies = [setting.reply() for setting in settings]
    vectors = [reply.elements().astype(np.uint32) for reply in replies if isinstance(reply, Contribution)]
    sums = [settings[0].trajectory.ring.decode(add(order), 4) for order in permutations(vectors)]
    assert len({total.totals.tobytes() for total in sums}) == 1
    group = Group(0, sums[0].totals.astype("<i4").tobytes(), sums[0].weight)
    gradient = settings[0].trajectory.rule.gradient(Outcome(0, "vector", (group,)))
    expected = np.average([setting.values() for setting in settings], axis=0, weights=[5, 10, 15, 20])
    np.testing.assert_allclose(gradient, expected, atol=1e-6)


def test_a_slow_client_sends_a_prefix_that_counts_more(tiny: Callable[..., Plan]) -> None:
    tiers = "federation.tiers=[{k=2, share=0.5}]"
    fast, slow = Setting(plan_for(tiny, tiers), Bowl(5)), Setting(plan_for(tiny, tiers), Bowl(5), k=2)
    np.testing.assert_allclose(slow.values()[:2], 2 * fast.values()[:2], atol=1e-4)
    np.testing.assert_array_equal(slow.values()[2:], 0)
    assert slow.sent().weight == fast.sent().weight


@pytest.mark.parametrize(
    ("settings", "held", "weight"),
    [
        ([], 20, 20),
        ([], 7, 7),
        (["ring.n_max=12"], 20, 12),
        (["federation.weighting=uniform", "ring.n_max=1"], 20, 1),
        (["federation.weighting=uniform", "ring.n_max=20"], 7, 1),
    ],
)
@pytest.mark.parametrize("level", [[], EPOCH])
def test_the_weight_of_a_client_is_its_number_of_samples_or_one(
    tiny: Callable[..., Plan], level: list[str], settings: list[str], held: int, weight: int
) -> None:
    assert Setting(plan_for(tiny, *level, *settings), Bowl(5), held=held).sent().weight == weight


def test_backpropagation_sends_the_gradient(tiny: Callable[..., Plan]) -> None:
    setting = Setting(plan_for(tiny, *BACKPROP, "federation.batch=0"), Bowl(5))
    expected = 2 * (setting.state.weights - np.mean(np.arange(SAMPLES)) / SAMPLES) / 5
    np.testing.assert_allclose(setting.values(), expected, atol=1e-6)


@pytest.mark.parametrize("estimator", [BACKPROP, CENTRAL])
def test_one_local_step_sends_minus_the_weight_change(tiny: Callable[..., Plan], estimator: list[str]) -> None:
    settings = ["federation.batch=0", 'federation.level="epoch"', 'update.optimizer="sgd"', "update.rate=0.5"]
    setting = Setting(plan_for(tiny, *estimator, *settings, "probe.k=2000"), Bowl(5))
    slope = 2 * (setting.state.weights - np.mean(np.arange(SAMPLES)) / SAMPLES) / 5
    exact = estimator is BACKPROP
    np.testing.assert_allclose(setting.values(), 0.5 * slope, atol=1e-6 if exact else 0.05)


def test_local_steps_follow_each_other_with_a_fresh_optimizer_every_round(tiny: Callable[..., Plan]) -> None:
    settings = ["federation.batch=0", *EPOCH, 'update.optimizer="momentum"', "update.rate=0.5", "update.momentum=0.5"]
    setting = Setting(plan_for(tiny, *BACKPROP, *settings), Bowl(5))
    centre = np.mean(np.arange(SAMPLES)) / SAMPLES
    here, velocity = setting.state.weights.astype(np.float64), np.zeros(5)
    for _ in range(3):
        velocity = 0.5 * velocity + 2 * (here - centre) / 5
        here = here - 0.5 * velocity
    for number in (0, 1):
        np.testing.assert_allclose(setting.values(number), setting.state.weights - here, atol=1e-6)


def test_local_directions_belong_to_round_client_and_step(tiny: Callable[..., Plan]) -> None:
    plan = plan_for(tiny, 'federation.level="epoch"', "federation.batch=0")
    first, second = Setting(plan, Bowl(5), number=0), Setting(plan, Bowl(5), number=1)
    assert first.values(0).tolist() != second.values(0).tolist()
    assert first.values(0).tolist() != first.values(1).tolist()


@pytest.mark.parametrize("settings", [FORWARD, OWN, EPOCH, STEPS, BACKPROP, [*BACKPROP, *EPOCH]])
def test_a_reply_can_be_computed_again(tiny: Callable[..., Plan], settings: list[str]) -> None:
    plan = plan_for(tiny, *settings)
    replies = {Setting(plan, Bowl(5)).client.answer(Setting(plan, Bowl(5)).request(number)) for number in (3, 3, 4)}
    assert len(replies) == 2


@pytest.mark.parametrize(
    ("level", "setting", "clipped"),
    [([], "d_max=1e-6", 4), (OWN, "d_max=1e-6", 4), (OWN, "update_max=1e-9", 0), (EPOCH, "update_max=1e-6", 5)],
)
def test_clipped_values_are_counted(tiny: Callable[..., Plan], level: list[str], setting: str, clipped: int) -> None:
    assert Setting(plan_for(tiny, *level), Bowl(5)).sent().clipped == 0
    assert Setting(plan_for(tiny, *level, f"ring.{setting}"), Bowl(5)).sent().clipped == clipped


def _keys_used(plan: Plan, number: int, rounds: int) -> list[bytes]:
    """The keys that a client's samples are augmented with, in order."""
    setting, used = Setting(plan, Bowl(5), number=number), list[bytes]()

    def augment(samples: F32, key: bytes) -> F32:
        used.append(key)
        return samples

    worker = replace(setting.worker, data=replace(setting.worker.data, augment=augment))
    client = replace(setting.client, worker=worker)
    for round_number in range(rounds):
        client.answer(setting.request(round_number))
    return used


@pytest.mark.parametrize(
    ("level", "steps"), [(["federation.batch=8"], 1), (["federation.batch=0"], 1), ([*EPOCH, "federation.batch=10"], 6)]
)
def test_every_step_of_every_client_and_round_is_augmented_in_its_own_way(
    tiny: Callable[..., Plan], level: list[str], steps: int
) -> None:
    plan = plan_for(tiny, *level, "task.augment=true")
    first, second = _keys_used(plan, 0, 2), _keys_used(plan, 1, 2)
    assert len(first) == len(second) == 2 * steps
    assert len(set(first + second)) == 4 * steps
    assert first == _keys_used(plan, 0, 2)
    assert _keys_used(plan_for(tiny, *level), 0, 2) == []


def test_what_is_random_in_training_belongs_to_round_and_client(tiny: Callable[..., Plan]) -> None:
    def seeds(number: int) -> list[int | None]:
        runtime = Bowl(5)
        setting = Setting(plan_for(tiny, *BACKPROP), runtime, number=number)
        for round_number in (0, 1):
            setting.reply(round_number)
        return runtime.seeds

    assert seeds(0) == seeds(0)
    assert len({*seeds(0), *seeds(1)}) == 4


MakePlan = Callable[..., Plan]
STACKED = ("probe.stacked=true", "federation.clients=7", "federation.batch=5", "secure.mode=off")
TIERS = "federation.tiers=[{k=3, share=0.4}]"
LENET = 'task.model={name="lenet", channels=[2, 3], norm="group"}'

WAYS = {
    "central, small micro-batches": ["probe.scheme=central", "probe.micro_batch=4"],
    "on the sphere": ["probe.distribution=sphere", "federation.participation=0.5"],
    "outer, one pass each": ["probe.distribution=outer", "probe.together=1"],
    "of one layer each": [LENET, "probe.supports=layers"],
    "outer, in tiers": [TIERS, "probe.distribution=outer", "probe.k=9"],
    "groups with own seeds": ["secure.groups=2", "secure.group_seeds=own"],
    "all of their samples": ["federation.batch=0", "federation.partition=dirichlet"],
    "tiers on ONNX Runtime": [TIERS, "task.init=numpy", "run.runtime=onnx"],
}


def setting_of(task: Task, threads: int = 2) -> tuple[Trajectory, dict[int, Worker], Runtimes]:
    trajectory = replace(trajectory_of(task.plan, len(task.initial_weights())), threads=threads)
    runtimes = Runtimes(task, threads)
    return trajectory, dict(enumerate(workers_of(task, trajectory, runtimes.borrow))), runtimes


def values(trajectory: Trajectory, vector: RingVector) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """A contribution's values and its extras, as numbers; values in units of what a scalar is, times the weight."""
    signed = vector.view(np.int32).astype(np.float64)
    return np.concatenate([signed[:-EXTRAS] / trajectory.ring.scale / signed[-EXTRAS], signed[-EXTRAS:-1]])


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_each_client_contributes_what_it_would_alone(tiny: MakePlan, way: list[str]) -> None:
    task = load_task(tiny(*STACKED, *way))
    trajectory, workers, runtimes = setting_of(task)
    weights = task.initial_weights()
    with task.model.one_thread_each():
        stacked = Stack(trajectory, workers, runtimes.borrow).vectors(3, weights)
        alone = {client: workers[client].vector(3, weights) for client in choose_clients(trajectory, 3)}
    assert stacked.keys() == alone.keys()
    sigma, scale = task.plan.probe.sigma, trajectory.ring.scale
    for client, vector in alone.items():
        # Losses agree to 1e-5, of which one difference of two makes a scalar; and a ring's step is added.
        ours, theirs = values(trajectory, stacked[client]), values(trajectory, vector)
        np.testing.assert_allclose(ours, theirs, atol=1e-5 * sigma / 1e-3 + 4 / scale, rtol=2e-3)


@pytest.mark.parametrize("settings", [(), ("probe.distribution=outer",), ("run.runtime=onnx", "task.init=numpy")])
def test_no_bit_depends_on_the_number_of_threads(tiny: MakePlan, settings: tuple[str, ...]) -> None:
    task = load_task(tiny(*STACKED, "probe.micro_batch=4", *settings))
    weights = task.initial_weights()
    with task.model.one_thread_each():
        found = []
        for threads in (1, 2, 5):
            trajectory, workers, runtimes = setting_of(task, threads)
            found.append(Stack(trajectory, workers, runtimes.borrow).vectors(0, weights))
    for other in found[1:]:
        assert {client: vector.tobytes() for client, vector in other.items()} == {
            client: vector.tobytes() for client, vector in found[0].items()
        }


def test_a_round_is_computed_once_and_without_those_who_are_away(tiny: MakePlan) -> None:
    task = load_task(tiny(*STACKED))
    trajectory, workers, runtimes = setting_of(task)
    rounds = list[int]()

    class Counting(Stack):
        def vectors(self, round_number: int, weights: object) -> dict[int, RingVector]:
            rounds.append(round_number)
            return super().vectors(round_number, weights)  # type: ignore[arg-type]

    stack = Counting(trajectory, workers, runtimes.borrow, lambda _round, client: client == 2)
    weights = task.initial_weights()
    with task.model.one_thread_each():
        for number in (0, 1):
            for client in (0, 1, 3, 6):
                stack.vector(client, number, weights)
        with pytest.raises(KeyError):
            stack.vector(2, 1, weights)
    assert rounds == [0, 1]


def test_one_client_whose_loss_is_not_finite_sends_nothing_and_the_others_do_not_notice(
    tiny: MakePlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken.py").write_text(
        "import torch\ndef loss(outputs, labels):\n"
        "    each = torch.nn.functional.cross_entropy(outputs, labels, reduction='none')\n"
        "    return torch.where(labels > 4, torch.full_like(each, float('inf')), each)\n"
    )
    monkeypatch.chdir(tmp_path)
    task = load_task(tiny(*STACKED, "task.loss=broken:loss", "federation.batch=1", 'task.metrics=["loss"]'))
    trajectory, workers, runtimes = setting_of(task)
    weights = task.initial_weights()
    with task.model.one_thread_each():
        vectors = Stack(trajectory, workers, runtimes.borrow).vectors(0, weights)
    labels = {client: worker.batch_of_round(0).y for client, worker in workers.items()}
    silent = {client for client, vector in vectors.items() if vector[-2] == trajectory.length}
    assert silent == {client for client, own in labels.items() if (own > 4).any()}
    assert 0 < len(silent) < len(workers)
