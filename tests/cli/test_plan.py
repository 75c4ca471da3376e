"""`baffle plan` on good input: costs, presets, whole plans and partitions."""

import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from baffle.plan import change, load, parse, presets

Cli = Callable[..., CompletedProcess[str]]


def test_plan_shows_what_a_run_will_cost(cli: Cli, tiny_toml: Path) -> None:
    done = cli("plan", tiny_toml)
    assert (done.returncode, done.stderr) == (0, "")
    for shown in ("650", "60 bytes per client and round", "5 per client and round, 90 in all", "cos 0.078"):
        assert shown in done.stdout


def test_plan_as_json(cli: Cli, tiny_toml: Path) -> None:
    costs = json.loads(cli("plan", tiny_toml, "--json").stdout)
    assert (costs["uplink_bytes"], costs["forwards"], costs["n_weights"]) == (60, 5, 650)
    assert costs["alignment"] == pytest.approx(0.0782, rel=1e-2)


def test_plan_gives_advice(cli: Cli, tiny_toml: Path) -> None:
    done = cli("plan", tiny_toml, "--set", "probe.sigma=5e-9")
    assert done.returncode == 0
    assert "note: probe.sigma = 5e-09 is small" in done.stderr


def test_plan_defaults_to_digits_and_writes_no_file(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert json.loads(cli("plan", "--json").stdout)["n_weights"] == 5_994
    assert list(tmp_path.iterdir()) == []


def test_plan_lists_the_presets(cli: Cli) -> None:
    assert cli("plan", "--list").stdout.splitlines() == presets()


def test_plan_prints_a_whole_plan_to_start_from(cli: Cli, tiny_toml: Path, tmp_path: Path) -> None:
    text = cli("plan", tiny_toml, "--toml", "--set", "probe.k=6").stdout
    plan = parse(text)
    assert plan.probe.k == 6
    assert plan.ring.n_max == 480
    (tmp_path / "mine.toml").write_text(text)
    cli("run", tmp_path / "mine.toml", "--out", tmp_path / "run", "-q")
    assert change(parse((tmp_path / "run" / "plan.toml").read_text()), ["run.runtime="]) == plan


def test_a_preset_can_be_named(cli: Cli) -> None:
    plan = parse(cli("plan", "digits", "--toml").stdout)
    assert plan.task == load("digits").task


def test_show_partition_draws_a_line_for_each_client(cli: Cli, tiny_toml: Path) -> None:
    done = cli("plan", tiny_toml, "--show-partition", "--set", "federation.partition=dirichlet")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert "3, with 1,438 samples in all" in lines[0]
    assert [line.split()[0] for line in lines[-3:]] == ["0", "1", "2"]


def test_show_partition_as_json_lists_every_clients_classes(cli: Cli, tiny_toml: Path) -> None:
    done = cli("plan", tiny_toml, "--show-partition", "--json")
    clients = json.loads(done.stdout)["clients"]
    assert [client["client"] for client in clients] == [0, 1, 2]
    assert (
        [sum(client["classes"]) for client in clients] == [client["samples"] for client in clients] == [480, 479, 479]
    )
    assert clients[0]["domain"] is clients[0]["writer"] is None
