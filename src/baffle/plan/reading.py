"""Read plans from presets and TOML files, override settings, and explain what is wrong in a plan."""

import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar, get_args, get_origin

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

Settings: TypeAlias = Mapping[str, Any] | Iterable[str]
"""Settings that override a plan's: {"probe.k": 50}, {"probe": {"k": 50}} or ["probe.k=50"]. Values of a mapping may be
numbers and arrays of NumPy."""


DEFAULT = "digits-head"
"""The plan of a command that names none."""


def presets() -> list[str]:
    return sorted(path.stem for path in PRESETS.glob("*.toml"))


def load(source: str = DEFAULT, settings: Settings = ()) -> Plan:
    """A plan from a TOML file or a preset's name. Settings such as {"probe.k": 50} or ["probe.k=50"] override it."""
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


def parse(text: str, settings: Settings = (), source: str = "plan") -> Plan:
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


def change(plan: Plan, settings: Settings) -> Plan:
    """The plan with some settings overridden."""
    return parse(plan.to_toml(), settings)


def override(plan: Plan, settings: Settings) -> Plan:
    """The plan with some settings overridden, without checking that the settings fit together."""
    return _overridden(plan.to_toml(), settings, "plan")


def _overridden(text: str, settings: Settings, source: str) -> Plan:
    raw = read_toml(text, source)
    lay_over(raw, settings)
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


def lay_over(raw: dict[str, Any], settings: Settings) -> None:
    """Write settings over those of a plan. A mapping for a section changes the settings that it names."""
    if isinstance(settings, str):
        raise PlanError(f"settings: expected a dict or a list of them, as [{settings!r}], got one text")
    for path, value in settings.items() if isinstance(settings, Mapping) else map(_read_setting, settings):
        *tables, key = str(path).split(".")
        if isinstance(value, Mapping) and not tables:
            lay_over(raw, {f"{key}.{name}": inner for name, inner in value.items()})
            continue
        table = raw
        for name in tables:
            table = table.setdefault(name, {})
            if not isinstance(table, dict):
                raise PlanError(f"{path}: {name} is a value, not a table; expected section.key=value")
        table[key] = _plain(value)


def _read_setting(setting: str) -> tuple[str, Any]:
    path, equals, text = setting.partition("=")
    if not equals or not path.strip():
        raise PlanError(f"a setting has the form section.key=value, got {setting!r}")
    try:
        return path.strip(), tomllib.loads(f"value = {text.strip()}")["value"]
    except (ValueError, RecursionError):
        return path.strip(), text.strip()


def _plain(value: Any) -> Any:
    """A value as TOML has it: numbers and arrays of NumPy become Python's."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, Mapping):
        return {str(name): _plain(inner) for name, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, (list, tuple)) else value


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


def keys_of(section: type[Section], path: str = "") -> list[str]:
    """The keys of all settings but those of models, dotted."""
    keys = list[str]()
    for field in fields_of(section):
        inner = isinstance(field.type, type) and issubclass(field.type, Section)
        keys += keys_of(field.type, f"{path}{field.encode_name}.") if inner else [f"{path}{field.encode_name}"]
    return keys


def _nearest(word: str, known: Iterable[str], path: str = "") -> str:
    import difflib  # only for errors, so a small client need not load it

    close = difflib.get_close_matches(word[:SHOWN_CHARACTERS], list(known), n=1)
    return f" (did you mean {path}{close[0]}?)" if close else ""
