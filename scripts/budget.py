"""Fails if there are more lines of Python in a folder than `[tool.baffle.lines]` in pyproject.toml allows.

A commit that needs more raises the number there, and says why.
"""

import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def lines(folder: Path) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in folder.rglob("*.py"))


def main() -> None:
    allowed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["baffle"]["lines"]
    found = {folder: lines(ROOT / folder) for folder in allowed}
    for folder, count in found.items():
        print(f"{folder}: {count:,} lines, at most {allowed[folder]:,}")
    sys.exit(any(count > allowed[folder] for folder, count in found.items()))


if __name__ == "__main__":
    main()
