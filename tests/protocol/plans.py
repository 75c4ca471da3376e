"""Plans: their settings and the digest that names a trajectory. The defaults are read from docs/protocol.md itself."""

import json
import re
import tomllib
from hashlib import sha256
from math import isfinite
from pathlib import Path
from typing import Any

from tests.protocol.wire import require

PAGE = Path(__file__).parents[2] / "docs" / "protocol.md"
ROW = re.compile(r"^\| `([a-z_.]+)` \| ([a-z ]+).*? \| `(.+)` \|$", re.MULTILINE)


def _table(name: str) -> dict[str, tuple[str, Any]]:
    """A table of defaults in the page: setting → its type and its default."""
    text = PAGE.read_text().partition(f"<!-- {name} -->")[2].partition("<!-- end -->")[0]
    return {setting: (kind, json.loads(default)) for setting, kind, default in ROW.findall(text)}


DETERMINES, OTHERS, MODELS = _table("defaults"), _table("other defaults"), _table("defaults of models")

Plan = dict[str, Any]
"""Setting, with its section before a dot, → value."""


def read_plan(text: str) -> Plan:
    require(text.count(".") <= 2000, "a plan with too many dots")
    flat: Plan = {name: default for name, (_, default) in (DETERMINES | OTHERS).items()}
    for key, value in tomllib.loads(text).items():
        section = {f"{key}.{name}": item for name, item in value.items()} if isinstance(value, dict) else {key: value}
        for name, setting in section.items():
            require(name in flat, f"an unknown setting {name}")
            flat[name] = _of_type((DETERMINES | OTHERS)[name][0], setting)
    model = flat["task.model"]
    flat["task.model"] = {name: value for name, value in model.items() if value != _model_default(model, name)}
    return flat


def _of_type(kind: str, value: Any) -> Any:
    if kind.startswith("float"):
        return float(value)
    if kind.startswith("array of two floats"):
        return [float(number) for number in value]
    if kind.startswith("array of tables"):
        return [{"k": tier["k"], "share": float(tier["share"])} for tier in value]
    expected = {"integer": int, "text": str, "boolean": bool, "array": list, "table": dict}[kind.split()[0]]
    require(isinstance(value, expected), f"expected {kind}, got {value!r}")
    return value


def _model_default(model: dict[str, Any], name: str) -> Any:
    return MODELS.get(f"{model['name']}.{name}", ("", None))[1]


def digest(plan: Plan) -> bytes:
    """The trajectory digest."""
    settings: dict[str, Any] = {"secure": {}}
    for name, (_, default) in DETERMINES.items():
        section, _, key = name.rpartition(".")
        if plan[name] != default:
            (settings.setdefault(section, {}) if section else settings)[key] = plan[name]
    settings.get("task", {}).pop("metrics", None)
    return sha256(b"baffle/trajectory/2\0" + written(settings).encode()).digest()


def written(value: Any) -> str:
    """JSON in the one form that digests have."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(key)}:{written(value[key])}" for key in sorted(value)) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(written, value)) + "]"
    return _float(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False)


def _float(value: float) -> str:
    require(isfinite(value), "a setting that is not finite")
    sign, number = ("-" if value < 0 else ""), repr(abs(value))
    mantissa, _, exponent = number.partition("e")
    whole, _, fraction = mantissa.partition(".")
    digits = (whole + fraction).lstrip("0")
    point = len(whole) + int(exponent or 0) - (len(whole + fraction) - len(digits))
    digits = digits.rstrip("0") or "0"
    if value == 0:
        return sign + "0.0"
    if 0 < point <= 16:
        text = digits.ljust(point, "0")
        return f"{sign}{text[:point]}.{text[point:] or '0'}"
    if -5 < point <= 0:
        return f"{sign}0.{'0' * -point}{digits}"
    return f"{sign}{digits[0]}{'.' if digits[1:] else ''}{digits[1:]}e{point - 1}"
