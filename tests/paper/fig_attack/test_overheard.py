"""What a server sees of a round of real clients: each client's scalars, their sum, or nothing."""

import numpy as np
import pytest

from baffle.core.probe import forward_difference
from baffle.core.ring import EXTRAS
from baffle.paper.fig_attack.overheard import Overheard, overhear
from baffle.paper.measured_task import measured_task

CLIENTS, BATCH = 6, 2
SETTINGS = (
    *("task.model={name='softmax'}", f"federation.clients={CLIENTS}", "federation.batch=0"),
    *(f"ring.n_max={BATCH}", "probe.k=200", "probe.distribution=gaussian"),
)


@pytest.fixture(scope="module")
def heard() -> Overheard:
    task = measured_task("smoke", None, *SETTINGS)
    batches = np.arange(CLIENTS * BATCH).reshape(CLIENTS, BATCH)
    return overhear(task, task.initial_weights(), list(batches), 0)


def test_without_the_secure_sum_a_server_reads_every_clients_scalars(heard: Overheard) -> None:
    task = measured_task("smoke", None, *SETTINGS)
    trajectory, weights = heard.trajectory, task.initial_weights()
    for (members, scalars), client in zip(heard.singly(), range(CLIENTS), strict=True):
        assert members == [client]
        loss = task.runtime().on(task.source.train.batch(heard.batches[client]))
        own = forward_difference(
            loss, weights, trajectory.directions(0), trajectory.supports, trajectory.plan.probe.sigma
        ).scalars
        np.testing.assert_allclose(scalars, own, atol=1 / trajectory.ring.scale)


@pytest.mark.parametrize("size", [2, 3, 6])
def test_with_the_secure_sum_a_server_reads_their_mean(heard: Overheard, size: int) -> None:
    alone = dict(enumerate(scalars for _, scalars in heard.singly()))
    sums, _ = heard.summed(size)
    assert [client for members, _ in sums for client in members] == list(range(CLIENTS))
    for members, scalars in sums:
        np.testing.assert_allclose(scalars, np.mean([alone[client] for client in members], axis=0), atol=1e-12)


def test_masked_vectors_are_uniform_in_the_ring(heard: Overheard) -> None:
    """Plain vectors fill a small part of it. 6 × 200 elements go into eight bins, so 150 are expected in each."""
    _, masked = heard.summed(CLIENTS)
    plain, hidden = (
        np.histogram(np.concatenate([v[:-EXTRAS] for v in vectors.values()]), 8, (0, 2**32))[0]
        for vectors in (heard.vectors, masked)
    )
    assert np.sum((hidden - 150) ** 2 / 150) < 40  # chi-square, 7 degrees of freedom: one run in a million exceeds 40
    assert np.sum((plain - 150) ** 2 / 150) > 400
