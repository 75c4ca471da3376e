"""The commands on good input: what they print, which files they write, and how a run is resumed."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from baffle.plan import parse
from baffle.report.writing import script_name
from baffle.version import __version__
from tests.support.blocked_imports import without

Cli = Callable[..., subprocess.CompletedProcess[str]]

SUMMARY = {
    "test_accuracy",
    "rounds",
    "seconds",
    "forwards",
    "uplink_bytes_per_client_round",
    "downlink_bytes_per_client_round",
    "peak_rss_mb",
    "n_weights",
    "weights_sha256",
    "plan_digest",
    "secure",
}


def test_help_lists_the_commands(cli: Cli) -> None:
    for option in ("--help", "-h"):
        done = cli(option)
        assert done.returncode == 0
        commands = done.stdout.partition("Commands:")[2]
        listed = [line.split()[0] for line in commands.strip().splitlines()]
        assert listed == [
            "export",
            "join",
            "keys",
            "paper",
            "plan",
            "report",
            "run",
            "serve",
            "status",
            "tune",
            "verify",
            "watch",
        ]


def test_without_arguments_it_shows_the_help(cli: Cli) -> None:
    done = cli()
    shown = done.stdout + done.stderr
    assert "\nCommands:\n" in shown
    assert "error:" not in shown


@pytest.mark.parametrize("command", ["run", "verify", "plan", "status"])
def test_every_command_has_help(cli: Cli, command: str) -> None:
    done = cli(command, "--help")
    assert done.returncode == 0
    assert "--json" in done.stdout


def test_version(cli: Cli) -> None:
    done = cli("--version")
    assert (done.returncode, done.stdout.split()) == (0, ["baffle,", "version", __version__])


def test_run_as_json_prints_the_summary_and_nothing_else(cli: Cli, tiny_toml: Path, tmp_path: Path) -> None:
    done = cli("run", tiny_toml, "--out", tmp_path / "run", "--json", "--set", "secure.mode=on")
    assert (done.returncode, done.stderr) == (0, "")
    summary = json.loads(done.stdout)
    assert summary == json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary.keys() >= SUMMARY
    assert summary["rounds"] == 6
    assert summary["n_weights"] == 650
    assert summary["forwards"] == 6 * 3 * 5
    assert summary["secure"] == "on"
    assert summary["dropouts"] == 0
    assert 0 <= summary["test_accuracy"] <= 1
    assert len(bytes.fromhex(summary["weights_sha256"])) == 32
    assert 50 < summary["peak_rss_mb"] < 10_000


def test_run_writes_plan_journal_metrics_and_summary(cli: Cli, tiny_toml: Path, tmp_path: Path) -> None:
    cli("run", tiny_toml, "--out", tmp_path / "run")
    files = sorted(path.name for path in (tmp_path / "run").iterdir())
    drawing = script_name()
    assert files == ["journal.sqlite", "metrics.jsonl", "plan.toml", drawing, "report.html", "summary.json"]
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in lines] == list(range(6))
    assert [json.loads(line)["rounds_done"] for line in lines] == list(range(1, 7))  # as a terminal shows them
    plan = parse((tmp_path / "run" / "plan.toml").read_text())
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert plan.digest().hex() == summary["plan_digest"]


def test_run_shows_progress_and_a_table_with_the_folder(
    cli: Cli, tiny_toml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = cli("run", tiny_toml, "--out", "my-run")
    assert done.returncode == 0
    assert done.stderr.startswith("note: secure.mode is off")
    assert done.stderr.count("\n") == 1
    assert "round 6/6" in done.stdout
    assert "test accuracy" in done.stdout
    assert "60 bytes per client and round" in done.stdout
    assert [line.split() for line in done.stdout.splitlines()[-2:]] == [
        ["folder", "my-run"],
        ["report", "my-run/report.html"],
    ]


def test_square_brackets_in_a_folders_name_are_shown(
    cli: Cli, tiny_toml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "a[b]c" in cli("run", tiny_toml, "--out", "a[b]c").stdout


def test_a_quiet_run_prints_nothing(cli: Cli, tiny_toml: Path, tmp_path: Path) -> None:
    done = cli("run", tiny_toml, "--out", tmp_path / "run", "--quiet", "--set", "probe.sigma=5e-9")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert (tmp_path / "run" / "summary.json").exists()


def test_advice_goes_to_stderr(cli: Cli, tiny_toml: Path, tmp_path: Path) -> None:
    settings = ["--set", "probe.sigma=5e-9", "--set", "secure.mode=on"]
    done = cli("run", tiny_toml, "--out", tmp_path / "run", "--json", *settings)
    assert json.loads(done.stdout)["rounds"] == 6
    assert done.stderr.startswith("note: probe.sigma = 5e-09 is small")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("secure.mode=off", ["secure.mode is off", "the server sees every client"]),
        ("secure.floor=2", ["secure.floor = 2", "two clients"]),
    ],
)
def test_a_plan_that_weakens_privacy_gets_one_note(
    cli: Cli, tiny_toml: Path, tmp_path: Path, setting: str, words: list[str]
) -> None:
    options = ["--set", "secure.mode=on", "--set", setting]
    done = cli("run", tiny_toml, "--out", tmp_path / "run", "--json", *options)
    assert done.returncode == 0
    assert done.stderr.startswith("note: ")
    assert done.stderr.count("\n") == 1
    for word in words:
        assert word in done.stderr
    assert json.loads(done.stdout)["skipped_rounds"] == 0


def test_a_run_without_folder_goes_into_a_new_one(
    cli: Cli, tiny_toml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(3):
        assert cli("run", tiny_toml, "--quiet").returncode == 0
    folders = sorted(path for path in (tmp_path / "runs").iterdir() if path.is_dir())
    assert len(folders) == 3
    assert all(path.name.startswith("tiny-") for path in folders)
    assert all((path / "summary.json").exists() for path in folders)


@pytest.mark.parametrize("name", ["v1.2", "k=50, σ small", "-x", "~", "x" * 200, "é" * 100])
def test_a_run_without_folder_is_named_after_its_plan(
    cli: Cli, tiny_toml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        assert cli("run", tiny_toml, "--set", f'name="{name}"', "--quiet").returncode == 0
    folders = [path for path in (tmp_path / "runs").iterdir() if path.is_dir()]
    assert len(folders) == 2
    assert all(path.name.startswith(f"{name}-") for path in folders)


def test_settings_are_laid_over_the_plan(cli: Cli, tiny_toml: Path, tmp_path: Path) -> None:
    settings = ["--set", "probe.k=7", "--set", "rounds=2", "--set", 'update.optimizer="sgd"']
    assert cli("run", tiny_toml, "--out", tmp_path / "run", *settings, "-q").returncode == 0
    plan = parse((tmp_path / "run" / "plan.toml").read_text())
    assert (plan.probe.k, plan.rounds, plan.update.optimizer, plan.name) == (7, 2, "sgd", "tiny")


def _hash(run: Path) -> str:
    return str(json.loads((run / "summary.json").read_text())["weights_sha256"])


def test_resume_with_more_rounds_ends_where_one_long_run_ends(cli: Cli, tiny_toml: Path, tmp_path: Path) -> None:
    cli("run", tiny_toml, "--out", tmp_path / "long", "--set", "rounds=11", "-q")
    cli("run", tiny_toml, "--out", tmp_path / "parts", "-q")
    done = cli("run", "--resume", tmp_path / "parts", "--set", "rounds=11", "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["rounds"] == 11
    assert _hash(tmp_path / "parts") == _hash(tmp_path / "long")
    assert len((tmp_path / "parts" / "metrics.jsonl").read_text().splitlines()) == 11
    assert cli("verify", tmp_path / "parts", "-q").returncode == 0


def test_baseline_adds_its_fields_and_a_row(cli: Cli, tiny_toml: Path, tmp_path: Path) -> None:
    done = cli("run", tiny_toml, "--out", tmp_path / "run", "--baseline", "--json", "--set", "secure.mode=on")
    assert (done.returncode, done.stderr) == (0, "")
    summary = json.loads(done.stdout)
    assert summary.keys() >= SUMMARY | {"baseline_test_accuracy", "baseline_rounds", "baseline_seconds"}
    assert summary["estimator"] == "probe"
    assert json.loads((tmp_path / "run" / "baseline" / "summary.json").read_text())["estimator"] == "backprop"
    shown = cli("run", "--resume", tmp_path / "run", "--baseline")
    assert "backpropagation" in shown.stdout


def test_verify_confirms_a_good_run_in_one_line(cli: Cli, finished_run: Path) -> None:
    done = cli("verify", finished_run)
    assert (done.returncode, done.stderr) == (0, "")
    expected = f"6 rounds replayed, every hash right; 650 weights, sha256 {_hash(finished_run)}\n"
    assert done.stdout == expected


def test_verify_for_scripts(cli: Cli, finished_run: Path) -> None:
    verified = json.loads(cli("verify", finished_run, "--json").stdout)
    assert verified["weights_sha256"] == _hash(finished_run)
    assert (verified["rounds"], verified["skipped"], verified["n_weights"]) == (6, 0, 650)
    assert cli("verify", finished_run, "--quiet").stdout == ""


NO_TORCH = """
import sys
from baffle.cli.main import main
sys.argv = ["baffle", "verify", sys.argv[1]]
try:
    main()
except SystemExit as stopped:
    print(stopped.code, sorted({"torch", "sklearn", "scipy", "flwr", "onnxruntime"} & sys.modules.keys()))
"""


def test_verify_imports_no_machine_learning_library(finished_run: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", NO_TORCH, str(finished_run)], capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    assert "every hash right" in done.stdout
    assert done.stdout.splitlines()[-1] == "0 []"


WITHOUT_TORCH = without("torch") + "from baffle.cli.main import main; main()"


def test_a_command_that_needs_torch_says_so(tmp_path: Path) -> None:
    """The default plan does not need it."""
    setting = "error: {}: only PyTorch can follow it: pip install 'baffle[torch]'{}\n"
    drawn, baseline = setting.format("task.init", ', or set task.init = "numpy"'), setting.format("estimator", "")
    for arguments, said in (
        (["run", "--out", str(tmp_path / "run"), "--set", "task.init="], drawn),
        (["plan", "--set", "task.init="], drawn),
        (["run", "--out", str(tmp_path / "run"), "--baseline"], baseline),
    ):
        done = subprocess.run(
            [sys.executable, "-c", WITHOUT_TORCH, *arguments], capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stderr) == (2, said)
    assert not (tmp_path / "run").exists()
