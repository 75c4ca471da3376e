"""`baffle tune`: a plan on stdout or in a file, its reasons, and JSON."""

import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

from baffle.plan import load, parse

Cli = Callable[..., CompletedProcess[str]]


def test_tune_prints_a_plan_with_reasons(cli: Cli, tiny_toml: Path) -> None:
    done = cli("tune", tiny_toml, "--set", "update.rate=100.0")
    assert done.returncode == 0
    assert parse(done.stdout).update.rate < 100
    assert "# update.rate = " in done.stdout
    assert "rate 0.0" in done.stderr


def test_tune_writes_a_file_that_runs(cli: Cli, tiny_toml: Path, tmp_path: Path) -> None:
    done = cli("tune", tiny_toml, "--out", tmp_path / "tuned.toml")
    assert f"go on with: baffle run {tmp_path / 'tuned.toml'}" in done.stdout
    assert "of the run's" in done.stdout
    assert "CPU time of a scalar: " in done.stdout
    assert cli("run", tmp_path / "tuned.toml", "--out", tmp_path / "run", "-q").returncode == 0
    assert load(str(tmp_path / "tuned.toml")).rounds == 6


def test_tune_as_json(cli: Cli, tiny_toml: Path) -> None:
    done = cli("tune", tiny_toml, "--json")
    advice = json.loads(done.stdout)
    assert done.stderr == ""
    assert parse(advice["plan"]).probe.sigma == advice["reasons"][0]["after"]
    assert advice["share"] > 0
    assert advice["prices"]["dense"] == advice["prices"]["layers"] > 0
    assert isinstance(advice["advice"], list)


def test_tune_of_backpropagation_is_refused_in_one_line(cli: Cli, tiny_toml: Path) -> None:
    done = cli("tune", tiny_toml, "--set", "estimator=backprop")
    assert done.returncode == 2
    assert done.stderr.startswith("error: estimator:")
    assert len(done.stderr.splitlines()) == 1
