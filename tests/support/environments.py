"""What tests need of a machine: empty environments, Pythons to make them with, a small disk, imports that fail."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

SUPPORTED = ("3.11", "3.12", "3.13", "3.14")


def python(version: str) -> str | None:
    """The path of this version of Python: on PATH, or among pyenv's."""
    if version == f"{sys.version_info.major}.{sys.version_info.minor}":
        return sys.executable
    kept = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [shutil.which(f"python{version}"), *sorted(map(str, kept.glob(f"{version}.*/bin/python")))]
    works = (path for path in candidates if path and subprocess.run([path, "-c", ""], check=False).returncode == 0)
    return next(works, None)


def fresh(folder: Path, interpreter: str = sys.executable) -> Path:
    """A new environment, as bare as a base image. Gives its folder of programs."""
    subprocess.run([interpreter, "-m", "venv", folder], check=True, timeout=120)
    return folder / "bin"


def run(command: str, programs: Path, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a shell command in an environment. This checkout is out of Python's sight."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment |= {"PATH": f"{programs}:{os.environ['PATH']}", **variables}
    return subprocess.run(
        ["/bin/sh", "-c", command], cwd=cwd, env=environment, capture_output=True, text=True, timeout=600
    )


def require_registry(folder: Path) -> None:
    """Skip the test where no package can be fetched."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--retries", "1", "--timeout", "10", "hatchling"]
    done = subprocess.run([*command, "--dest", folder / "probe"], capture_output=True, text=True, timeout=120)
    if done.returncode:
        pytest.skip(f"needs a registry of packages: {done.stderr.strip().splitlines()[-1]}")


def run_python(*arguments: str | Path, cwd: Path, program: str | None = None) -> str:
    """What a Python program prints that ends well and complains about nothing: a file, or the text of one."""
    command = [sys.executable, *(arguments or ["-"])]
    done = subprocess.run(command, input=program, cwd=cwd, capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


PAGE = 4096


@dataclass(frozen=True)
class SmallDisk:
    """A file system of its own, mounted at a folder."""

    folder: Path

    @property
    def _ballast(self) -> Path:
        return self.folder / "ballast"

    def fill(self, leave: int = 0) -> None:
        """Leave room for this many pages and no more."""
        with suppress(OSError), self._ballast.open("ab", buffering=0) as file:
            while True:
                file.write(bytes(PAGE))
        with self._ballast.open("r+b") as file:
            file.truncate(self._ballast.stat().st_size - leave * PAGE)

    def free(self) -> None:
        self._ballast.unlink(missing_ok=True)


@contextmanager
def small_disk(folder: Path, size: int = 1 << 20) -> Iterator[SmallDisk]:
    """Mount a small disk at a folder. Skips the test where this is not allowed."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "baffle-test", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("needs mount")
    if done.returncode:
        pytest.skip(f"needs the right to mount a disk: {done.stderr.strip()}")
    try:
        yield SmallDisk(folder)
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


BLOCK = """
import importlib.abc, sys

class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in {packages!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocked())
"""


def without(*packages: str) -> str:
    """The beginning of a program that cannot import these packages."""
    return BLOCK.format(packages=packages)
