"""What tests of whole runs share: a watcher that interrupts a run, and the metrics that a run wrote."""

import json
from pathlib import Path
from typing import Any

from baffle.server.recorder import Progress, Watch


def interrupt_after(rounds: int) -> Watch:
    """A watcher that acts like Ctrl-C when this many rounds are done."""

    def stop(progress: Progress) -> None:
        if progress.rounds_done == rounds:
            raise KeyboardInterrupt

    return stop


def records_of(run: Path) -> list[dict[str, Any]]:
    """The metrics of each round, from the run's folder."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
