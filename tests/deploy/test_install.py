"""The install steps of deploy/Containerfile, run without a container: what the file says is what runs."""

import json
import os
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support.environments import fresh, require_registry, run

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "deploy" / "Containerfile"
WHEELHOUSE = "/wheelhouse"


@dataclass
class Stage:
    """One stage of a Containerfile: its base image, and its instructions in order."""

    base: str
    steps: list[tuple[str, str]] = field(default_factory=list)

    def all(self, instruction: str) -> list[str]:
        return [rest for name, rest in self.steps if name == instruction]


def stages() -> list[Stage]:
    lines = [line for line in FILE.read_text().splitlines() if line.strip() and not line.startswith("#")]
    found: list[Stage] = []
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        instruction, rest = line.split(maxsplit=1)
        if instruction == "FROM":
            found.append(Stage(rest.split()[0]))
        else:
            found[-1].steps.append((instruction, " ".join(rest.split())))
    return found


def shell(step: str) -> str:
    """The shell command of a RUN line, without the options of RUN itself."""
    return re.sub(r"^(--\S+ )+", "", step)


def without_index(command: str, programs: Path, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """The same where pip has no settings from this machine: they could name further places to find wheels in."""
    unset = " ".join(name for name in os.environ if name.startswith("PIP_"))
    return run(
        f"unset {unset}; {command}" if unset else command, programs, cwd, PIP_CONFIG_FILE=os.devnull, **variables
    )


def test_both_stages_have_the_same_base_and_install_what_is_tried_and_no_more() -> None:
    wheels, image = stages()
    assert wheels.base == image.base, "wheels of one Python are not for another"
    assert re.fullmatch(r"python:3\.\d+-slim-\w+", image.base)
    assert wheels.all("ARG") == image.all("ARG") == ["EXTRA=edge"]
    assert [shell(step).split()[0] for step in wheels.all("RUN")] == ["pip"], "nothing else is installed"
    assert [shell(step).split()[0] for step in image.all("RUN")] == ["pip", "useradd"]
    assert image.all("COPY") == []
    names = [name for name, _ in image.steps]
    assert image.all("USER") == ["9092"], "it runs not as root"
    assert "--uid 9092" in image.all("RUN")[-1]
    assert "RUN" not in names[names.index("USER") :]
    assert json.loads(image.all("ENTRYPOINT")[0]) == ["baffle"]


@pytest.mark.slow
def test_the_install_steps_give_a_client_that_needs_nothing_else(tmp_path: Path) -> None:
    require_registry(tmp_path)
    wheels, image = stages()
    build = tmp_path / "build"
    build.mkdir()
    for step in wheels.all("COPY"):
        *sources, target = step.split()
        for source in sources:
            if (ROOT / source).is_dir():  # COPY takes what is in a folder, and not the folder
                shutil.copytree(ROOT / source, build / target, dirs_exist_ok=True)
            else:
                shutil.copy(ROOT / source, build / target)

    def here(step: str) -> str:
        return shell(step).replace(WHEELHOUSE, str(tmp_path / "wheelhouse"))

    extra = wheels.all("ARG")[0].removeprefix("EXTRA=")
    made = run(here(wheels.all("RUN")[0]), fresh(tmp_path / "wheels"), build, EXTRA=extra)
    assert made.returncode == 0, made.stderr

    programs = fresh(tmp_path / "image")
    installed = without_index(here(image.all("RUN")[0]), programs, tmp_path, EXTRA=extra)
    assert installed.returncode == 0, installed.stderr

    listed = without_index("pip list --format json", programs, tmp_path)
    versions = {package["name"].lower(): package["version"] for package in json.loads(listed.stdout)}
    pinned = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text().lower(), re.MULTILINE))
    assert {"onnxruntime", "numpy", "cryptography"} <= versions.keys()
    assert not {"torch", "flwr", "onnx"} & versions.keys()
    ours = versions.keys() - {"baffle", "pip", "setuptools"}
    assert {name: versions[name] for name in ours} == {name: pinned.get(name) for name in ours}

    told = without_index("baffle --version", programs, tmp_path)
    assert told.stdout.strip() == f"baffle, version {versions['baffle']}", told.stderr
    shown = without_index("baffle join --help", programs, tmp_path)
    assert (shown.returncode, "--state" in shown.stdout) == (0, True), shown.stderr
    joined = without_index("baffle join 127.0.0.1:1 --keys none --state state", programs, tmp_path)
    assert joined.returncode == 2, joined.stderr
    assert "pip install" not in joined.stderr, "a module is missing that join needs before it reads keys"
    assert "none" in joined.stderr
