"""A run as its folder tells it: finished, going on, stopped or killed; simulated or over a network.

The folder may be a stranger's. Nothing that its plan names is imported here, and nothing in it is changed: the journal
is opened for reading alone, while another process may write it.
"""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from baffle.errors import BaffleError, RunFolderError, one_line
from baffle.journal.folder import RunFolder
from baffle.journal.replay import lineage_of
from baffle.journal.store import Journal
from baffle.plan import Plan, load
from baffle.plan.functions import GIVEN
from baffle.plan.tasks import metrics_of, short
from baffle.report.alignment import Alignment, measure_alignment
from baffle.report.attendance import Attendance, attendance_of
from baffle.server.recorder import RoundMetrics, require_sound

BASELINE = "baseline"
"""The subfolder in which backpropagation was run."""

SIGN_OF_LIFE = 60.0
"""A run that has written nothing for so many seconds, and for ten of its rounds, counts as stopped."""

State = Literal["finished", "going on", "stopped"]


@dataclass(frozen=True)
class RunRecord:
    """All that a report shows of one run. `metrics` is what the journal holds of each round, `rounds` the part of it
    that every round has. `test_metrics` are the names of what was measured on the test set; the first is the most
    important one."""

    folder: Path
    plan: Plan
    state: State
    quiet_seconds: float
    networked: bool
    n_weights: int
    versions: Mapping[str, str]
    metrics: tuple[Mapping[str, Any], ...]
    rounds: tuple[RoundMetrics, ...]
    test_metrics: tuple[str, ...]
    attendance: Attendance
    alignment: Alignment
    chain: str
    summary: Mapping[str, Any]
    baseline: "RunRecord | None" = None

    @property
    def name(self) -> str:
        return one_line(self.plan.name, 80) or "run"

    @property
    def given(self) -> bool:
        """Whether a program gave the data as objects (`baffle.fit`), so that the plan cannot name them."""
        return self.plan.task.data.startswith(f"{GIVEN}:")

    @property
    def rounds_done(self) -> int:
        return len(self.rounds)

    @property
    def seconds(self) -> float:
        return max((metrics.seconds for metrics in self.rounds), default=0.0)

    @property
    def contributions(self) -> int:
        """How many times a client's values became part of a sum."""
        return sum(metrics.contributors for metrics in self.rounds)

    def last(self, metric: str) -> float | None:
        """A metric as it was last measured."""
        values = (number(record.get(metric)) for record in reversed(self.metrics))
        return next((value for value in values if value is not None), None)

    def is_averaged(self, metric: str) -> bool:
        """Whether the last weights ever had another value than the averaged ones."""
        last = f"{metric}_last"
        return any(last in record and record[last] != record.get(metric) for record in self.metrics)


def read_run(path: Path, *, with_baseline: bool = True, measure: bool = True) -> RunRecord:
    """Read the run in a folder. With `measure`, the alignment is measured from the journal, which takes a second or
    two."""
    folder = RunFolder.existing(path)
    plan = load(str(folder.plan))
    summary = folder.read_summary() if folder.summary.is_file() else {}  # before the journal, which is written first
    baseline = path / BASELINE
    has_baseline = with_baseline and (baseline / "plan.toml").is_file()
    try:
        begun = folder.journal.is_file() and Journal.begun(folder.journal, read_only=True)
    except OSError as fault:
        raise RunFolderError(f"{folder.journal} cannot be read: {fault.strerror or fault}") from None
    journal = _read_journal(folder.journal, plan, measure=measure) if begun else _nothing(plan)
    rounds: tuple[RoundMetrics, ...] = journal["rounds"]
    pace = rounds[-1].seconds / len(rounds) if rounds else 0.0
    quiet = _quiet_seconds(folder)
    return RunRecord(
        folder=path,
        plan=plan,
        state=_state(folder, summary, quiet, pace),
        quiet_seconds=quiet,
        summary=summary,
        test_metrics=_test_metrics(plan, summary, journal["metrics"]),
        baseline=read_run(baseline, with_baseline=False, measure=False) if has_baseline else None,
        **journal,
    )


def number(value: Any) -> float | None:
    """A finite number, or nothing."""
    known = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if known and math.isfinite(value) else None


def _read_journal(path: Path, plan: Plan, *, measure: bool) -> dict[str, Any]:
    with Journal.open(path) as journal, journal.one_view():
        metrics = tuple(require_sound(record) for record in journal.metrics())
        length = journal.length()
        trajectory = lineage_of(journal, plan).trajectory
        return {
            "networked": journal.statements.networked,
            "n_weights": journal.n_weights(),
            "versions": journal.versions(),
            "metrics": metrics,
            "rounds": tuple(msgspec.convert(record, RoundMetrics) for record in metrics),
            "attendance": attendance_of(journal.participation, plan.federation.clients),
            "alignment": measure_alignment(journal, trajectory, measure=measure),
            "chain": journal.entry(length - 1).chain.hex() if length else "",
        }


def _nothing(plan: Plan) -> dict[str, Any]:
    """What is known of a run that was stopped before it had a journal."""
    return {
        "networked": False,
        "n_weights": 0,
        "versions": {},
        "metrics": (),
        "rounds": (),
        "attendance": Attendance(plan.federation.clients, {}, {}, {}),
        "alignment": Alignment(None, None, None, "the run has no journal yet"),
        "chain": "",
    }


def _state(folder: RunFolder, summary: Mapping[str, Any], quiet: float, pace: float) -> State:
    """A process that ends in order takes the write-ahead log of its journal away. One that was killed leaves it behind,
    as one that is at work does, so a folder that stays quiet for long counts as stopped."""
    if summary:
        return "finished"
    at_work = folder.journal.with_name(f"{folder.journal.name}-wal").exists() or not folder.journal.exists()
    return "going on" if at_work and quiet < max(SIGN_OF_LIFE, 10 * pace) else "stopped"


def _quiet_seconds(folder: RunFolder) -> float:
    """Seconds since the run last wrote something."""
    changed = [file.stat().st_mtime for file in (folder.plan, folder.metrics, folder.summary) if file.exists()]
    return max(0.0, time.time() - max(changed, default=0.0))


def _test_metrics(plan: Plan, summary: Mapping[str, Any], metrics: tuple[Mapping[str, Any], ...]) -> tuple[str, ...]:
    """Names of what was measured for the averaged weights, in the plan's order."""
    planned = [f"test_{short(metric)}" for metric in metrics_of(plan.task)]
    measured = {
        name
        for record in (summary, *metrics)
        for name, value in record.items()
        if name.startswith("test_") and number(value) is not None
    }
    others = sorted(name for name in measured if name.removesuffix("_last") not in planned)
    return tuple(name for name in (*planned, *others) if name in measured)


def read_runs(paths: tuple[Path, ...]) -> tuple[RunRecord, ...]:
    """Several runs; the error of one names its folder."""
    if len(set(paths)) != len(paths):
        raise BaffleError("a folder is named twice; expected each run once")
    return tuple(read_run(path) for path in paths)
