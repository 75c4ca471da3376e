"""Runtimes by name. To add one, write a module with a `load` function like the others and add a line here."""

from collections.abc import Callable
from importlib import import_module

from baffle.models.inputs import Inputs
from baffle.plan import Plan
from baffle.runtime.model import RunnableModel

RUNTIMES = {
    "onnx": "baffle.runtime.onnx.model",
    "torch": "baffle.runtime.torch.model",
}
"""Modules, imported on first use: a machine needs only the libraries of the runtime that it uses."""

Load = Callable[[Plan, Inputs], RunnableModel]
"""A plan, and the inputs that its model is built for → the plan's model."""


def load_model(plan: Plan, inputs: Inputs) -> RunnableModel:
    """The plan's model on the runtime that the plan names."""
    load: Load = import_module(RUNTIMES[plan.task.model.runtime]).load
    return load(plan, inputs)
