"""What a server sees in a round of real clients, and inference from it: right where scalars determine the answer, at
chance where they say nothing; and how far two sets of numbers can be told apart, against counting by hand."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from baffle.core.arrays import F32, F64
from baffle.core.probe import forward_difference
from baffle.core.ring import EXTRAS
from baffle.paper.fig_attack.attacks import Overheard, overhear
from baffle.paper.fig_attack.inference import (
    Public,
    auc,
    crowd,
    kolmogorov_smirnov,
    labels_by_bias,
    labels_by_samples,
    likeness,
    membership,
    no_prior,
    prior_of,
    reconstruct,
    ridge_solution,
    softmax,
)
from baffle.paper.gradients import measured_task

RANDOM = np.random.default_rng(0)
CLASSES, PIXELS = 4, 12


@given(rows=st.integers(1, 9), columns=st.integers(1, 9), ridge=st.floats(0.01, 10))
def test_both_normal_equations_give_the_same(rows: int, columns: int, ridge: float) -> None:
    a, target = np.random.default_rng(rows).normal(size=(rows, columns)), np.arange(rows, dtype=np.float64)
    c = ridge_solution(a, target, ridge)
    np.testing.assert_allclose(a.T @ (a @ c - target) + ridge * c, 0, atol=1e-8)


def _softmax_scalars(k: int, label: int, x: F64) -> tuple[F64, F32, F32]:
    """Exact scalars of one sample, the directions, and the weights."""
    z = RANDOM.normal(size=(k, CLASSES, PIXELS + 1)).astype(np.float32)
    weights = RANDOM.normal(0, 0.1, size=(CLASSES, PIXELS + 1)).astype(np.float32)
    residual = softmax(weights[:, :-1] @ x + weights[:, -1])
    residual[label] -= 1
    gradient = np.outer(residual, np.append(x, 1))
    return np.tensordot(z.astype(np.float64), gradient, axes=2), z, weights


def test_as_many_scalars_as_pixels_give_input_and_label_away() -> None:
    for label in range(CLASSES):
        x = RANDOM.normal(size=PIXELS)
        scalars, z, weights = _softmax_scalars(3 * PIXELS, label, x)
        reconstruction, named = reconstruct(scalars, z, weights, no_prior(PIXELS), range(CLASSES), 1e-9)
        assert named == label
        assert likeness(reconstruction, x, np.zeros(PIXELS)) > 0.99


def test_a_prior_helps_where_scalars_are_few() -> None:
    ways = RANDOM.normal(size=(2, PIXELS))  # inputs have two degrees of freedom, and there are six scalars
    seen = RANDOM.normal(size=(50, 2)) @ ways
    gained = []
    for _ in range(10):
        x = RANDOM.normal(size=2) @ ways
        scalars, z, weights = _softmax_scalars(6, 0, x)
        with_it, without = (
            likeness(reconstruct(scalars, z, weights, prior, [0], 1e-6)[0], x, seen.mean(0))
            for prior in (prior_of(seen), no_prior(PIXELS))
        )
        gained.append(with_it - without)
    assert np.mean(gained) > 0.1


def _public(k: int, scatter: float, samples: int = 400) -> Public:
    labels = np.arange(samples) % CLASSES
    means = np.random.default_rng(1).normal(size=(k, CLASSES))
    return Public(means[:, labels] + scatter * RANDOM.normal(size=(k, samples)), labels, CLASSES)


def test_shares_of_labels_are_fitted_and_a_label_shows_in_the_biases() -> None:
    public, shares = _public(40, 1e-3), np.array([0.5, 0.25, 0.25, 0])
    np.testing.assert_allclose(labels_by_samples(public.by_label() @ shares, public), shares, atol=1e-3)
    biases = RANDOM.normal(size=(2000, CLASSES))
    scalars = biases @ np.array([0.25, 0.25, -0.75, 0.25])  # what one sample of label 2 does to them
    assert np.argmax(labels_by_bias(scalars, biases)) == 2


def test_a_member_is_likelier_than_a_stranger_and_a_random_vector_tells_nothing() -> None:
    public = _public(30, 1.0)
    others, samples = crowd(public), RANDOM.normal(size=(30, 200)) + public.measured[:, :200]
    scores = {"own": [[], []], "random": [[], []]}  # type: dict[str, list[list[float]]]
    for start in range(0, 200, 4):
        mean = samples[:, start : start + 4].mean(1)
        candidates = samples[:, [start, (start + 100) % 200]]
        for name, scalars in (("own", mean), ("random", RANDOM.normal(0, 1e3, 30))):
            for kind, score in zip(scores[name], membership(scalars, candidates, 4, others), strict=True):
                kind.append(float(score))
    assert auc(*(np.array(kind) for kind in scores["own"])) > 0.9
    assert auc(*(np.array(kind) for kind in scores["random"])) == pytest.approx(0.5, abs=0.2)


FEW = st.lists(st.integers(-3, 3).map(float), min_size=1, max_size=8).map(np.array)


@given(inside=FEW, outside=FEW)
def test_auc_counts_pairs(inside: F64, outside: F64) -> None:
    pairs = [(a > b) + (a == b) / 2 for a in inside for b in outside]
    assert auc(inside, outside) == pytest.approx(np.mean(pairs))
    assert auc(inside, outside) + auc(outside, inside) == pytest.approx(1)


@given(one=FEW, other=FEW)
def test_a_threshold_is_never_better_than_kolmogorov_and_smirnov_say(one: F64, other: F64) -> None:
    best = max(abs(np.mean(one <= at) - np.mean(other <= at)) for at in (*one, *other))
    assert kolmogorov_smirnov(one, other) == pytest.approx(best)
    assert kolmogorov_smirnov(one, one) == 0


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


@pytest.mark.parametrize("size", [2, 6])
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
