"""Clients whose samples are stacked: each contributes what it would alone, up to rounding."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from baffle.client.stack import Stack
from baffle.client.worker import Worker
from baffle.core.ring import EXTRAS, RingVector
from baffle.plan import Plan
from baffle.schedule import choose_clients
from baffle.task.load import Runtimes, Task, load_task
from baffle.trajectory import Trajectory, trajectory_of

MakePlan = Callable[..., Plan]
STACKED = ("probe.stacked=true", "federation.clients=7", "federation.batch=5", "secure.mode=off")
TIERS = "federation.tiers=[{k=3, share=0.4}]"
LENET = 'task.model={name="lenet", channels=[2, 3], norm="group"}'

WAYS = {
    "gaussian": [],
    "rademacher, central": ["probe.distribution=rademacher", "probe.scheme=central"],
    "on the sphere": ["probe.distribution=sphere"],
    "outer": ["probe.distribution=outer", "probe.k=9"],
    "outer, one pass each": ["probe.distribution=outer", "probe.together=1"],
    "of one layer each": [LENET, "probe.supports=layers"],
    "tiers": [TIERS],
    "outer, in tiers": [TIERS, "probe.distribution=outer", "probe.k=9"],
    "groups with own seeds": ["secure.groups=2", "secure.group_seeds=own"],
    "some of the clients": ["federation.participation=0.5"],
    "all of their samples": ["federation.batch=0", "federation.partition=dirichlet"],
    "on ONNX Runtime": ["task.init=numpy", "run.runtime=onnx"],
    "small micro-batches": ["probe.micro_batch=4"],
}


def workers_of(task: Task, threads: int = 2) -> tuple[Trajectory, dict[int, Worker], Runtimes]:
    trajectory = replace(trajectory_of(task.plan, len(task.initial_weights())), threads=threads)
    runtimes = Runtimes(task, threads)
    places = enumerate(zip(task.tiers, task.shares, strict=True))
    workers = {
        number: Worker(number, k, trajectory, task.source.train, share, runtimes.borrow)
        for number, (k, share) in places
    }
    return trajectory, workers, runtimes


def values(trajectory: Trajectory, vector: RingVector) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """A contribution's values and its extras, as numbers; values in units of what a scalar is, times the weight."""
    signed = vector.view(np.int32).astype(np.float64)
    return np.concatenate([signed[:-EXTRAS] / trajectory.ring.scale / signed[-EXTRAS], signed[-EXTRAS:-1]])


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_each_client_contributes_what_it_would_alone(tiny: MakePlan, way: list[str]) -> None:
    task = load_task(tiny(*STACKED, *way))
    trajectory, workers, runtimes = workers_of(task)
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
            trajectory, workers, runtimes = workers_of(task, threads)
            found.append(Stack(trajectory, workers, runtimes.borrow).vectors(0, weights))
    for other in found[1:]:
        assert {client: vector.tobytes() for client, vector in other.items()} == {
            client: vector.tobytes() for client, vector in found[0].items()
        }


def test_a_round_is_computed_once_and_without_those_who_are_away(tiny: MakePlan) -> None:
    task = load_task(tiny(*STACKED))
    trajectory, workers, runtimes = workers_of(task)
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
                stack.worker(client).vector(number, weights)
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
    trajectory, workers, runtimes = workers_of(task)
    weights = task.initial_weights()
    with task.model.one_thread_each():
        vectors = Stack(trajectory, workers, runtimes.borrow).vectors(0, weights)
    labels = {client: worker.batch_of_round(0).y for client, worker in workers.items()}
    silent = {client for client, vector in vectors.items() if vector[-EXTRAS] == 0}
    assert silent == {client for client, own in labels.items() if (own > 4).any()}
    assert 0 < len(silent) < len(workers)
