"""Runtimes by name. To add one, write a module with a `load` function like the others and add a line here."""

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec

from baffle.errors import PlanError
from baffle.models.inputs import Inputs
from baffle.plan import Plan
from baffle.runtime.model import RunnableModel

RUNTIMES = {"onnx": "baffle.runtime.onnx.model", "torch": "baffle.runtime.torch.model"}
"""Modules, imported on first use: a machine needs only the libraries of the runtime that it uses."""


def load_model(plan: Plan, inputs: Inputs) -> RunnableModel:
    """The plan's model on the runtime that the plan names, or else on the lightest that can run it."""
    load: Callable[[Plan, Inputs], RunnableModel] = import_module(RUNTIMES[runtime_of(plan)]).load
    return load(plan, inputs)


def runtime_of(plan: Plan) -> str:
    """The name of the runtime that runs a plan's model on this machine."""
    if known := plan.task.model.runtime or plan.run.runtime:
        return known
    setting = plan.needs_torch()
    if not setting and (_is_installed("onnxruntime") or not _is_installed("torch")):
        return "onnx"
    if not _is_installed("torch"):
        remedy = ', or set task.init = "numpy"' if setting == "task.init" else ""
        raise PlanError(f"{setting}: only PyTorch can follow it: pip install 'baffle[torch]'{remedy}")
    return "torch"


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ImportError:
        return False
