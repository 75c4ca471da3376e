"""Runtimes by name. A new one is a module with a `load` like those of the others, and one line here."""

from collections.abc import Callable
from importlib import import_module

from baffle.models.inputs import Inputs
from baffle.plan import Plan
from baffle.runtime.model import RunnableModel

RUNTIMES = {
    "onnx": "baffle.runtime.onnx.model",
    "torch": "baffle.runtime.torch.model",
}
"""Imported when they are needed, because a machine need not have the libraries of the others."""

Load = Callable[[Plan, Inputs], RunnableModel]
"""A plan, and what its model is built for → the plan's model."""


def load_model(plan: Plan, inputs: Inputs) -> RunnableModel:
    """The plan's model, on the runtime that its settings name."""
    load: Load = import_module(RUNTIMES[plan.task.model.runtime]).load
    return load(plan, inputs)
