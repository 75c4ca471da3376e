"""Private runs at the command line: ε before, during and after a run, and a clipping norm for plans without one."""

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from baffle.plan import load

Cli = Callable[..., CompletedProcess[str]]

SETTINGS = ("federation.weighting=uniform", "federation.clients=6", "secure.floor=5", "privacy.epsilon=30")
NOT_MEASURED = "not measured: the run is private"


@pytest.fixture
def private(tiny_toml: Path) -> list[str]:
    """The tiny plan with noise and without a clipping norm, as arguments of a command."""
    return [str(tiny_toml), *(word for setting in SETTINGS for word in ("--set", setting))]


def test_plan_tells_epsilon_and_proposes_a_clipping_norm(cli: Cli, private: list[str]) -> None:
    done = cli("plan", *private)
    assert done.returncode == 0
    assert "ε = 30 at δ = 1e-05 for a client that takes part in all 6 rounds" in done.stdout
    assert "a part in 5 of the variance from each client" in done.stdout
    assert "is proposed: the median length of the vectors of 6 simulated clients" in done.stderr
    assert "a real run must not look at its clients' vectors" in done.stderr
    settled = tomllib.loads(cli("plan", *private, "--toml").stdout)["privacy"]
    assert f"privacy.clip = {settled['clip']:g} is proposed" in done.stderr
    assert settled["sharers"] == 5


def test_plan_as_json_has_what_privacy_costs(cli: Cli, private: list[str]) -> None:
    found = json.loads(cli("plan", *private, "--set", "privacy.clip=2.5", "--json").stdout)["privacy"]
    assert (found["clip"], found["sharers"], found["rounds"], found["delta"]) == (2.5, 5, 6, 1e-5)
    assert 29.9 < found["epsilon"] <= 30
    assert found["noise_on_value"] == pytest.approx(found["noise"] * 2.5 * (6 / 5) ** 0.5 / 6, rel=1e-6)


def test_plan_warns_of_a_loose_norm_a_low_floor_and_much_noise(cli: Cli, private: list[str]) -> None:
    done = cli("plan", *private, "--set", "privacy.clip=1000.0", "--set", "secure.floor=3")
    assert "note: privacy.clip = 1000 is loose" in done.stderr
    assert "note: secure.floor = 3: only 3 of 6 clients are counted on for noise" in done.stderr
    assert "note: noise outweighs what a round measures" in done.stderr


@pytest.mark.parametrize(
    ("clip", "says"),
    [
        (
            "1e-308",
            "privacy.clip: expected 1e-40 to 1e+40, the length of a usual client's vector, got 1e-308; leave it",
        ),
        ("1e300", "privacy.clip: expected 1e-40 to 1e+40, the length of a usual client's vector, got 1e+300; leave it"),
        ("1e12", "privacy.clip: 1e+12 leaves the ring too coarse: "),
    ],
)
def test_a_clipping_norm_of_no_vector_is_refused_as_such(cli: Cli, private: list[str], clip: str, says: str) -> None:
    done = cli("plan", *private, "--set", f"privacy.clip={clip}")
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {says}")
    assert "ring.d_max" not in done.stderr


def test_a_run_without_a_clipping_norm_is_refused_and_leaves_nothing(
    cli: Cli, private: list[str], tmp_path: Path
) -> None:
    done = cli("run", *private, "--out", tmp_path / "run")
    assert done.returncode == 2
    assert "error: privacy.clip is 0: expected the bound on the length" in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_run_shows_epsilon_instead_of_a_loss_from_its_start_to_its_report(
    cli: Cli, private: list[str], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    done = cli("run", *private, "--set", "privacy.clip=2.0", "--out", folder)
    assert done.returncode == 0, done.stderr
    assert "round 6/6  ε 30" in done.stdout
    assert "the sums are private, single vectors are not" in done.stderr
    assert f"losses are {NOT_MEASURED}" in done.stdout
    assert "ε = 30 at δ = 1e-05, noise " in done.stdout
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["train_loss"], summary["clip"]) == (None, 2.0)
    shown = cli("status", folder).stdout
    assert NOT_MEASURED in shown
    assert f"epsilon           {summary['epsilon']:.3g}" in shown
    told = json.loads(cli("status", folder, "--json").stdout)
    assert (told["epsilon"], told["loss"]) == (summary["epsilon"], None)
    assert cli("verify", folder).returncode == 0
    assert cli("report", folder).returncode == 0
    page = (folder / "report.html").read_text()
    assert "privacy: ε" in page
    assert "at δ = 1e-05; so losses are not measured" in page
    assert "training loss" not in page
    assert "NEW_FOLDER" not in page  # nobody can repeat the noise


def test_status_of_another_run_says_that_epsilon_is_not_counted(cli: Cli, finished_run: Path) -> None:
    assert "not counted: the run is not private" in cli("status", finished_run).stdout


def test_a_baseline_beside_a_private_run_has_no_noise(cli: Cli, private: list[str], tmp_path: Path) -> None:
    done = cli("run", *private, "--set", "privacy.clip=2.0", "--baseline", "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert "bytes up, without noise" in done.stdout
    assert not load(str(tmp_path / "run" / "baseline" / "plan.toml")).privacy.on


def test_tune_chooses_under_the_noise_and_proposes_a_clipping_norm(
    cli: Cli, private: list[str], tmp_path: Path
) -> None:
    out = tmp_path / "tuned.toml"
    done = cli("tune", *private, "--set", "rounds=20", "--out", out)
    assert done.returncode == 0, done.stderr
    assert "privacy.clip = " in done.stdout
    assert "a real run must not look at its clients' vectors" in done.stdout
    tuned = load(str(out))
    assert tuned.privacy.clip > 0
    assert tuned.privacy.noise == 0  # it follows from ε when a run starts
    assert cli("run", out, "--out", tmp_path / "run").returncode == 0
