"""The wheel and the source archive, installed into empty environments and run far from this checkout."""

import json
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from baffle.version import __version__
from tests.support.environments import SUPPORTED, fresh, python, require_registry, run

ROOT = Path(__file__).resolve().parents[2]
CONSTRAINTS = ROOT / "constraints.txt"

LARGEST_ENVIRONMENT = 500e6  # bytes that the demo's environment may take

HEAVY = {"torch", "scikit-learn", "scipy", "flwr", "matplotlib"}


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the source archive of this checkout."""
    folder = tmp_path_factory.mktemp("packages")
    require_registry(folder)
    subprocess.run(
        [sys.executable, "-m", "build", "--outdir", folder, ROOT], check=True, capture_output=True, timeout=300
    )
    return folder


def only(folder: Path, pattern: str) -> Path:
    (path,) = folder.glob(pattern)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("version", SUPPORTED)
def test_the_wheel_runs_the_default_plan_without_the_checkout(packages: Path, tmp_path: Path, version: str) -> None:
    interpreter = python(version)
    if interpreter is None:
        pytest.skip(f"this machine has no Python {version}")
    programs = fresh(tmp_path / "environment", interpreter)
    wheel = only(packages, "*.whl")
    installed = run(f"pip install --quiet --constraint {CONSTRAINTS} '{wheel}[demo]'", programs, tmp_path)
    assert installed.returncode == 0, installed.stderr

    done = run("baffle run --set rounds=2 --out run --json", programs, tmp_path)
    assert done.returncode == 0, done.stderr
    verified = run("baffle verify run --json", programs, tmp_path)
    assert json.loads(verified.stdout)["weights_sha256"] == json.loads(done.stdout)["weights_sha256"]
    assert run("baffle --version", programs, tmp_path).stdout.strip() == f"baffle, version {__version__}"

    names = {
        package["name"].lower() for package in json.loads(run("pip list --format json", programs, tmp_path).stdout)
    }
    assert not HEAVY & names
    size = sum(file.stat().st_size for file in (tmp_path / "environment").rglob("*") if not file.is_symlink())
    assert size < LARGEST_ENVIRONMENT

    missing = run("baffle run --set estimator=backprop --out baseline", programs, tmp_path)
    assert (missing.returncode, missing.stderr) == (
        2,
        "error: estimator: only PyTorch can follow it: pip install 'baffle[torch]'\n",
    )


@pytest.mark.slow
def test_the_source_archive_installs_as_well(packages: Path, tmp_path: Path) -> None:
    programs = fresh(tmp_path / "environment")
    archive = only(packages, "*.tar.gz")
    installed = run(f"pip install --quiet --constraint {CONSTRAINTS} '{archive}[edge]'", programs, tmp_path)
    assert installed.returncode == 0, installed.stderr
    shown = run("baffle plan --list", programs, tmp_path)
    assert (shown.returncode, "digits" in shown.stdout) == (0, True), shown.stderr


@pytest.mark.slow
def test_both_hold_the_package_and_nothing_that_a_user_does_not_need(packages: Path) -> None:
    with zipfile.ZipFile(only(packages, "*.whl")) as wheel:
        in_wheel = set(wheel.namelist())
    with tarfile.open(only(packages, "*.tar.gz")) as archive:
        in_archive = {name.partition("/")[2] for name in archive.getnames()}
    ours = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src" / "baffle").rglob("*") if path.is_file()}
    ours = {name for name in ours if "__pycache__" not in name}
    assert {"baffle/data/digits.npz", "baffle/plans/digits.toml", "baffle/py.typed"} <= ours <= in_wheel
    assert {f"src/{name}" for name in ours} | {"LICENSE", "README.md", "pyproject.toml"} <= in_archive
    assert {name.split("/")[0] for name in in_wheel} == {"baffle", f"baffle-{__version__}.dist-info"}
    assert not any(name.startswith(("results/", ".ci")) for name in in_archive)


def test_every_page_that_names_the_version_names_this_one() -> None:
    assert re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)[1] == __version__  # type: ignore[index]
    assert f"\n## {__version__}" in (ROOT / "CHANGELOG.md").read_text()
    for page in ("README.md", "docs/deploy.md"):
        assert set(re.findall(r"baffle-([\d.]+)-py3", (ROOT / page).read_text())) == {__version__}


def test_extras_are_what_their_names_say() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]

    def packages_of(extra: str) -> set[str]:
        names = set[str]()
        for requirement in extras[extra]:
            name = re.match(r"[\w-]+", requirement)[0]  # type: ignore[index]
            inner = re.search(r"\[(.+)\]", requirement)
            names |= set().union(*map(packages_of, inner[1].split(","))) if name == "baffle" and inner else {name}
        return names

    assert packages_of("edge") == {"onnxruntime"}
    assert packages_of("onnx") == {"onnx", "onnxruntime"}
    assert packages_of("demo") == packages_of("onnx") | {"plotly"}
    assert packages_of("torch") == {"torch"}
    assert packages_of("export") == {"onnx", "onnxruntime", "onnxscript", "torch"}
    assert "torch" not in packages_of("flower") | packages_of("images") | packages_of("report")
    assert packages_of("export") | packages_of("flower") <= packages_of("all") <= packages_of("dev")
