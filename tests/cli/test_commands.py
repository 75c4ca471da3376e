"""The commands on good input: their table, what they print, which files they write, and how a run is resumed."""

import json
import pkgutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import click
import pytest

import baffle.cli
from baffle.cli.main import COMMANDS, commands
from baffle.plan import change, load, parse, presets
from baffle.report.page import script_name
from baffle.version import __version__
from tests.support.command_line import Cli, loaded_by, setting
from tests.support.environments import without


@pytest.mark.parametrize("name", COMMANDS)
def test_a_line_of_the_table_is_the_first_sentence_of_the_commands_help(name: str) -> None:
    _, line = COMMANDS[name]
    command = commands.get_command(click.Context(commands), name)
    assert command is not None
    assert command.name == name
    assert command.get_short_help_str(limit=1000) == line
    assert len(line) <= 68, "a longer line is wrapped on a terminal of 80 columns"


def test_the_table_names_every_command_that_a_file_defines() -> None:
    files = [import_module(f"baffle.cli.{module.name}") for module in pkgutil.iter_modules(baffle.cli.__path__)]
    defined = {name for file in files for name, found in vars(file).items() if isinstance(found, click.Command)}
    subcommands = {"new", "certificate", "add", "revoke", "renew"}
    assert defined - subcommands - {"commands"} == set(COMMANDS)


def test_listing_the_commands_loads_none_of_them() -> None:
    _, loaded = loaded_by("--help")
    ours = {name for name in loaded if name.partition(".")[0] == "baffle"}
    assert ours == {"baffle", "baffle.cli", "baffle.cli.main", "baffle.errors", "baffle.version"}
    assert not loaded & {"numpy", "rich", "msgspec", "cryptography"}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_commands_help_loads_its_own_file_and_nothing_heavy(name: str) -> None:
    printed, loaded = loaded_by(name, "--help")
    assert f"Usage: baffle {name}" in printed
    own, _ = COMMANDS[name]
    assert loaded & {module for module, _ in COMMANDS.values()} == {own}
    assert not loaded & {"numpy", "torch", "flwr", "onnxruntime", "sqlite3"}


SUMMARY = {
    *("test_accuracy", "rounds", "seconds", "forwards", "peak_rss_mb", "n_weights", "weights_sha256", "plan_digest"),
    *("uplink_bytes_per_client_round", "downlink_bytes_per_client_round", "secure"),
}


def summary_of(run: Path) -> dict[str, object]:
    return dict(json.loads((run / "summary.json").read_text()))


def test_help_lists_the_commands(cli: Cli) -> None:
    for option in ("--help", "-h"):
        done = cli(option)
        assert done.returncode == 0
        commands = done.stdout.partition("Commands:")[2]
        assert [line.split()[0] for line in commands.strip().splitlines()] == list(COMMANDS)
    shown = cli()
    assert "\nCommands:\n" in shown.stdout + shown.stderr
    assert "error:" not in shown.stdout + shown.stderr
    assert cli("--version").stdout.split() == ["baffle,", "version", __version__]


def test_run_as_json_prints_the_summary_and_nothing_else(cli: Cli, tiny_toml: Path, tmp_path: Path) -> None:
    done = cli("run", tiny_toml, "--out", tmp_path / "run", "--json", "--set", "secure.mode=on")
    assert (done.returncode, done.stderr) == (0, "")
    summary = json.loads(done.stdout)
    assert summary == summary_of(tmp_path / "run")
    assert summary.keys() >= SUMMARY
    assert (summary["rounds"], summary["n_weights"], summary["forwards"]) == (6, 650, 6 * 3 * 5)
    assert (summary["secure"], summary["dropouts"]) == ("on", 0)
    assert 0 <= summary["test_accuracy"] <= 1
    assert len(bytes.fromhex(summary["weights_sha256"])) == 32
    assert 50 < summary["peak_rss_mb"] < 10_000


