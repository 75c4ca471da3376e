"""A plan: everything that determines a run, frozen, read from TOML."""

from baffle.plan.checks import check
from baffle.plan.plan import Plan
from baffle.plan.reading import (
    DEFAULT,
    Settings,
    build,
    change,
    keys_of,
    lay_over,
    load,
    override,
    parse,
    presets,
    read_toml,
    settings_of,
)
from baffle.plan.sections import (
    WRN,
    Custom,
    Derivatives,
    FederationSettings,
    LeNet,
    MobileNet,
    Model,
    ModelSettings,
    Onnx,
    PrivacySettings,
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
    "DEFAULT", "WRN", "Custom", "Derivatives", "FederationSettings", "LeNet", "MobileNet", "Model", "ModelSettings",
    "Onnx", "Plan", "PrivacySettings", "ProbeSettings", "RingSettings", "RunSettings", "Section", "SecureSettings",
    "Settings", "Softmax", "TaskSettings", "Tier", "UpdateSettings", "build", "change", "check", "keys_of",
    "lay_over", "load", "override", "parse", "presets", "read_toml", "settings_of",
]  # fmt: skip
