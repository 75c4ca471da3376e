"""The table of settings in docs/plans.md is made of the structs: each setting once, in its section, with its default
and the string that stands below its field."""

import re
import tomllib
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
import reference

from baffle.plan import LeNet, Model, Plan, Section

PAGE = Path(__file__).resolve().parents[2] / "docs" / "plans.md"


def documented() -> dict[str, Any]:
    """The settings in the page's table, with their first defaults."""
    table = PAGE.read_text().split("| key | default | meaning |")[1].split("<!-- end -->")[0]
    settings, section = dict[str, Any](), ""
    for row in table.strip().splitlines()[1:]:
        if found := re.fullmatch(r"\| \*\*`\[(\w+)\]`\*\* \| \| \|", row):
            section = f"{found[1]}."
            continue
        key, default, meaning = row.removeprefix("| ").removesuffix(" |").split(" | ", 2)
        name = section + key.strip("`")
        assert name not in settings, f"{name} stands there twice"
        assert len(meaning) > 10
        value = re.match("`([^`]+)`", default)
        settings[name] = tomllib.loads(f"x = {value[1]}")["x"] if value else default
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
            settings[name] = msgspec.to_builtins(field.default) if field.default is not msgspec.NODEFAULT else "none"
    return settings


def test_every_setting_is_documented_with_its_default() -> None:
    assert documented() == {name: _plain(value) for name, value in defaults(Plan).items()}


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def test_the_page_is_what_the_script_writes() -> None:
    page = PAGE.read_text()
    assert reference.filled(page) == page, "run python scripts/reference.py"
    assert "| `k` | `32` | directions a round" in page


def test_a_page_with_another_default_is_written_anew() -> None:
    page = PAGE.read_text()
    stale = page.replace("| `rounds` | `400` |", "| `rounds` | `500` |")
    assert stale != page
    assert reference.filled(stale) == page


def test_models_that_share_a_key_share_its_meaning_and_name_their_own_default() -> None:
    activation = next(setting for setting in reference.settings_of_models("") if setting.key == "activation")
    assert activation.default == '`"hardswish"`, `"relu6"` of `"mobilenet"`'
    assert activation.meaning.startswith('of `"lenet"`, `"wrn"`, `"mobilenet"`: ')


class Silent(Section, frozen=True):
    loud: int = 1
    """a string
    on two lines"""
    quiet: int = 2


def test_a_setting_without_a_meaning_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert reference.meanings(Silent) == {"loud": "a string on two lines"}
    assert "channels" in reference.meanings(LeNet)
    monkeypatch.setattr(reference, "sections", lambda: [("silent", list(reference.settings(Silent)))])
    with pytest.raises(SystemExit, match=r"silent\.quiet has no meaning: write a string below its field"):
        reference.table()
