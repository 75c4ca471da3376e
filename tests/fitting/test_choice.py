"""Which weights a fit hands back."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

import baffle
from baffle.core.arrays import F32
from baffle.core.ports import Batch
from baffle.core.samples import Array
from baffle.data.sources import Dataset
from baffle.fitting.choice import AVERAGED, LAST, choose_weights
from baffle.report.record import read_run
from baffle.report.sections import key_figures
from baffle.report.words import measured
from tests.fitting.test_fit import QUICK, fit, outputs, shared, small, vectors


def error(weights: F32, batch: Batch) -> float:
    """Of a sample, the sample times one weight, plus the other."""
    return float(np.mean(batch.x * weights[0] + weights[1]))


def chosen(samples: list[float], averaged: list[float], last: list[float]) -> str:
    data = Dataset(np.array(samples, np.float32), np.zeros(len(samples), np.int64))
    return choose_weights(error, data, np.array(averaged, np.float32), np.array(last, np.float32))[0]


@given(st.lists(st.floats(-1, 1, width=16), min_size=1, max_size=60), st.floats(0.125, 1, width=16))
def test_the_last_weights_are_handed_back_only_if_their_error_is_clearly_smaller(
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


def line(count: int, seed: int = 0) -> tuple[Array, Array]:
    x = np.random.default_rng(seed).standard_normal((count, 8)).astype(np.float32)
    return x, x @ np.linspace(1, 2, 8, dtype=np.float32)


def regression(folder: Path, test: tuple[Array, Array], **more: Any) -> baffle.Run:
    torch.manual_seed(0)
    return fit(folder, nn.Linear(8, 1), shared(*line(120)), test, 12, plan=BEHIND, loss="mse", **more)


def test_an_average_that_is_behind_is_not_handed_back(tmp_path: Path) -> None:
    x, y = line(300, 1)
    run = regression(tmp_path, (x, y))
    assert run["returned"] == "last"
    assert run["returned_because"].startswith("loss on 120 training samples: averaged ")
    assert run["test_mae"] == run["test_mae_last"] < run.metrics["test_mae"][-1]
    assert run["test_r2"] > run.metrics["test_r2"][-1]
    assert np.abs(run.predict(x)[:, 0] - y).mean() == pytest.approx(run["test_mae"], rel=1e-4)
    np.testing.assert_array_equal(baffle.open(run.path).weights(), run.weights(last=True))
    tile = {name: (value, note) for name, value, note in key_figures(read_run(run.path))}["test mae"]
    assert tile[0] == measured("mae", run["test_mae"])
    assert tile[1] == f"averaged {measured('mae', run.metrics['test_mae'][-1])}"


def test_validation_data_decide_and_test_data_never(tmp_path: Path) -> None:
    x, y = line(300, 1)
    wrong = x, -y  # on which a model that has learnt less is better
    run = regression(tmp_path, wrong)
    assert run["returned"] == "last"
    torch.manual_seed(0)
    again: dict[str, Any] = {"model": nn.Linear(8, 1), "clients": shared(*line(120)), "test": wrong, "loss": "mse"}
    run = baffle.resume(run.path, validation=wrong, **again)
    assert run["returned"] == "averaged"
    assert run["returned_because"].startswith("loss on 300 validation samples: averaged ")
    np.testing.assert_array_equal(run.weights(), run.weights(last=False))


def test_a_classifier_is_judged_by_its_errors_and_validation_data_are_checked(tmp_path: Path) -> None:
    x, y = vectors(120)
    run = fit(tmp_path, small(), shared(x, y), None, 2, validation=(x, y))
    right = [float(np.mean(outputs(run.restore(small(), last=last), x).argmax(1) == y)) for last in (False, True)]
    shown = [float(number) for number in re.findall(r"(?:averaged|last) (\S+?)(?:,|$)", run["returned_because"])]
    assert shown == pytest.approx([1 - share for share in right], abs=2e-3)
    with pytest.raises(baffle.BaffleError, match="validation: y has class 3, but the model has outputs for 3"):
        fit(tmp_path / "other", small(), shared(x, y), None, validation=(x, y + 1))


def test_training_samples_of_a_private_run_decide_nothing(tmp_path: Path) -> None:
    private = {"federation.weighting": "uniform", "secure.floor": 4, "privacy.epsilon": 40.0, "privacy.clip": 1.0}
    run = fit(tmp_path, small(), shared(*vectors(120)), None, 2, plan=private)
    assert "returned" not in run
    np.testing.assert_array_equal(run.weights(), run.weights(last=False))
