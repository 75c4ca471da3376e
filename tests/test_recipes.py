"""The recipes of docs/architecture.md: a toy distribution, optimizer, data set, model, runtime and paper target, each
added through the registry that the built-in ones use, and then run."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from torch import nn

from baffle.cli.main import commands
from baffle.core.arrays import F32, U8, Integers
from baffle.core.directions import DISTRIBUTIONS, Distribution
from baffle.core.seeds import Scratch
from baffle.core.update import OPTIMIZERS, State, Transform
from baffle.data.sources import SOURCES, Dataset, Reader, Source
from baffle.errors import PlanError
from baffle.journal.audit import verify
from baffle.models.build import BUILDERS
from baffle.models.inputs import Inputs
from baffle.paper import registry
from baffle.paper.target import Finished, Result, Scale, Tell
from baffle.plan import ModelSettings, Plan, Section
from baffle.runtime.registry import RUNTIMES
from baffle.runtime.torch.loss import TorchLoss
from baffle.simulation import simulate
from baffle.task.load import load_task
from tests.support.numpy_runtime import NumpySoftmax, SoftmaxRuntime

ROOT = Path(__file__).resolve().parents[1]
NEW_RUNS = ["rounds=12", "probe.k=40", "federation.batch=0", "update.rate=0.05"]


def _run(plan: Plan, folder: Path) -> dict[str, object]:
    """A finished run whose journal replays to its weights."""
    summary = simulate(plan, folder)
    assert verify(folder).weights_sha256 == summary["weights_sha256"]
    return summary


def _signs(stream: U8, _scratch: Scratch) -> Integers:
    """−1, 0, 0 or 1 for every byte."""
    return np.array([-1, 0, 0, 1], np.int8)[stream % 4]


def test_a_new_distribution(tiny: Callable[..., Plan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PlanError, match=r"probe\.distribution: expected one of 'gaussian', .*got 'sparse'"):
        tiny("probe.distribution=sparse")
    monkeypatch.setitem(DISTRIBUTIONS, "sparse", Distribution("sparse", bits=8, unit_bits=0, bound=1, decode=_signs))
    assert float(str(_run(tiny("probe.distribution=sparse", *NEW_RUNS), tmp_path / "run")["test_accuracy"])) > 0.3


def _sign_sgd(rate: float, _betas: tuple[float, float], _momentum: float) -> Transform:
    def update(_: State, gradient: F32, _weights: F32) -> tuple[State, F32]:
        return (), np.float32(-rate) * np.sign(gradient)

    return Transform(lambda _: (), update)


def test_a_new_optimizer(tiny: Callable[..., Plan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PlanError, match=r"update\.optimizer: expected one of 'adam', .*got 'signs'"):
        tiny("update.optimizer=signs")
    monkeypatch.setitem(OPTIMIZERS, "signs", _sign_sgd)
    assert float(str(_run(tiny("update.optimizer=signs", *NEW_RUNS), tmp_path / "run")["test_accuracy"])) > 0.3


def two_blobs(_folder: Path | None) -> Source:
    """Points around (−1, −1) and (1, 1)."""
    labels = np.arange(60) % 2
    points = np.random.default_rng(0).normal(0, 0.3, (60, 2)) + (2 * labels - 1)[:, None]
    data = Dataset(points.astype(np.float32), labels, lambda samples: samples)
    return Source(data, data, classes=2)


def test_a_new_data_set(tiny: Callable[..., Plan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SOURCES, "blobs", Reader(__name__, "two_blobs"))
    assert _run(tiny('task.data="blobs"', *NEW_RUNS), tmp_path / "run")["test_accuracy"] == 1.0


class Hidden(ModelSettings, frozen=True, tag_field="name", tag="hidden"):
    """One hidden layer."""

    width: int = 5


def _build_hidden(model: Hidden, inputs: Inputs) -> nn.Module:
    size = int(torch.Size(inputs.one_shape()).numel())
    return nn.Sequential(nn.Flatten(), nn.Linear(size, model.width), nn.ReLU(), nn.Linear(model.width, inputs.classes))


def _with_model(plan: Plan, model: ModelSettings) -> Plan:
    return msgspec.structs.replace(plan, task=msgspec.structs.replace(plan.task, model=model))


def test_a_new_model(tiny: Callable[..., Plan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind: type[Section] = Hidden
    monkeypatch.setitem(BUILDERS, kind, _build_hidden)
    task = load_task(_with_model(tiny(), Hidden(width=3)))
    assert len(task.initial_weights()) == 65 * 3 + 4 * 10
    assert simulate(task.plan, tmp_path / "run")["n_weights"] == 65 * 3 + 4 * 10


def test_a_new_runtime(tiny: Callable[..., Plan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gives the losses of PyTorch, and a run on it learns."""
    monkeypatch.setitem(RUNTIMES, "numpy", "tests.support.numpy_runtime")
    plan = _with_model(tiny(*NEW_RUNS), NumpySoftmax())
    ours, theirs = load_task(plan), load_task(tiny(*NEW_RUNS))
    batch, weights = ours.source.train.batch(np.arange(50)), theirs.initial_weights()
    runtime, torch_runtime = ours.runtime(), theirs.runtime()
    assert isinstance(runtime, SoftmaxRuntime)
    assert isinstance(torch_runtime, TorchLoss)
    assert runtime.on(batch)(weights) == pytest.approx(torch_runtime.on(batch)(weights), rel=1e-5)
    np.testing.assert_allclose(runtime.outputs(weights, batch), torch_runtime.outputs(weights, batch), atol=1e-5)
    summary = simulate(plan, tmp_path / "run")
    assert summary["test_accuracy"] > 0.5


class Toy:
    """A paper target that measures one number."""

    name, about = "toy", "a toy"

    def plans(self, _scale: Scale) -> dict[str, Plan]:
        return {}

    def result(self, _runs: Mapping[str, Finished], scale: Scale, _data: Path | None, tell: Tell) -> Result:
        tell("the only row")
        return Result(("scale", "answer"), [[scale, 42]])


def test_a_new_paper_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "TARGETS", dict(registry.TARGETS))
    registry.register(Toy())
    commands.main(["paper", "toy", "--scale", "smoke", "--out", str(tmp_path)], standalone_mode=False)
    assert "| smoke | 42 |" in (tmp_path / "toy-smoke.md").read_text()


def test_every_file_that_the_page_names_exists() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    named = set(re.findall(r"`((?:src|tests)/[\w/.-]+)`", page))
    assert len(named) > 20
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []
