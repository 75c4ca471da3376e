"""Reading a run from its folder: finished, going on, stopped or killed; simulated or over a network.

The folder may come from an untrusted source. Nothing that its plan names is imported, and nothing in it is changed: the
journal is opened read-only, while another process may write it.
"""

import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from baffle.core.arrays import F64
from baffle.core.directions import Directions, blocks, coverage
from baffle.core.ports import CONTRIBUTED, MISSING
from baffle.core.rebuild import EXACT_DIRECTIONS
from baffle.core.seeds import Scratch
from baffle.errors import BaffleError, one_line
from baffle.journal.database import Participation
from baffle.journal.folder import RunFolder
from baffle.journal.replay import lineage_of
from baffle.journal.store import Journal
from baffle.measuring.costs import expected_alignment
from baffle.network.status import ranges
from baffle.plan import Plan, load
from baffle.plan.functions import GIVEN
from baffle.plan.tasks import is_own, metrics_of, short
from baffle.server.recorder import RoundMetrics, require_sound
from baffle.trajectory import Trajectory, checked_groups

BASELINE = "baseline"  # the subfolder of the baseline, which is run with backpropagation
SIGN_OF_LIFE = 60.0  # a run counts as stopped if it wrote nothing for this many seconds and for ten of its rounds
LEFT_OUT = "left out"  # a client answered but is not in the sum: it abstained, was refused, or too few others answered
MOST_WORDS = 200  # different reasons that a report keeps
MOST_NUMBERS = 150_000_000  # of directions that a report draws again, which takes a second or two
LARGEST_ERROR = 0.5  # a measured alignment is not shown if its relative standard error is larger than this
FEWEST_ROUNDS = 10

State = Literal["finished", "going on", "stopped"]


@dataclass(frozen=True)
class Attendance:
    """How often each client ended a round in each way, the same for each round, and why clients were left out."""

    clients: int
    by_client: Mapping[int, Mapping[str, int]]
    by_round: Mapping[int, Mapping[str, int]]
    reasons: Mapping[str, int]


def attendance_of(participation: Participation, clients: int) -> Attendance:
    by_client, by_round = dict[int, Counter[str]](), dict[int, Counter[str]]()
    reasons = Counter[str]()

    def way(event: str) -> str:
        return event if event in (CONTRIBUTED, MISSING) else LEFT_OUT

    for client, event, count in participation.by_client(clients):
        by_client.setdefault(client, Counter())[way(event)] += count
        if way(event) == LEFT_OUT and len(reasons) < MOST_WORDS:
            reasons[one_line(event)] += count
    for number, event, count in participation.by_round():
        by_round.setdefault(number, Counter())[way(event)] += count
    return Attendance(clients, by_client, by_round, reasons)


@dataclass(frozen=True)
class Alignment:
    """How well a run's estimates pointed along the gradient: the expected cosine, and the one measured from its scalars
    with its standard error. `missing` is the reason if there is no measurement.

    A round's estimate is the mean of K vectors v_k = D_k·z_k, one for each direction; the expectation of each is the
    gradient g. Different directions are independent, so the expectation of ⟨v_j, v_k⟩ for j ≠ k is |g|², whatever noise
    and curvature the scalars D_k carry, and

        cos²(estimate, g)  =  |g|² / |estimate|²,      |g|² ≈ mean of ⟨v_j, v_k⟩ over j ≠ k.

    One round is too noisy; the sums over many rounds are not, and their spread gives the standard error. The gradient
    is that of the round's own samples. Every weight must be touched by two directions or more.
    """

    expected: float | None = None
    measured: float | None = None
    error: float | None = None
    missing: str = ""


def measure_alignment(journal: Journal, trajectory: Trajectory, *, measure: bool = True) -> Alignment:
    plan = trajectory.plan
    if plan.estimator == "backprop":
        return Alignment(missing="backpropagation has the gradient itself")
    expected = expected_alignment(trajectory)
    if plan.estimator == "law":
        return Alignment(expected, missing="the scalars were drawn, not probed")
    if not measure:
        return Alignment(expected, missing="the run goes on, or it was not asked for")
    if missing := _unmeasurable(trajectory):
        return Alignment(expected, missing=missing)
    return measured_alignment(expected, _sampled(journal, trajectory))


def _unmeasurable(trajectory: Trajectory) -> str:
    plan = trajectory.plan
    if plan.outcome_kind != "scalars":
        return "the journal holds whole vectors and no scalars"
    if plan.head_size:
        return "the gradient of the last layer is exact, and that of the rest alone is estimated"
    if plan.federation.local_steps > 1:
        return "a round has several steps, each with a gradient of its own"
    if is_own(plan.probe.distribution):
        return "directions follow from a function of your own"
    if plan.secure.groups > 1:
        return "the round's groups have sums of their own"
    if plan.federation.tiers:
        return "clients of different tiers answer different directions"
    if min(coverage(trajectory.supports, trajectory.n)) < 2:
        return "some weights are touched by one direction a round, or by none"
    if FEWEST_ROUNDS * sum(support.size for support in trajectory.supports) > MOST_NUMBERS:
        return f"the directions of {FEWEST_ROUNDS} rounds are too many numbers to draw again"
    return ""


def _sampled(journal: Journal, trajectory: Trajectory) -> F64:
    """|g|² and |estimate|² of rounds at even steps, as many as fit into MOST_NUMBERS."""
    drawn = sum(support.size for support in trajectory.supports)
    length = journal.length()
    step = max(1, math.ceil(length * drawn / MOST_NUMBERS))
    scratch, pairs = Scratch(), list[tuple[float, float]]()
    for entry in journal.entries():
        if entry.round % step:
            continue
        outcome = entry.outcome()
        if outcome.kind == "scalars":
            ((key, totals),) = checked_groups(outcome, trajectory.plan, trajectory.length)
            scalars, _ = trajectory.means(*totals)
            pairs.append(squares(scalars, trajectory.directions(key), trajectory, scratch))
    return np.array(pairs).reshape(-1, 2)


def squares(scalars: F64, directions: Directions, trajectory: Trajectory, scratch: Scratch) -> tuple[float, float]:
    """An unbiased |g|², and |estimate|², from the scalars of one round."""
    n, unit = trajectory.n, directions.distribution.unit
    total, alone = np.zeros(n), np.zeros(n)
    for numbers, support in blocks(trajectory.supports, most=EXACT_DIRECTIONS):
        wide = max(1, trajectory.block // len(numbers))
        for start in range(0, support.size, wide):
            stop = min(start + wide, support.size)
            rows = directions.over(support, numbers, start, stop, scratch).astype(np.float64) * unit
            summed, squared = scalars[numbers] @ rows, scalars[numbers] ** 2 @ rows**2
            for weights, here in support.parts(start, stop):
                total[weights] += summed[here]
                alone[weights] += squared[here]
    count = coverage(trajectory.supports, n).astype(np.float64)
    gradient = float(((total**2 - alone) / (count * (count - 1))).sum())
    return gradient, float(((total / count) ** 2).sum())


def measured_alignment(expected: float, pairs: F64) -> Alignment:
    """The cosine over all rounds, with the standard error of a ratio of sums."""
    rounds = len(pairs)
    if rounds < FEWEST_ROUNDS:
        return Alignment(expected, missing=f"it needs at least {FEWEST_ROUNDS} rounds")
    gradient, estimate = pairs.T
    if not estimate.sum() > 0:
        return Alignment(expected, missing="every estimate was zero")
    ratio = float(gradient.sum() / estimate.sum())
    spread = float(np.sqrt(((gradient - ratio * estimate) ** 2).sum() * rounds / (rounds - 1)) / estimate.sum())
    if not ratio > 0 or spread > 2 * LARGEST_ERROR * ratio:
        return Alignment(expected, missing=f"{rounds:,} rounds are too few to tell it from noise")
    cosine = math.sqrt(ratio)
    return Alignment(expected, cosine, spread / (2 * cosine))


@dataclass(frozen=True)
class RunRecord:
    """What a report shows about one run. `metrics` is the journal's record of each round, `rounds` the part that every
    round has. `test_metrics` are the names of metrics on the test set, the most important one first."""

    folder: Path
    plan: Plan
    state: State
    quiet_seconds: float
    summary: Mapping[str, Any]
    test_metrics: tuple[str, ...]
    attendance: Attendance
    alignment: Alignment
    baseline: "RunRecord | None"
    networked: bool = False
    n_weights: int = 0
    versions: Mapping[str, str] = field(default_factory=dict)
    metrics: tuple[Mapping[str, Any], ...] = ()
    rounds: tuple[RoundMetrics, ...] = ()
    chain: str = ""

    @property
    def name(self) -> str:
        return (one_line(self.plan.name, 80) or "run") + (" (scalars drawn)" if self.plan.scalars == "drawn" else "")

    @property
    def given(self) -> bool:
        """Whether the data were given to `baffle.fit` as objects, so that the plan cannot name them."""
        return self.plan.task.data.startswith(f"{GIVEN}:")

    @property
    def rounds_done(self) -> int:
        return len(self.rounds)

    @property
    def seconds(self) -> float:
        return max((metrics.seconds for metrics in self.rounds), default=0.0)

    @property
    def seconds_left(self) -> float | None:
        """How long the rest of the run takes at the pace so far; None before the first round has ended."""
        if not self.rounds_done:
            return None
        return self.seconds / self.rounds_done * max(0, self.plan.rounds - self.rounds_done)

    def last(self, metric: str) -> float | None:
        """The last measured value of a metric."""
        values = (number(record.get(metric)) for record in reversed(self.metrics))
        return next((value for value in values if value is not None), None)

    def is_averaged(self, metric: str) -> bool:
        """Whether the metric of the last weights ever differed from that of the averaged weights."""
        last = f"{metric}_last"
        return any(last in record and record[last] != record.get(metric) for record in self.metrics)


def read_run(
    path: Path, *, with_baseline: bool = True, measure: bool = True, clock: Callable[[], float] = time.time
) -> RunRecord:
    """Read the run in a folder. With `measure`, its alignment is measured, which takes a second or two."""
    folder = RunFolder.existing(path)
    plan = load(str(folder.plan))
    summary = folder.read_summary() if folder.summary.is_file() else {}  # before the journal, which is written first
    baseline = path / BASELINE
    has_baseline = with_baseline and (baseline / "plan.toml").is_file()
    journal: dict[str, Any] = {
        "attendance": Attendance(plan.federation.clients, {}, {}, {}),
        "alignment": Alignment(missing="the run has no journal yet"),
    }
    if Journal.begun(folder.journal, read_only=True):
        journal = _read_journal(folder.journal, plan, measure=measure)
    rounds: tuple[RoundMetrics, ...] = journal.get("rounds", ())
    pace = rounds[-1].seconds / len(rounds) if rounds else 0.0
    changed = [file.stat().st_mtime for file in (folder.plan, folder.metrics, folder.summary) if file.exists()]
    quiet = max(0.0, clock() - max(changed, default=0.0))
    return RunRecord(
        folder=path,
        plan=plan,
        state=_state(folder, summary, quiet, pace),
        quiet_seconds=quiet,
        summary=summary,
        test_metrics=_test_metrics(plan, summary, journal.get("metrics", ())),
        baseline=read_run(baseline, with_baseline=False, measure=False) if has_baseline else None,
        **journal,
    )


def number(value: Any) -> float | None:
    """A finite number, or None."""
    known = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if known and abs(value) <= sys.float_info.max else None


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


def _state(folder: RunFolder, summary: Mapping[str, Any], quiet: float, pace: float) -> State:
    """The state of a run. A process that ends regularly removes the write-ahead log of its journal. A killed process
    leaves it behind, just as a working one does, so a folder that is quiet for long counts as stopped."""
    if summary:
        return "finished"
    at_work = folder.journal.with_name(f"{folder.journal.name}-wal").exists() or not folder.journal.exists()
    return "going on" if at_work and quiet < max(SIGN_OF_LIFE, 10 * pace) else "stopped"


def _test_metrics(plan: Plan, summary: Mapping[str, Any], metrics: tuple[Mapping[str, Any], ...]) -> tuple[str, ...]:
    """Names of the metrics of the averaged weights, in the plan's order."""
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
    """Read several runs. Errors name the folder."""
    if len(set(paths)) != len(paths):
        raise BaffleError("a folder is named twice; expected each run once")
    return tuple(read_run(path) for path in paths)


@dataclass(frozen=True)
class Refusal:
    """A refusal in the server's words, how often it occurred, and in which rounds."""

    words: str
    count: int
    rounds: list[int]
    shown_rounds: str


def refusals(metrics: Iterable[Mapping[str, object]]) -> list[Refusal]:
    """What the server refused, the most frequent first. Rounds are counted from 1, as in a terminal."""
    found: dict[str, list[int]] = {}
    for place, record in enumerate(metrics, 1):
        words = record.get("refused")
        for text in words if isinstance(words, list) else []:
            found.setdefault(one_line(str(text)), []).append(place)
        if record.get("refused_update"):
            found.setdefault("the update moved the weights further than update.norm_max", []).append(place)
    most = sorted(found.items(), key=lambda item: -len(item[1]))[:MOST_WORDS]
    return [Refusal(words, len(rounds), rounds, ranges(rounds, most=8)) for words, rounds in most]


def by_phase(rounds: Iterable[RoundMetrics]) -> dict[str, tuple[int, int]]:
    """For each phase of a round: how many messages got no answer, and how many requests clients did not follow."""
    silent, abstained = Counter[str](), Counter[str]()
    for metrics in rounds:
        silent.update(metrics.silent)
        abstained.update(metrics.abstained)
    return {phase: (silent[phase], abstained[phase]) for phase in dict.fromkeys([*silent, *abstained])}
