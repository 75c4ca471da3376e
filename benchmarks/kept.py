"""Results of a benchmark that are kept as they come: what is in the file is not measured again."""

import json
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any


class Kept:
    """Rows by kind and name, written after each of them. `only` are patterns of the names to measure."""

    def __init__(self, out: Path | None, only: Sequence[str], kinds: Sequence[str]) -> None:
        self.out, self.only = out, only
        self.found: dict[str, Any] = {kind: {} for kind in kinds}
        if out and out.exists():
            self.found |= json.loads(out.read_text())

    def note(self, kind: str, name: str, measure: Callable[[], Mapping[str, Any]]) -> None:
        if name in self.found[kind] or not any(fnmatch(name, pattern) for pattern in self.only):
            return
        self.found[kind][name] = row = measure()
        print(kind, name, json.dumps(row), flush=True)
        if self.out:
            new = self.out.with_name(f".{self.out.name}.new")
            new.write_text(json.dumps(self.found, indent=1) + "\n")
            new.replace(self.out)

    def trials(self, way: str) -> dict[float, float]:
        """The last accuracy of each trial of a way, by its rate."""
        known = (row for name, row in self.found["trials"].items() if name.startswith(f"{way}/"))
        return {row["rate"]: row["curve"][-1][-1] for row in known}
