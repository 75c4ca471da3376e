"""Read plans from presets and TOML files, override settings, and explain what is wrong in a plan."""

import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

import msgspec

from baffle.errors import PlanError
from baffle.files import read_file
from baffle.plan.checks import check
from baffle.plan.plan import Plan
from baffle.plan.sections import Model, Section, fields_of

PRESETS = Path(__file__).parent.parent / "plans"

PLAN_BYTES = 64 << 20  # the longest plan file, with room for a layout of a million rows
DOTS = 2000  # the most dots in a plan. The time to read a dotted key grows with the square of its length
SHOWN_CHARACTERS = 200  # the most characters of a value in an error message

S = TypeVar("S", bound=Section)


DEFAULT = "digits-head"
"""The plan of a command that names none."""


def presets() -> list[str]:
    return sorted(path.stem for path in PRESETS.glob("*.toml"))


def load(source: str = DEFAULT, settings: Iterable[str] = ()) -> Plan:
    """A plan from a TOML file or a preset's name. Dotted settings such as "probe.k=50" override it."""
    if source in presets():
        text = (PRESETS / f"{source}.toml").read_text()
    else:
        path = Path(source)
        if path.suffix != ".toml":
            raise PlanError(
                f"no plan is called {source!r}{_nearest(source, presets())}; "
                f"name a .toml file or one of: {', '.join(presets())}"
            )
        try:
            text = read_file(path, PLAN_BYTES).decode()
        except (OSError, UnicodeDecodeError) as fault:
            raise PlanError(f"the plan {source} cannot be read: {fault}") from None
    return parse(text, settings, source)


def parse(text: str, settings: Iterable[str] = (), source: str = "plan") -> Plan:
    plan = _overridden(text, settings, source)
    check(plan)
    return plan


def read_toml(text: str, source: str) -> dict[str, Any]:
    """Parse TOML from an untrusted source."""
    if (dots := text.count(".")) > DOTS:
        raise PlanError(f"{source} is no file of settings: it holds {dots:,} dots, expected at most {DOTS:,}")
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as fault:
        raise PlanError(f"{source} is not valid TOML: {fault}") from None


def change(plan: Plan, settings: Iterable[str]) -> Plan:
    """The plan with some settings overridden."""
    return parse(plan.to_toml(), settings)


def override(plan: Plan, settings: Iterable[str]) -> Plan:
    """The plan with some settings overridden, without checking that the settings fit together."""
    return _overridden(plan.to_toml(), settings, "plan")


def _overridden(text: str, settings: Iterable[str], source: str) -> Plan:
    raw = read_toml(text, source)
    for setting in settings:
        _lay_over(raw, setting)
    return settings_of(raw, Plan)


def build(raw: Mapping[str, Any]) -> Plan:
    """A validated plan from plain tables."""
    plan = settings_of(raw, Plan)
    check(plan)
    return plan


def settings_of(raw: Mapping[str, Any], kind: type[S]) -> S:
    """Convert plain tables to settings of a kind: each of the right type and within its bounds, and no others."""
    _refuse_unknown_keys(raw, kind, "")
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as fault:
        raise PlanError(_explain(str(fault), raw, kind)) from None


def _lay_over(raw: dict[str, Any], setting: str) -> None:
    path, equals, text = setting.partition("=")
    if not equals or not path.strip():
        raise PlanError(f"a setting has the form section.key=value, got {setting!r}")
    *tables, key = path.strip().split(".")
    table = raw
    for name in tables:
        table = table.setdefault(name, {})
        if not isinstance(table, dict):
            raise PlanError(f"{path.strip()}: {name} is a value, not a table; expected section.key=value")
    try:
        table[key] = tomllib.loads(f"value = {text.strip()}")["value"]
    except (ValueError, RecursionError):
        table[key] = text.strip()


def _refuse_unknown_keys(raw: Mapping[str, Any], struct: type[Section], path: str) -> None:
    fields = {field.encode_name: field.type for field in fields_of(struct)}
    allowed = [*fields, *([struct.__struct_config__.tag_field] if struct.__struct_config__.tag_field else [])]
    for key, value in raw.items():
        if key not in allowed:
            near, known = _nearest(key, allowed, path), ", ".join(allowed)
            raise PlanError(f"unknown key {path}{key[:SHOWN_CHARACTERS]}{near}; known here: {known}")
        for table in value if isinstance(value, list) else [value]:
            if isinstance(table, Mapping) and (inner := _struct_for(fields.get(key), table)):
                _refuse_unknown_keys(table, inner, f"{path}{key}.")


def _struct_for(kind: Any, value: Mapping[str, Any]) -> Any:
    """The struct for a table of a plan, or None."""
    if kind == Model:
        return next((kind for kind in get_args(Model) if kind.__struct_config__.tag == value.get("name")), None)
    kind = get_args(kind)[0] if get_args(kind) else kind
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


def _explain(fault: str, raw: Mapping[str, Any], kind: type[Section]) -> str:
    """Turn msgspec's "Expected `int` >= 1 - at `$.probe.k`" into a line that names key, value and choices."""
    expected, _, place = fault.replace("`", "").partition(" - at $")
    keys = [key for key in place.replace("[", ".").replace("]", "").split(".") if key]
    value: Any = raw
    for key in keys:
        value = value[int(key)] if isinstance(value, list) else value.get(key) if isinstance(value, Mapping) else None
    if expected.startswith("Invalid") and (choices := _choices(keys, raw, kind)):
        expected = f"expected one of {', '.join(map(repr, choices))}"
    wanted = expected.partition(", got ")[0]
    return f"{'.'.join(keys) or 'the settings'}: {wanted[:1].lower()}{wanted[1:]}, got {_shown(value)}"


def _shown(value: Any) -> str:
    """A value of a plan as an error message shows it."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a number of more digits than Python prints, or lists in lists in lists
        return f"a value of type {type(value).__name__} that is too large to show"
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}…"


def _choices(keys: list[str], raw: Mapping[str, Any], kind: Any) -> tuple[Any, ...]:
    """The choices of a setting that takes one of a few words; empty for other settings."""
    for key in keys:
        if kind == Model:
            if key == "name":
                return tuple(struct.__struct_config__.tag for struct in get_args(Model))
            kind = _struct_for(kind, raw["task"]["model"])
        fields = {field.encode_name: field.type for field in fields_of(kind)} if isinstance(kind, type) else {}
        kind = fields.get(key)
    return get_args(kind) if get_origin(kind) is Literal else ()


def _nearest(word: str, known: Iterable[str], path: str = "") -> str:
    import difflib  # only for errors, so a small client need not load it

    close = difflib.get_close_matches(word[:SHOWN_CHARACTERS], list(known), n=1)
    return f" (did you mean {path}{close[0]}?)" if close else ""
