"""A disk of a few hundred kilobytes, to be filled by tests."""

import errno
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

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
    except OSError as fault:
        if fault.errno != errno.ENOENT:
            raise
        pytest.skip("needs mount")
    if done.returncode:
        pytest.skip(f"needs the right to mount a disk: {done.stderr.strip()}")
    try:
        yield SmallDisk(folder)
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
