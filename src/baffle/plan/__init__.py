"""A plan: everything that determines a run, frozen, read from TOML."""

from baffle.plan.functions import imported
from baffle.plan.reading import build, change, load, parse, presets
from baffle.plan.sections import (
    WRN,
    Custom,
    FederationSettings,
    LeNet,
    MobileNet,
    Model,
    Onnx,
    Plan,
    ProbeSettings,
    RingSettings,
    RunSettings,
    Section,
    SecureSettings,
    Softmax,
    TaskSettings,
    Tier,
    UpdateSettings,
)

__all__ = [
    "WRN",
    "Custom",
    "FederationSettings",
    "LeNet",
    "MobileNet",
    "Model",
    "Onnx",
    "Plan",
    "ProbeSettings",
    "RingSettings",
    "RunSettings",
    "Section",
    "SecureSettings",
    "Softmax",
    "TaskSettings",
    "Tier",
    "UpdateSettings",
    "build",
    "change",
    "imported",
    "load",
    "parse",
    "presets",
]
