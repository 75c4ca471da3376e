"""How weights are evaluated: metrics overall and for each domain, from one forward pass."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baffle.core.arrays import F32
from baffle.core.ports import Batch
from baffle.core.probe import Loss
from baffle.data.sources import Dataset, Source, load
from baffle.plan import Plan
from baffle.runtime.torch.loss import TorchLoss
from baffle.simulation import resume, simulate
from baffle.task.metrics import measured, metrics_of


def in_domains() -> Source:
    """The digits, alternately in two domains, and a third domain without samples."""
    source = load("digits")
    train, test = (replace(part, domain_of=np.arange(len(part)) % 2) for part in (source.train, source.test))
    return Source(train, test, source.classes, ("even", "odd", "untested"))


class Fixed:
    """A runtime whose outputs are given."""

    def __init__(self, given: F32) -> None:
        self._given = given

    def on(self, _batch: Batch) -> Loss:
        raise AssertionError

    def outputs(self, _weights: F32, _batch: Batch) -> F32:
        return self._given


def _source(labels: np.ndarray[tuple[int], np.dtype[np.int64]], classes: int, domains: int) -> Source:
    domain_of = np.arange(len(labels)) % domains if domains else None
    data = Dataset(np.zeros((len(labels), 1)), labels, np.asarray, domain_of=domain_of)
    return Source(data, data, classes, tuple(f"d{i}" for i in range(domains)))


@given(st.integers(2, 12), st.integers(1, 40), st.integers(0, 4), st.integers(0, 2**32 - 1))
def test_domains_add_up_to_the_whole(classes: int, samples: int, domains: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    source = _source(rng.integers(0, classes, samples), classes, domains)
    outputs = rng.normal(size=(samples, classes)).astype(np.float32)
    batch = source.test.batch(np.arange(samples))
    results = measured(metrics_of(Plan(), source), Fixed(outputs), np.empty(0, np.float32), batch, source)
    assert ("test_top5" in results) == (classes > 5)
    assert results.get("test_top5", 1.0) >= results["test_accuracy"]
    assert ("test_domains" in results) == (domains > 0)
    for name in ("accuracy", "top5") if domains and classes > 5 else ():
        counts = np.bincount(np.arange(samples) % domains)
        parts = [results["test_domains"][f"d{i}"][name] for i in range(len(counts))]
        assert results[f"test_{name}"] == pytest.approx(np.average(parts, weights=counts), abs=2e-6)


def test_a_run_measures_everything_in_one_forward_pass(
    tiny: Callable[..., Plan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, outputs = list[int](), TorchLoss.outputs

    def counted(self: TorchLoss, weights: F32, batch: Batch) -> F32:
        seen.append(len(batch.y))
        return outputs(self, weights, batch)

    monkeypatch.setattr(TorchLoss, "outputs", counted)
    plan = tiny(f"task.data={__name__}:in_domains", "run.evaluate_every=3", "update.ema=0")
    summary = simulate(plan, tmp_path / "run")
    assert seen == [2] + [len(load("digits").test)] * 2  # the model is first tried on two samples
    assert summary["test_domains"].keys() == {"even", "odd"}
    assert summary["test_accuracy"] <= summary["test_top5"] < 1
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    for name in ("test_accuracy", "test_accuracy_last", "test_top5", "test_domains"):
        assert last[name] == summary[name]
    assert resume(tmp_path / "run")["test_domains"] == summary["test_domains"]


def test_domains_are_about_the_averaged_weights(tiny: Callable[..., Plan], tmp_path: Path) -> None:
    """Their mean is the accuracy of the averaged weights, which differs here from that of the last weights."""
    summary = simulate(tiny(f"task.data={__name__}:in_domains", "update.rate=0.5"), tmp_path / "run")
    assert summary["test_accuracy"] != summary["test_accuracy_last"]
    counts = np.bincount(np.arange(len(load("digits").test)) % 2)
    mean = np.average([domain["accuracy"] for domain in summary["test_domains"].values()], weights=counts)
    assert mean == pytest.approx(summary["test_accuracy"], abs=2e-6)
