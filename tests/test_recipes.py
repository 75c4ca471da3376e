"""The recipes of docs/architecture.md: a toy distribution, optimizer, data set, model, runtime, loss and paper target,
each added through the registry that the built-in ones use, and then run."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import nn

from baffle.cli.main import commands
from baffle.client.abstaining import Tell
from baffle.core.arrays import F32, U8, Integers
from baffle.core.directions import DISTRIBUTIONS, Distribution
from baffle.core.rates import SCHEDULES
from baffle.core.seeds import Scratch
from baffle.core.update import OPTIMIZERS, State, Transform
from baffle.data.sources import SOURCES, Dataset, Reader, Source
from baffle.errors import PlanError
from baffle.journal.audit import verify
from baffle.models.build import BUILDERS
from baffle.models.inputs import Inputs
from baffle.paper import registry
from baffle.paper.target import Measurement, Result, Scale
from baffle.plan import ModelSettings, Plan, Section
from baffle.plan.tasks import LOSSES, Loss
from baffle.runtime.registry import RUNTIMES
from baffle.runtime.torch.loss import TorchLoss
from baffle.simulation import simulate
from baffle.task.load import load_task
from tests.support import own_tasks
from tests.support.numpy_runtime import NumpySoftmax, SoftmaxRuntime

MakePlan = Callable[..., Plan]

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


def test_a_new_distribution(tiny: MakePlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PlanError, match=r"probe\.distribution: expected one of 'gaussian', .*got 'sparse'"):
        tiny("probe.distribution=sparse")
    monkeypatch.setitem(DISTRIBUTIONS, "sparse", Distribution("sparse", bits=8, unit_bits=0, bound=1, decode=_signs))
    assert float(str(_run(tiny("probe.distribution=sparse", *NEW_RUNS), tmp_path / "run")["test_accuracy"])) > 0.3


def _sign_sgd(rate: float, _betas: tuple[float, float], _momentum: float) -> Transform:
    def update(_: State, gradient: F32, _weights: F32) -> tuple[State, F32]:
        return (), np.float32(-rate) * np.sign(gradient)

    return Transform(lambda _: (), update)


def test_a_new_optimizer(tiny: MakePlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PlanError, match=r"update\.optimizer: expected one of 'adam', .*got 'signs'"):
        tiny("update.optimizer=signs")
    monkeypatch.setitem(OPTIMIZERS, "signs", _sign_sgd)
    assert float(str(_run(tiny("update.optimizer=signs", *NEW_RUNS), tmp_path / "run")["test_accuracy"])) > 0.3


def test_a_new_schedule(tiny: MakePlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PlanError, match=r"update\.schedule: expected one of 'constant', .*got 'half'"):
        tiny("update.schedule=half")
    monkeypatch.setitem(SCHEDULES, "half", lambda _number, _rounds, _factor: 0.5)
    _run(tiny("update.schedule=half", *NEW_RUNS), tmp_path / "run")


def two_blobs(_folder: Path | None) -> Source:
    """Points around (−1, −1) and (1, 1)."""
    labels = np.arange(60) % 2
    points = np.random.default_rng(0).normal(0, 0.3, (60, 2)) + (2 * labels - 1)[:, None]
    data = Dataset(points.astype(np.float32), labels, lambda samples: samples)
    return Source(data, data, classes=2)


def test_a_new_data_set(tiny: MakePlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_new_model(tiny: MakePlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind: type[Section] = Hidden
    monkeypatch.setitem(BUILDERS, kind, _build_hidden)
    task = load_task(_with_model(tiny(), Hidden(width=3)))
    assert len(task.initial_weights()) == 65 * 3 + 4 * 10
    assert simulate(task.plan, tmp_path / "run")["n_weights"] == 65 * 3 + 4 * 10


def test_a_new_runtime(tiny: MakePlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def _huber(xp: Any, numbers: Any, targets: Any) -> Any:
    size = xp.abs(numbers - targets)
    return xp.where(size < 1, size**2 / 2, size - 0.5)


@pytest.mark.parametrize("runtime", ["torch", "onnx"])
def test_a_new_loss(tiny: MakePlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runtime: str) -> None:
    settings = [f'task.data="{own_tasks.HERE}:plane"', 'task.loss="huber"', "task.init=numpy", f"run.runtime={runtime}"]
    with pytest.raises(PlanError, match=r"task\.loss: expected one of 'cross_entropy', .*got 'huber'"):
        tiny(*settings)
    monkeypatch.setitem(LOSSES, "huber", Loss(_huber, metrics=("loss", "mae"), usual=("mae",)))
    assert float(str(_run(tiny(*settings, *NEW_RUNS, "rounds=60"), tmp_path / "run")["test_mae"])) < 0.3
    expected = torch.nn.functional.huber_loss
    task = load_task(tiny(*settings))
    batch, weights = task.source.train.batch(np.arange(9)), task.initial_weights()
    outputs, targets = (torch.from_numpy(each) for each in (task.runtime().outputs(weights, batch), batch.y))
    assert task.runtime().on(batch)(weights) == pytest.approx(float(expected(outputs, targets)), rel=1e-6)


def _one_number(scale: Scale, _data: Path | None, tell: Tell) -> Result:
    tell("the only row")
    return Result(("scale", "answer"), [[scale, 42]])


def test_a_new_paper_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.TARGETS, "toy", Measurement("toy", "a toy", _one_number))
    commands.main(["paper", "toy", "--scale", "smoke", "--out", str(tmp_path)], standalone_mode=False)
    assert "| smoke | 42 |" in (tmp_path / "toy-smoke.md").read_text()
    assert not (tmp_path / "toy-smoke.png").exists()
