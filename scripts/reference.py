"""Writes the table of settings in docs/plans.md: keys and defaults from the structs in src/baffle/plan/, meanings from
the strings below their fields.

python scripts/reference.py            # write the table
python scripts/reference.py --check    # fail if the page has another one
"""

import argparse
import ast
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import msgspec

from baffle.plan import Model, Plan, Section

PAGE = Path(__file__).resolve().parents[1] / "docs" / "plans.md"


@dataclass(frozen=True, slots=True)
class Setting:
    """A key with its default as TOML and its meaning, which is empty if no string follows the field."""

    key: str
    default: str
    meaning: str


def meanings(section: type[Section]) -> dict[str, str]:
    """The strings that stand below the fields of a section, each on one line."""
    (body,) = (
        node.body for node in ast.parse(textwrap.dedent(inspect.getsource(section))).body if hasattr(node, "body")
    )
    found = dict[str, str]()
    for field, below in pairwise(body):
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str):
            found[field.target.id] = " ".join(below.value.value.split())
    return found


def settings(section: type[Section]) -> Iterator[Setting]:
    said = meanings(section)
    for field in msgspec.structs.fields(section):
        if field.type == Model:
            tag = type(field.default).__struct_config__.tag
            yield Setting(f"{field.name}.name", as_toml(tag), said.get(field.name, ""))
            yield from settings_of_models(f"{field.name}.")
        elif not _is_section(field.type):
            yield Setting(field.encode_name, as_toml(field.default), said.get(field.name, ""))


def settings_of_models(prefix: str) -> list[Setting]:
    """The settings of all models, each key once. The first meaning of a key holds for models without one."""
    owners = dict[str, dict[str, Setting]]()
    for model in get_args(Model):
        for setting in settings(model):
            owners.setdefault(setting.key, {})[f'`"{model.__struct_config__.tag}"`'] = setting
    return [_merged(prefix + key, by_model) for key, by_model in owners.items()]


def _merged(key: str, by_model: dict[str, Setting]) -> Setting:
    (_, first), *rest = by_model.items()
    defaults = [first.default, *(f"{own.default} of {name}" for name, own in rest if own.default != first.default)]
    speakers = dict[str, list[str]]()
    for name, own in by_model.items():
        speakers.setdefault(own.meaning or first.meaning, []).append(name)
    said = [f"of {', '.join(names)}: {meaning}" for meaning, names in speakers.items() if meaning]
    return Setting(key, ", ".join(defaults), "; ".join(said))


def sections() -> Iterator[tuple[str, list[Setting]]]:
    """The settings at the top of a plan, under an empty name, and those of each of its sections."""
    yield "", list(settings(Plan))
    for field in msgspec.structs.fields(Plan):
        if _is_section(field.type):
            yield field.encode_name, list(settings(field.type))


def table() -> str:
    lines = ["| key | default | meaning |", "|---|---|---|"]
    for name, content in sections():
        lines += [f"| **`[{name}]`** | | |"] if name else []
        for setting in content:
            if not setting.meaning:
                where = f"{name}.{setting.key}" if name else setting.key
                raise SystemExit(f"{where} has no meaning: write a string below its field in src/baffle/plan/")
            lines.append(f"| `{setting.key}` | {setting.default} | {setting.meaning} |")
    return "\n".join(lines)


def as_toml(value: Any) -> str:
    return "none" if value is msgspec.NODEFAULT else f"`{json.dumps(msgspec.to_builtins(value))}`"


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Section)


def filled(page: str) -> str:
    """The page with a new table between `<!-- settings -->` and `<!-- end -->`."""
    return re.sub(
        r"(<!-- settings -->\n).*?(<!-- end -->)",
        lambda found: f"{found[1]}{table()}\n{found[2]}",
        page,
        flags=re.DOTALL,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    before = PAGE.read_text()
    after = filled(before)
    if parser.parse_args().check:
        sys.exit("docs/plans.md is not what the structs say; run python scripts/reference.py" if after != before else 0)
    PAGE.write_text(after)


if __name__ == "__main__":
    main()
