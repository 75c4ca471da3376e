"""docs/plans.md names every setting once, in the section that it belongs to, with the default that it has."""

import re
import tomllib
from pathlib import Path
from typing import Any, get_args

import msgspec

from baffle.plan import Model, Plan, Section

PAGE = Path(__file__).resolve().parents[2] / "docs" / "plans.md"

FILLED_IN = {"task.model.graph", "task.model.says"}
"""Settings that a run writes into its own plan, and nobody sets."""


def documented() -> dict[str, Any]:
    """The settings in the page's table, with their defaults."""
    table = PAGE.read_text().split("| key | default | meaning |")[1].split("\n\n")[0]
    settings, section = dict[str, Any](), ""
    for row in table.splitlines()[2:]:
        key, default, _ = (
            (cell.strip() for cell in row.strip("|").split(" | ", 2)) if row.count(" | ") > 1 else (row, "", "")
        )
        if found := re.search(r"\*\*`\[(\w+)\]`\*\*", key):
            section = f"{found[1]}."
            continue
        for name, value in zip(re.findall(r"`([^`]+)`", key), re.findall(r"`([^`]+)`", default), strict=True):
            assert f"{section}{name}" not in settings, f"{section}{name} stands there twice"
            settings[f"{section}{name}"] = tomllib.loads(f"x = {value}")["x"]
    return settings


def defaults(section: type[Section], path: str = "") -> dict[str, Any]:
    """All settings of a section, with their defaults."""
    settings = dict[str, Any]()
    for field in msgspec.structs.fields(section):
        name = f"{path}{field.encode_name}"
        if isinstance(field.type, type) and issubclass(field.type, Section):
            settings |= defaults(field.type, f"{name}.")
        elif name == "task.model":
            for model in get_args(Model):
                settings = defaults(model, "task.model.") | settings
            settings["task.model.name"] = "lenet"
        else:
            settings[name] = msgspec.to_builtins(field.default) if field.default is not msgspec.NODEFAULT else ""
    return settings


def test_every_setting_is_documented_with_its_default() -> None:
    ours = {name: value for name, value in defaults(Plan).items() if name not in FILLED_IN}
    theirs = documented()
    assert theirs.keys() == ours.keys()
    assert {name: value for name, value in theirs.items() if value != _plain(ours[name])} == {}


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
