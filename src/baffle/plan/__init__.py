"""A plan: everything that determines a run, frozen, read from TOML."""

from baffle.plan.functions import imported
from baffle.plan.reading import build, change, load, parse, presets
from baffle.plan.sections import (
    WRN,
    Bounds,
    Custom,
    Federation,
    LeNet,
    MobileNet,
    Model,
    Onnx,
    Plan,
    Probe,
    Run,
    Section,
    Secure,
    Softmax,
    Task,
    Tier,
    Update,
)

__all__ = [
    "WRN",
    "Bounds",
    "Custom",
    "Federation",
    "LeNet",
    "MobileNet",
    "Model",
    "Onnx",
    "Plan",
    "Probe",
    "Run",
    "Section",
    "Secure",
    "Softmax",
    "Task",
    "Tier",
    "Update",
    "build",
    "change",
    "imported",
    "load",
    "parse",
    "presets",
]
