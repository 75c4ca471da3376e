"""The plan of a fit: what people give as `plan`, laid over defaults that suit most models."""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from baffle.errors import PlanError
from baffle.plan import Plan, build, load

DEFAULTS: Mapping[str, Any] = {
    "name": "fit",
    "rounds": 200,
    "federation": {"batch": 16},
    "probe": {"k": 80, "distribution": "rademacher", "supports": "layers"},
    "update": {"rate": 0.01, "ema": 0.99},
    "secure": {"mode": "off"},
}
"""At this rate, directions of one layer each were nowhere behind dense ones at the end, and well ahead on some nets
(docs/performance.md, "One layer at a time"). The sums are plain, because in one process there is nobody to hide values
from; masked, they are the same to the last bit."""

GivenPlan = str | Plan | Mapping[str, Any] | None
"""A preset's name or a TOML file, a plan, or settings such as {"rounds": 300, "probe.k": 50}."""


def plan_of(given: GivenPlan) -> Plan:
    """The plan that somebody means."""
    if isinstance(given, Plan):
        return given
    if isinstance(given, str):
        return load(given)
    if given is not None and not isinstance(given, Mapping):
        raise PlanError(
            f"plan: expected a preset's name, the path of a TOML file, a baffle.Plan or a dict of settings, got "
            f"{type(given).__name__}"
        )
    raw: dict[str, Any] = deepcopy(dict(DEFAULTS))
    _lay_over(raw, given or {})
    return build(raw)


def _lay_over(raw: dict[str, Any], settings: Mapping[str, Any]) -> None:
    """Write settings, nested or with dotted names, over those in `raw`."""
    for path, value in settings.items():
        *tables, key = str(path).split(".")
        table = raw
        for name in tables:
            table = table.setdefault(name, {})
            if not isinstance(table, dict):
                raise PlanError(f"plan: {path}: {name} is a value, not a table")
        if isinstance(value, Mapping) and isinstance(table.get(key), dict):
            _lay_over(table[key], value)
        else:
            table[key] = list(value) if isinstance(value, tuple) else value
