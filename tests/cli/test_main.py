"""The table of commands: complete, in step with the commands' own help, and cheap to list."""

import json
import pkgutil
import subprocess
import sys
from importlib import import_module

import click
import pytest

import baffle.cli
from baffle.cli.main import COMMANDS, commands


@pytest.mark.parametrize("name", COMMANDS)
def test_a_line_of_the_table_is_the_first_sentence_of_the_commands_help(name: str) -> None:
    _, line = COMMANDS[name]
    command = commands.get_command(click.Context(commands), name)
    assert command is not None
    assert command.name == name
    assert command.get_short_help_str(limit=1000) == line
    assert len(line) <= 68, "a longer line is wrapped on a terminal of 80 columns"


def test_the_table_names_every_file_that_defines_a_command() -> None:
    files = [module.name for module in pkgutil.iter_modules(baffle.cli.__path__)]
    defined = [
        name for name in files if isinstance(getattr(import_module(f"baffle.cli.{name}"), name, None), click.Command)
    ]
    assert sorted(defined) == list(COMMANDS)


LOADED_BY = """
import json, sys
sys.argv = ["baffle", *sys.argv[1:]]
from baffle.cli.main import main
try:
    main()
except SystemExit:
    print(json.dumps(sorted(sys.modules)))
"""


def _loaded_by(*arguments: str) -> set[str]:
    printed = subprocess.check_output([sys.executable, "-c", LOADED_BY, *arguments], text=True)
    assert "Usage: baffle" in printed
    return set(json.loads(printed.splitlines()[-1]))


def test_listing_the_commands_loads_none_of_them() -> None:
    loaded = _loaded_by("--help")
    ours = {name for name in loaded if name.partition(".")[0] == "baffle"}
    assert ours == {"baffle", "baffle.cli", "baffle.cli.main", "baffle.errors", "baffle.version"}
    assert not loaded & {"numpy", "rich", "msgspec", "cryptography"}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_commands_help_loads_its_own_file_and_nothing_heavy(name: str) -> None:
    loaded = _loaded_by(name, "--help")
    assert f"baffle.cli.{name}" in loaded
    assert not loaded & {f"baffle.cli.{other}" for other in COMMANDS if other != name}
    assert not loaded & {"numpy", "torch", "flwr", "onnxruntime", "sqlite3"}
