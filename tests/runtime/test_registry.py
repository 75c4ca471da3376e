"""Which runtime runs a plan."""

import pytest

from baffle.errors import PlanError
from baffle.plan import load
from baffle.runtime import registry
from baffle.runtime.registry import runtime_of


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The packages that this machine seems to have; a test changes them."""
    packages = {"torch", "onnxruntime"}
    monkeypatch.setattr(registry, "find_spec", lambda name: name if name in packages else None)
    return packages


@pytest.mark.parametrize(
    ("settings", "missing", "runtime"),
    [
        ([], [], "onnx"),
        ([], ["torch"], "onnx"),
        ([], ["onnxruntime"], "torch"),
        (["probe.supports=layers"], [], "onnx"),
        (["run.runtime=torch"], [], "torch"),
        (["run.runtime=onnx"], [], "onnx"),
    ],
)
def test_the_lightest_runtime_that_is_there_runs_a_plan(
    installed: set[str], settings: list[str], missing: list[str], runtime: str
) -> None:
    installed.difference_update(missing)
    assert runtime_of(load("digits", settings)) == runtime


@pytest.mark.parametrize(
    ("setting", "change"),
    [
        ("task.model.name", 'task.model={name="mobilenet"}'),
        ("task.init", "task.init="),
        ("estimator", "estimator=backprop"),
        ("probe.supports", "probe.supports=units"),
        ("probe.precision", "probe.precision=bfloat16"),
        ("probe.memory_mb", "probe.memory_mb=10"),
        ("run.device", "run.device=cuda"),
    ],
)
def test_what_only_pytorch_can_follow_is_named(installed: set[str], setting: str, change: str) -> None:
    plan = load("digits", [change])
    assert (plan.needs_torch(), runtime_of(plan)) == (setting, "torch")
    with pytest.raises(PlanError, match=f"run.runtime: .* only PyTorch can follow {setting}"):
        load("digits", [change, "run.runtime=onnx"])
    installed.remove("torch")
    with pytest.raises(PlanError, match=rf"{setting}: only PyTorch can follow it: pip install 'baffle\[torch\]'"):
        runtime_of(plan)
