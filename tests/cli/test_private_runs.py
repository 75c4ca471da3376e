"""Private runs at the command line: ε before, during and after a run, and a clipping norm for plans without one."""

import json
import tomllib
from pathlib import Path

import pytest

from baffle.plan import load
from tests.support.command_line import Cli, refused, setting

SETTINGS = ("federation.weighting=uniform", "federation.clients=6", "secure.floor=5", "privacy.epsilon=30")
NOT_MEASURED = "not measured: the run is private"


@pytest.fixture
def private(tiny_toml: Path) -> list[str]:
    """The tiny plan with noise and without a clipping norm, as arguments of a command."""
    return [str(tiny_toml), *setting(*SETTINGS)]


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
    found = json.loads(cli("plan", *private, "--set", "privacy.clip=2.5", "--json", "--no-prices").stdout)["privacy"]
    assert (found["clip"], found["sharers"], found["rounds"], found["delta"]) == (2.5, 5, 6, 1e-5)
    assert 29.9 < found["epsilon"] <= 30
    assert found["noise_on_value"] == pytest.approx(found["noise"] * 2.5 * (6 / 5) ** 0.5 / 6, rel=1e-6)


def test_plan_warns_of_a_loose_norm_a_low_floor_and_much_noise(cli: Cli, private: list[str]) -> None:
    done = cli("plan", *private, *setting("privacy.clip=1000.0", "secure.floor=3"), "--no-prices")
    assert "note: privacy.clip = 1000 is loose" in done.stderr
    assert "note: secure.floor = 3: only 3 of 6 clients are counted on for noise" in done.stderr
    assert "note: noise outweighs what a round measures" in done.stderr


def test_plan_says_what_noise_leaves_of_a_round(cli: Cli, private: list[str]) -> None:
    """By the rule in docs/privacy.md: K / (1 + noise² · K / (a·m)²), from the values and the noise that it shows."""
    found = cli("plan", *private, "--set", "privacy.clip=2.5", "--json", "--no-prices")
    measured = json.loads(found.stdout)["privacy"]
    ratio = measured["noise_on_value"] / measured["value"]
    assert measured["values"] == 4
    assert measured["worth"] == pytest.approx(4 / (1 + ratio**2))
    shown = cli("plan", *private, "--set", "privacy.clip=2.5", "--no-prices")
    assert f"so a sum of 6 clients tells about as much as {measured['worth']:.2g} of its 4 values" in shown.stderr


def test_plan_says_what_a_lying_server_gets_and_what_privacy_would_cost(cli: Cli, tiny_toml: Path) -> None:
    lying = setting("federation.weighting=uniform", "federation.clients=6", "secure.mode=malicious-server")
    done = cli("plan", tiny_toml, *lying, "--no-prices")
    assert "without [privacy]: clients refuse it, unless they pin the plan" in done.stderr
    assert "With privacy.epsilon = 8 over 6 rounds a sum of 6 clients tells about as much as " in done.stderr
    clip = done.stderr.split("privacy.clip=")[1].split(",")[0]
    private = cli("plan", tiny_toml, *lying, *setting("privacy.epsilon=8", f"privacy.clip={clip}"), "--no-prices")
    assert "clients refuse it" not in private.stderr
    told, measured = (text.split("tells about as much as ")[1].split()[0] for text in (done.stderr, private.stderr))
    assert float(told) == pytest.approx(float(measured), rel=0.1)
    dearer = cli("plan", tiny_toml, *lying, *setting("privacy.epsilon=9", f"privacy.clip={clip}"), "--no-prices")
    assert "is more than the 8 that clients spend in all their runs" in dearer.stderr


@pytest.mark.parametrize(
    ("clip", "says"),
    [
        ("0", " is 0: expected the bound on the length"),
        ("1e-308", ": expected 1e-40 to 1e+40, the length of a usual client's vector, got 1e-308; leave it"),
        ("1e300", ": expected float <= 3.4028234663852886e+38, got 1e+300"),
        ("1e12", ": 1e+12 leaves the ring too coarse: "),
    ],
)
def test_a_clipping_norm_of_no_vector_is_refused_and_leaves_nothing(
    cli: Cli, private: list[str], tmp_path: Path, clip: str, says: str
) -> None:
    done = cli("run", *private, "--set", f"privacy.clip={clip}", "--out", tmp_path / "run")
    assert "ring.d_max" not in refused(done, f"error: privacy.clip{says}")
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
    assert "bytes up, without noise" in cli("run", "--resume", folder, "--baseline").stdout
    assert not load(str(folder / "baseline" / "plan.toml")).privacy.on


def test_tune_chooses_under_the_noise_and_proposes_a_clipping_norm(
    cli: Cli, private: list[str], tmp_path: Path
) -> None:
    out = tmp_path / "tuned.toml"
    done = cli("tune", *private, "--set", "rounds=8", "--out", out)
    assert done.returncode == 0, done.stderr
    assert "privacy.clip = " in done.stdout
    assert "a real run must not look at its clients' vectors" in done.stdout
    tuned = load(str(out))
    assert tuned.privacy.clip > 0
    assert tuned.privacy.noise == 0  # it follows from ε when a run starts
