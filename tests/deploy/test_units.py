"""The systemd units in deploy/ are valid, run commands that exist, write only where they may, and give away little."""

import configparser
import re
import shlex
import shutil
import subprocess
from importlib import import_module
from pathlib import Path

import click
import pytest

from baffle.cli.main import COMMANDS
from baffle.network.server.machine import SPARE

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
PAGE = ROOT / "docs" / "operate.md"
PROGRAM = "/opt/baffle/bin/baffle"
STATE = Path("/var/lib/baffle")
UNITS = ("baffle-serve.service", "baffle-join@.service")
INSTANCE = "fl.example.org:9092"

needs_systemd = pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="needs systemd-analyze, of systemd")


def read(unit: str) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None, comment_prefixes=("#",), delimiters=("=",))
    parser.optionxform = str  # type: ignore[assignment]
    parser.read(DEPLOY / unit)
    return parser


def parse(words: list[str]) -> click.Context:
    """The words of a command line, as the command itself takes them. Fails if it does not know one of them."""
    command, *arguments = words
    module, _ = COMMANDS[command]
    found: click.Command = getattr(import_module(module), command)
    return found.make_context(command, arguments)


def command_line(unit: str, **environment: str) -> list[str]:
    """The words of a unit's ExecStart as systemd makes them, with the unit's own variables and these."""
    service = read(unit)["Service"]
    variables = dict(word.split("=", 1) for word in service["Environment"].split()) | environment
    words: list[str] = []
    for word in shlex.split(service["ExecStart"].replace("%i", INSTANCE)):
        if whole := re.fullmatch(r"\$(\w+)", word):
            words += variables[whole[1]].split()
        else:
            words.append(re.sub(r"\$\{(\w+)\}", lambda found: variables[found[1]], word))
    return words


def example(variable: str) -> str:
    """The value of a variable in deploy/environment, also where its line is commented out."""
    line = re.search(rf"^(?:# )?{variable}=(.*)$", (DEPLOY / "environment").read_text(), re.MULTILINE)
    assert line, f"deploy/environment does not mention {variable}"
    return line[1]


@pytest.mark.parametrize("options", ["", example("BAFFLE_SERVE_OPTIONS")])
def test_the_servers_unit_runs_serve_with_options_that_it_has(options: str) -> None:
    program, *words = command_line("baffle-serve.service", BAFFLE_SERVE_OPTIONS=options)
    values = parse(words).params
    assert (program, words[0], values["log_style"]) == (PROGRAM, "serve", "json")
    assert (values["plan"], values["keys_folder"]) == ("/etc/baffle/plan.toml", Path("/etc/baffle/server"))
    assert values["out"] == STATE / "runs" / "first"
    assert bool(values["data"]) == bool(options)
    assert example("BAFFLE_RUN") == "first", "the example should be what the unit does without it"
    _, *words = command_line("baffle-serve.service", BAFFLE_RUN="second")
    assert parse(words).params["out"] == STATE / "runs" / "second"


@pytest.mark.parametrize("options", ["", example("BAFFLE_JOIN_OPTIONS")])
def test_the_clients_unit_runs_join_with_options_that_it_has(options: str) -> None:
    program, *words = command_line("baffle-join@.service", BAFFLE_JOIN_OPTIONS=options)
    values = parse(words).params
    assert (program, words[0], values["log_style"]) == (PROGRAM, "join", "json")
    assert values["keys_folder"] == STATE / "keys", "a client writes beside its keys, and may write to its state alone"
    assert (values["address"], values["state"], values["data"]) == (INSTANCE, STATE / "state", STATE / "data")
    assert values["stay"]
    assert bool(values["model"]) == bool(options)


@pytest.mark.parametrize("unit", UNITS)
def test_a_unit_writes_to_its_state_alone_has_no_rights_and_is_restarted_after_a_failure(unit: str) -> None:
    service = read(unit)["Service"]
    assert (service["Restart"], service["TimeoutStopSec"]) == ("on-failure", "30s")
    assert read(unit)["Unit"]["StartLimitIntervalSec"] == "0"
    assert "SuccessExitStatus" not in service, "SIGTERM ends with exit code 0 by itself"
    assert unit != UNITS[0] or int(service["LimitNOFILE"]) >= 1000 + SPARE, "files for a thousand clients"
    assert service["User"] == "baffle"
    assert service["ProtectSystem"] == "strict"
    assert service["StateDirectory"] == STATE.name
    assert not {"ReadWritePaths", "AmbientCapabilities"} & set(service)
    assert (service["NoNewPrivileges"], service["CapabilityBoundingSet"]) == ("yes", "")


@needs_systemd
@pytest.mark.parametrize("unit", UNITS)
def test_systemd_finds_no_fault_in_a_unit(unit: str, tmp_path: Path) -> None:
    """The program need not be installed here, so another takes its place."""
    copy = tmp_path / unit
    copy.write_text((DEPLOY / unit).read_text().replace(PROGRAM, "/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", copy], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    copy.write_text(copy.read_text().replace("NoNewPrivileges=", "NoNewPrivilege="))
    done = subprocess.run(["systemd-analyze", "verify", copy], capture_output=True, text=True, timeout=60)
    assert "NoNewPrivilege" in done.stderr, "a fault goes unnoticed here, so finding none means nothing"


@needs_systemd
@pytest.mark.parametrize("unit", UNITS)
def test_systemd_rates_a_unit_as_little_exposed(unit: str) -> None:
    """Exposure goes from 0 to 10, and the threshold is in tenths. A unit without any protection has 9.6."""
    version = subprocess.run(["systemd-analyze", "--version"], capture_output=True, text=True, check=True).stdout
    if int(version.split()[1]) < 250:
        pytest.skip(f"needs systemd 250 to rate units that are not installed, and this is {version.split()[1]}")
    command = ["systemd-analyze", "security", "--offline=true", "--threshold=20", str(DEPLOY / unit)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout[-200:] + done.stderr


def test_the_page_about_operating_shows_commands_and_files_that_exist() -> None:
    code = "\n".join(re.findall(r"^    (.*)$", PAGE.read_text(), re.MULTILINE)).replace("\\\n", " ")
    (command,) = re.findall(r"^podman run .*\bbaffle join .*$", code, re.MULTILINE)
    folder = parse(shlex.split(command.partition(" baffle join ")[2].join(["join ", ""]))).params["keys_folder"]
    mounts = [word.split(":") for word in shlex.split(command) if f":{folder}" in word]
    assert mounts == [["./keys/client-0", str(folder)]], "a client in a container can write beside its keys"
    lines = re.findall(rf"\bbaffle ((?:{'|'.join(COMMANDS)}) .*)$", code, re.MULTILINE)
    assert {line.split()[0] for line in lines} >= {"serve", "join"}
    for line in lines:
        parse(shlex.split(line, comments=True))
    mentioned = set(re.findall(r"(?<!tests/)deploy/[\w@.-]*\w", PAGE.read_text()))
    assert mentioned == {f"deploy/{path.name}" for path in DEPLOY.iterdir()}
