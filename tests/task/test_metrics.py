"""Metrics: what they are of a model's outputs and labels, and what becomes of those of one's own."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from sklearn.metrics import mean_absolute_error, mean_squared_error, r2_score

from baffle.core.arrays import F32
from baffle.core.ports import Batch
from baffle.core.probe import Loss
from baffle.core.samples import PADDING, Array
from baffle.data.sources import Dataset, Source
from baffle.errors import OwnFunctionError, PlanError
from baffle.plan import Plan, change
from baffle.task.metrics import Metric, evaluate, metrics_of, own_metric
from tests.support.own_tasks import HERE


@dataclass
class Fixed:
    """A runtime whose outputs are given; its loss is the number of samples."""

    given: Array

    def on(self, batch: Batch) -> Loss:
        return lambda _: float(len(batch.y))

    def outputs(self, _weights: F32, _batch: Batch) -> F32:
        return self.given


def results(
    outputs: Array, labels: Array, classes: int, *metrics: Metric, loss: str = "mse", **of: Any
) -> dict[str, Any]:
    domains = tuple(f"d{i}" for i in range(3)) if of else ()
    data = Dataset(np.zeros((len(labels), 1)), labels, **of)
    source = Source(data, data, classes, domains)
    plan = change(Plan(), [f"task.loss={loss}"])
    batch = source.test.batch(np.arange(len(labels)))
    return evaluate(metrics or metrics_of(plan, source), Fixed(outputs), np.empty(0, np.float32), batch, source)


@given(st.integers(2, 30), st.integers(1, 3), st.integers(0, 2**32 - 1))
def test_of_numbers_they_are_those_of_scikit_learn(samples: int, width: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    outputs, targets = random.normal(size=(2, samples, width)).astype(np.float32)
    names = ["mae", "r2", "mse", "rmse"]
    data = Dataset(np.zeros((samples, 1)), targets)
    plan = change(Plan(), ["task.loss=mse", f"task.metrics={names}"])
    found = results(outputs, targets, 0, *metrics_of(plan, Source(data, data, 0)))
    exact = targets.astype(np.float64), outputs.astype(np.float64)
    squared = mean_squared_error(*exact)
    spread = r2_score(*exact, multioutput="variance_weighted")
    expected = [mean_absolute_error(*exact), spread, squared, math.sqrt(squared)]
    assert list(found) == [f"test_{name}" for name in names]
    assert list(found.values()) == pytest.approx(expected, rel=1e-5)


@given(st.integers(1, 8), st.integers(1, 5), st.integers(2, 7), st.booleans(), st.integers(0, 2**32 - 1))
def test_accuracy_is_over_positions_that_count(samples: int, length: int, classes: int, last: bool, seed: int) -> None:
    random = np.random.default_rng(seed)
    labels = random.integers(0, classes, (samples, length))
    labels[random.random(labels.shape) < 0.4] = PADDING
    outputs = random.normal(size=(samples, length, classes)).astype(np.float32)
    counted = labels != PADDING
    right = (outputs.argmax(-1) == labels)[counted]
    told_apart = last or (samples, classes) != labels.shape
    given = outputs if last else np.moveaxis(outputs, -1, 1)
    if told_apart:
        found = results(given, labels, classes, loss="cross_entropy")
        assert ("test_top5" in found) == (classes > 5)
        expected = round(float(right.mean()), 6) if len(right) else None
        assert found["test_accuracy"] == expected


@given(st.integers(2, 12), st.integers(1, 40), st.integers(1, 3), st.integers(0, 2**32 - 1))
def test_domains_add_up_to_the_whole(classes: int, samples: int, domains: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    labels, domain_of = random.integers(0, classes, samples), np.arange(samples) % domains
    outputs = random.normal(size=(samples, classes)).astype(np.float32)
    assert "test_domains" not in results(outputs, labels, classes, loss="cross_entropy")
    found = results(outputs, labels, classes, loss="cross_entropy", domain_of=domain_of)
    assert found.get("test_top5", 1.0) >= found["test_accuracy"]
    for name in ("accuracy", "top5") if classes > 5 else ("accuracy",):
        parts = [of[name] for of in found["test_domains"].values()]
        mean = np.average(parts, weights=np.bincount(domain_of))
        assert found[f"test_{name}"] == pytest.approx(mean, abs=2e-6)


def test_the_loss_is_the_runtimes_own_also_for_each_domain() -> None:
    of = np.array([0, 0, 2, 0])
    found = results(np.zeros((4, 1), np.float32), np.zeros(4), 0, Metric("loss"), domain_of=of)
    assert found == {"test_loss": 4.0, "test_domains": {"d0": {"loss": 3.0}, "d2": {"loss": 1.0}}}


def test_small_examples() -> None:
    """Which side of zero a logit is on is right for marks; what is not finite is None; a function of one's own."""
    marks, targets = np.array([[2.0, -1.0], [-3.0, 4.0]], np.float32), np.array([[1, 0], [1, 0.4]])
    assert results(marks, targets, 0, loss="bce") == {"test_accuracy": 0.5}
    zeros, data = np.zeros((3, 1), np.float32), Dataset(np.zeros((3, 1)), np.arange(3.0))
    assert results(zeros, np.ones(3), 0) == {"test_mae": 1.0, "test_r2": None}
    plan = change(Plan(), ["task.loss=mse", f'task.metrics=["{HERE}:largest_error"]'])
    assert results(zeros, data.labels, 0, *metrics_of(plan, Source(data, data, 0))) == {"test_largest_error": 2.0}
    plan = change(Plan(), [f'task.loss="{HERE}:squared"', 'task.metrics=["top5"]'])
    with pytest.raises(PlanError, match='"top5" needs classes'):
        metrics_of(plan, Source(data, data, 0))


def test_faults_of_the_users_own() -> None:
    outputs = np.zeros((3, 1), np.float32)
    with pytest.raises(OwnFunctionError, match=r"^task\.metrics: mine raised ZeroDivisionError: division by zero \("):
        results(outputs, np.zeros(3), 0, own_metric("mine", lambda _outputs, _labels: 1 / 0))
    with pytest.raises(PlanError, match=r"^task\.metrics: mine must return a number, got str$"):
        results(outputs, np.zeros(3), 0, own_metric("mine", lambda _outputs, _labels: "high"))
