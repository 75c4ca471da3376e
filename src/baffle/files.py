"""Files that are replaced whole or not at all, also where a process is killed or a disk is full."""

import os
from pathlib import Path


def replace(path: Path, data: bytes) -> None:
    """Whoever reads the file, before or after a crash, finds what it held before or all of `data`."""
    new = path.with_name(f".{path.name}.new")
    with new.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