def test_run_shows_progress_and_a_table_and_writes_its_files(
    cli: Cli, tiny_toml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = cli("run", tiny_toml, "--out", "a[b]c")
    assert done.returncode == 0
    assert done.stderr.startswith("note: secure.mode is off: the server sees every client")
    assert done.stderr.count("\n") == 1
    for shown in ("round 6/6", "test accuracy", "60 bytes per client and round"):
        assert shown in done.stdout
    last = [line.split() for line in done.stdout.splitlines()[-2:]]
    assert last == [["folder", "a[b]c"], ["report", "a[b]c/report.html"]]

    run = tmp_path / "a[b]c"
    files = {path.name for path in run.iterdir()}
    assert files == {"journal.sqlite", "metrics.jsonl", "plan.toml", script_name(), "report.html", "summary.json"}
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == list(range(6))
    assert [line["rounds_done"] for line in lines] == list(range(1, 7))  # as a terminal shows them
    assert parse((run / "plan.toml").read_text()).digest().hex() == summary_of(run)["plan_digest"]


def test_notes_go_to_stderr_one_line_each_and_a_quiet_run_prints_none(
    cli: Cli, tiny_toml: Path, tmp_path: Path
) -> None:
    notes = {"probe.sigma=5e-9": "note: probe.sigma = 5e-09 is small", "secure.floor=2": "note: secure.floor = 2: "}
    for text, note in notes.items():
        settings = setting("secure.mode=on", text)
        done = cli("run", tiny_toml, "--out", tmp_path / text, "--json", *settings)
        assert json.loads(done.stdout)["skipped_rounds"] == 0
        assert done.stderr.startswith(note)
        assert done.stderr.count("\n") == 1
    done = cli("run", tiny_toml, "--out", tmp_path / "quiet", "--quiet", *settings)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert (tmp_path / "quiet" / "summary.json").exists()


def test_a_run_without_folder_goes_into_a_new_one_with_settings_laid_over_its_plan(
    cli: Cli, tiny_toml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = setting("probe.k=7", "rounds=2", 'update.optimizer="sgd"')
    for _ in range(2):
        assert cli("run", tiny_toml, "--quiet", *settings).returncode == 0
    one, other = (path for path in (tmp_path / "runs").iterdir() if path.is_dir())
    assert all(path.name.startswith("tiny-") and (path / "summary.json").exists() for path in (one, other))
    plan = parse((one / "plan.toml").read_text())
    assert (plan.probe.k, plan.rounds, plan.update.optimizer, plan.name) == (7, 2, "sgd", "tiny")


def test_baseline_adds_its_fields_and_a_row(cli: Cli, tiny_toml: Path, tmp_path: Path) -> None:
    done = cli("run", tiny_toml, "--out", tmp_path / "run", "--baseline", "--json", "--set", "secure.mode=on")
    assert (done.returncode, done.stderr) == (0, "")
    summary = json.loads(done.stdout)
    assert summary.keys() >= SUMMARY | {"baseline_test_accuracy", "baseline_rounds", "baseline_seconds"}
    assert summary["estimator"] == "probe"
    assert summary_of(tmp_path / "run" / "baseline")["estimator"] == "backprop"
    assert "backpropagation" in cli("run", "--resume", tmp_path / "run", "--baseline").stdout


def test_verify_confirms_a_good_run_without_a_machine_learning_library(cli: Cli, finished_run: Path) -> None:
    expected = summary_of(finished_run)["weights_sha256"]
    printed, loaded = loaded_by("verify", finished_run)
    assert printed == f"6 rounds replayed, every hash right; 650 weights, sha256 {expected}"
    assert not loaded & {"torch", "sklearn", "scipy", "flwr", "onnxruntime"}
    verified = json.loads(cli("verify", finished_run, "--json").stdout)
    assert (verified["rounds"], verified["skipped"], verified["n_weights"]) == (6, 0, 650)
    assert verified["weights_sha256"] == expected
    assert cli("verify", finished_run, "--quiet").stdout == ""


def test_plan_shows_what_a_run_will_cost(cli: Cli, tiny_toml: Path) -> None:
    done = cli("plan", tiny_toml, "--set", "probe.sigma=5e-9")
    assert done.returncode == 0
    for shown in ("650", "60 bytes per client and round", "5 per client and round, 90 in all", "cos 0.078"):
        assert shown in done.stdout
    assert "note: probe.sigma = 5e-09 is small" in done.stderr
    costs = json.loads(cli("plan", tiny_toml, "--json", "--no-prices").stdout)
    assert (costs["uplink_bytes"], costs["forwards"], costs["n_weights"]) == (60, 5, 650)
    assert costs["alignment"] == pytest.approx(0.0782, rel=1e-2)


def test_plan_prints_a_whole_plan_to_start_from(
    cli: Cli, tiny_toml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli("plan", "--list").stdout.splitlines() == presets()
    assert parse(cli("plan", "--toml").stdout).task == load("digits").task
    assert list(tmp_path.iterdir()) == []
    text = cli("plan", tiny_toml, "--toml", "--set", "probe.k=6").stdout
    plan = parse(text)
    assert (plan.probe.k, plan.ring.n_max) == (6, 480)
    (tmp_path / "mine.toml").write_text(text)
    cli("run", "mine.toml", "--out", "run", "-q")
    assert change(parse((tmp_path / "run" / "plan.toml").read_text()), ["run.runtime="]) == plan


def test_plan_draws_a_partition_with_a_line_for_each_client(cli: Cli, tiny_toml: Path) -> None:
    done = cli("plan", tiny_toml, "--show-partition", "--set", "federation.partition=dirichlet")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert "3, with 1,438 samples in all" in lines[0]
    assert [line.split()[0] for line in lines[-3:]] == ["0", "1", "2"]
    clients = json.loads(cli("plan", tiny_toml, "--show-partition", "--json").stdout)["clients"]
    assert [(client["client"], client["samples"]) for client in clients] == [(0, 480), (1, 479), (2, 479)]
    assert [sum(client["classes"]) for client in clients] == [480, 479, 479]
    assert clients[0]["domain"] is clients[0]["writer"] is None


def test_tune_gives_a_plan_with_reasons(cli: Cli, tiny_toml: Path, tmp_path: Path) -> None:
    done = cli("tune", tiny_toml, "--set", "update.rate=100.0")
    assert done.returncode == 0
    assert parse(done.stdout).update.rate < 100
    assert "# update.rate = " in done.stdout
    assert "rate 0.0" in done.stderr
    done = cli("tune", tiny_toml, "--json")
    advice = json.loads(done.stdout)
    assert done.stderr == ""
    assert parse(advice["plan"]).probe.sigma == advice["reasons"][0]["after"]
    assert advice["share"] > 0
    assert advice["prices"]["dense"] == advice["prices"]["layers"] > 0
    assert isinstance(advice["advice"], list)
    done = cli("tune", tiny_toml, "--out", tmp_path / "tuned.toml")
    assert f"go on with: baffle run {tmp_path / 'tuned.toml'}" in done.stdout
    assert "of the run's" in done.stdout
    assert "CPU time of a scalar: " in done.stdout
    assert load(str(tmp_path / "tuned.toml")).rounds == 6


WITHOUT_TORCH = without("torch") + "from baffle.cli.main import main; main()"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["run", "--set", "task.init="], "task.init: only PyTorch can follow it: pip install 'baffle[torch]', or set"),
        (["run", "--baseline"], "estimator: only PyTorch can follow it: pip install 'baffle[torch]'\n"),
    ],
)
def test_a_plan_that_needs_pytorch_says_so(tmp_path: Path, arguments: list[str], says: str) -> None:
    """The default plan does not need it."""
    command = [sys.executable, "-c", WITHOUT_TORCH, *arguments, "--out", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {says}")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "run").exists()
