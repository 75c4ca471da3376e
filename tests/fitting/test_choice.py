"""Which weights a fit hands back."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import baffle
from baffle.core.arrays import F32
from baffle.core.ports import Batch
from baffle.data.sources import Dataset
from baffle.fitting.choice import AVERAGED, LAST, choose_weights
from tests.fitting.test_fit import QUICK, fit, outputs, require_accuracy, shared, small, vectors


class Errors:
    """A model whose loss on a sample is the sample times one weight, plus the other."""

    def on(self, batch: Batch) -> Any:
        return lambda weights: float(np.mean(batch.x * weights[0] + weights[1]))

    def outputs(self, _weights: F32, _batch: Batch) -> F32:
        raise NotImplementedError


def chosen(samples: list[float], averaged: list[float], last: list[float]) -> str:
    data = Dataset(np.array(samples, np.float32), np.zeros(len(samples), np.int64))
    return choose_weights(Errors(), data, np.array(averaged, np.float32), np.array(last, np.float32))[0]


@given(st.lists(st.floats(-1, 1, width=16), min_size=1, max_size=60), st.floats(0.125, 1, width=16))
def test_the_last_weights_are_handed_back_only_if_their_loss_is_clearly_lower(
    samples: list[float], gain: float
) -> None:
    assert chosen(samples, [1.0, gain], [1.0, 0.0]) == LAST  # lower on every sample
    assert chosen(samples, [1.0, 0.0], [1.0, gain]) == AVERAGED
    assert chosen(samples, [1.0, 0.0], [1.0, 0.0]) == AVERAGED


def test_chance_decides_nothing_and_weights_that_are_not_finite_lose() -> None:
    scattered = np.random.default_rng(0).standard_normal(200).tolist()
    assert chosen(scattered, [1.0, 0.01], [0.0, 0.0]) == AVERAGED
    assert chosen(scattered, [float("inf"), 0.0], [1.0, 5.0]) == LAST
    assert chosen(scattered, [1.0, 5.0], [float("inf"), 0.0]) == AVERAGED


BEHIND = {**QUICK, "update.ema": 0.99, "update.rate": 0.05}
"""An average that trails far behind in twelve rounds."""


@pytest.fixture(scope="module")
def behind(tmp_path_factory: pytest.TempPathFactory) -> baffle.Run:
    folder = tmp_path_factory.mktemp("behind")
    return fit(folder, small(), shared(*vectors(120)), vectors(300, 1), 12, plan=BEHIND, metrics=["accuracy", "loss"])


def test_an_average_that_is_behind_is_not_handed_back(behind: baffle.Run) -> None:
    x, y = vectors(300, seed=1)
    assert behind["returned"] == "last"
    assert behind["returned_because"].startswith("loss on 120 training samples: averaged ")
    assert behind["test_accuracy"] == behind["test_accuracy_last"]
    assert behind["test_loss"] < behind.metrics["test_loss"][-1]
    np.testing.assert_allclose(outputs(behind.model, x), require_accuracy(behind, x, y), atol=1e-6)
    np.testing.assert_array_equal(baffle.open(behind.path).weights(), behind.weights(last=True))


def test_validation_data_decide_and_test_data_never(tmp_path: Path) -> None:
    x, y = vectors(120)
    wrong = (x, (y + 1) % 3)  # on which the less a model has learnt the better it is
    run = fit(tmp_path, small(), shared(x, y), wrong, 12, plan=BEHIND)
    assert run["returned"] == "last"
    run = baffle.resume(run.path, model=small(), clients=shared(x, y), test=wrong, validation=wrong)
    assert run["returned"] == "averaged"
    assert "on 120 validation samples" in run["returned_because"]
    np.testing.assert_array_equal(run.weights(), run.weights(last=False))
    with pytest.raises(baffle.BaffleError, match="validation: y has class 3, but the model has outputs for 3"):
        fit(tmp_path / "other", small(), shared(x, y), None, validation=(x, y + 1))


def test_training_samples_of_a_private_run_decide_nothing(tmp_path: Path) -> None:
    private = {"federation.weighting": "uniform", "secure.floor": 4, "privacy.epsilon": 40.0, "privacy.clip": 1.0}
    run = fit(tmp_path, small(), shared(*vectors(120)), None, 2, plan=private)
    assert "returned" not in run
    np.testing.assert_array_equal(run.weights(), run.weights(last=False))
