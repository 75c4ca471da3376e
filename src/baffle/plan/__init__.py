"""A plan: everything that determines a run, frozen, read from TOML."""

from baffle.plan.checks import check
from baffle.plan.models import WRN, Custom, LeNet, MobileNet, Model, ModelSettings, Onnx, Softmax
from baffle.plan.plan import Plan
from baffle.plan.reading import build, change, load, override, parse, presets, read_toml, settings_of
from baffle.plan.sections import (
    FederationSettings,
    PrivacySettings,
    ProbeSettings,
    RingSettings,
    RunSettings,
    SecureSettings,
    TaskSettings,
    Tier,
    UpdateSettings,
)
from baffle.plan.setting import Section

__all__ = [
    "WRN",
    "Custom",
    "FederationSettings",
    "LeNet",
    "MobileNet",
    "Model",
    "ModelSettings",
    "Onnx",
    "Plan",
    "PrivacySettings",
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
    "check",
    "load",
    "override",
    "parse",
    "presets",
    "read_toml",
    "settings_of",
]
