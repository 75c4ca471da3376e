"""Inference from scalars: right where they determine the answer, at chance where they say nothing."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baffle.core.arrays import F32, F64
from baffle.paper.fig_attack.inference import (
    Public,
    crowd,
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
from baffle.paper.fig_attack.separation import auc

RANDOM = np.random.default_rng(0)
CLASSES, PIXELS = 4, 12


@given(rows=st.integers(1, 9), columns=st.integers(1, 9), ridge=st.floats(0.01, 10))
def test_both_normal_equations_give_the_same(rows: int, columns: int, ridge: float) -> None:
    a, target = np.random.default_rng(rows).normal(size=(rows, columns)), np.arange(rows, dtype=np.float64)
    c = ridge_solution(a, target, ridge)
    np.testing.assert_allclose(a.T @ (a @ c - target) + ridge * c, 0, atol=1e-8)


def _softmax_scalars(k: int, label: int) -> tuple[F64, F32, F32, F64]:
    """Exact scalars of one sample, the directions, the weights, and the sample."""
    z = RANDOM.normal(size=(k, CLASSES, PIXELS + 1)).astype(np.float32)
    weights = RANDOM.normal(0, 0.1, size=(CLASSES, PIXELS + 1)).astype(np.float32)
    x = RANDOM.normal(size=PIXELS)
    residual = softmax(weights[:, :-1] @ x + weights[:, -1])
    residual[label] -= 1
    gradient = np.outer(residual, np.append(x, 1))
    return np.tensordot(z.astype(np.float64), gradient, axes=2), z, weights, x


@pytest.mark.parametrize("label", range(CLASSES))
def test_as_many_scalars_as_pixels_give_input_and_label_away(label: int) -> None:
    scalars, z, weights, x = _softmax_scalars(3 * PIXELS, label)
    reconstruction, named = reconstruct(scalars, z, weights, no_prior(PIXELS), range(CLASSES), 1e-9)
    assert named == label
    assert likeness(reconstruction, x, np.zeros(PIXELS)) > 0.99


def test_a_prior_helps_where_scalars_are_few() -> None:
    ways = RANDOM.normal(size=(2, PIXELS))  # inputs have two degrees of freedom, and there are six scalars
    seen = RANDOM.normal(size=(50, 2)) @ ways
    gained = []
    for _ in range(10):
        scalars, z, weights, _ = _softmax_scalars(6, 0)
        x = RANDOM.normal(size=2) @ ways
        residual = softmax(weights[:, :-1] @ x + weights[:, -1])
        residual[0] -= 1
        scalars = np.tensordot(z.astype(np.float64), np.outer(residual, np.append(x, 1)), axes=2)
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


def test_shares_of_labels_are_fitted() -> None:
    public, shares = _public(40, 1e-3), np.array([0.5, 0.25, 0.25, 0])
    np.testing.assert_allclose(labels_by_samples(public.by_label() @ shares, public), shares, atol=1e-3)


def test_a_label_shows_in_the_biases() -> None:
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
