"""Which runtime runs a plan."""

from importlib.util import find_spec

import pytest

from baffle.errors import PlanError
from baffle.plan import load
from baffle.runtime import registry
from baffle.runtime.registry import runtime_of


def plan_with(*settings: str):  # type: ignore[no-untyped-def]
    return load("digits", settings)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The packages that this machine seems to have; a test changes them."""
    packages = {"torch", "onnx", "onnxruntime"}
    monkeypatch.setattr(registry, "find_spec", lambda name: name in packages)
    return packages


NEEDS_TORCH = {
    "task.model.name": ('task.model={name="mobilenet"}',),
    "task.init": ("task.init=",),
    "estimator": ("estimator=backprop",),
    "probe.supports": ("probe.supports=units",),
    "probe.precision": ("probe.precision=bfloat16",),
    "probe.memory_mb": ("probe.memory_mb=10",),
    "run.device": ("run.device=cuda",),
}


def test_the_default_plan_runs_on_onnx_runtime(installed: set[str]) -> None:
    assert find_spec("onnxruntime")
    assert runtime_of(plan_with()) == "onnx"
    installed.remove("torch")
    assert runtime_of(plan_with()) == "onnx"


def test_with_pytorch_alone_pytorch_runs_it(installed: set[str]) -> None:
    installed -= {"onnx", "onnxruntime"}
    assert runtime_of(plan_with()) == "torch"


@pytest.mark.usefixtures("installed")
def test_directions_of_one_layer_each_stay_on_onnx_runtime() -> None:
    assert runtime_of(plan_with("probe.supports=layers")) == "onnx"


@pytest.mark.usefixtures("installed")
def test_a_plan_may_say_which() -> None:
    assert runtime_of(plan_with("run.runtime=torch")) == "torch"
    assert runtime_of(plan_with("run.runtime=onnx")) == "onnx"


@pytest.mark.parametrize("setting", NEEDS_TORCH)
def test_what_only_pytorch_can_follow_is_named(installed: set[str], setting: str) -> None:
    settings = NEEDS_TORCH[setting]
    assert plan_with(*settings).needs_torch() == setting
    assert runtime_of(plan_with(*settings)) == "torch"
    with pytest.raises(PlanError, match=f"run.runtime: .* only PyTorch can follow {setting}"):
        plan_with(*settings, "run.runtime=onnx")
    installed.remove("torch")
    with pytest.raises(PlanError, match=rf"{setting}: only PyTorch can follow it: pip install 'baffle\[torch\]'"):
        runtime_of(plan_with(*settings))
