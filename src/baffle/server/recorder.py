"""What a run records and reports: metrics of every round, progress, and a summary at the end."""

import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from threading import Lock
from typing import Annotated, Any, cast

import msgspec
import numpy as np

from baffle.client.worker import forwards_of
from baffle.core.arrays import F32
from baffle.core.ports import MISSING, Batch
from baffle.core.ring import NOT_FINITE
from baffle.core.state import Present, Rule, ServerState
from baffle.errors import BaffleError, DataError, JournalError, UnusableDataError
from baffle.journal.folder import RunFolder
from baffle.journal.store import Journal
from baffle.plan.sections import NonNegative, OptionalCount
from baffle.server.diagnosis import Diagnosis, Warn, shown
from baffle.server.round import Played
from baffle.task.load import Runtimes
from baffle.task.metrics import evaluate
from baffle.task.server_task import ServerTask
from baffle.trajectory import Trajectory


class Evaluation:
    """Evaluates states on a task's test set. Without one it evaluates nothing, and `missing` holds the reason."""

    def __init__(self, task: ServerTask, runtimes: Runtimes, rule: Rule) -> None:
        self._source, self._runtimes, self._rule = task.source, runtimes, rule
        self._metrics = task.require_measurable()
        self.missing = ""
        try:
            test = task.source.test
            self._test: Batch | None = test.batch(np.arange(len(test)))
        except UnusableDataError:
            raise
        except DataError as fault:
            self._test, self.missing = None, str(fault)

    @property
    def names(self) -> list[str]:
        """What is measured; the first is the headline."""
        return [metric.name for metric in self._metrics]

    def evaluate(self, state: ServerState) -> dict[str, Any]:
        """Each metric as `test_NAME`, of the averaged weights (of the last ones, if the plan averages none), and the
        headline also as `test_NAME_last`, of the last weights; nothing without a test set."""
        if self._test is None:
            return {}
        smooth = self._rule.smooth_weights(state)
        candidates = [smooth] if smooth is state.weights else [smooth, state.weights]
        with ThreadPoolExecutor(len(candidates)) as pool:
            results = list(pool.map(self._evaluate, candidates))
        headline = f"test_{self.names[0]}"
        return results[0] | {f"{headline}_last": results[-1][headline]}

    def _evaluate(self, weights: F32) -> dict[str, Any]:
        assert self._test is not None
        with self._runtimes.borrow() as runtime:
            return evaluate(self._metrics, runtime, weights, self._test, self._source)


MOST_SKIPPED = 10  # a run stops after this many skipped rounds in a row
SOON = 1.0  # a long round reports its progress after this many seconds without a report
NEARLY = 0.99  # of a round: the most that is reported before it ends


@dataclass(frozen=True)
class Progress:
    """How far a run has come."""

    rounds_done: float
    rounds: int
    loss: float | None = None
    value: float | None = None  # the latest value of the headline metric
    uplink_bytes: int = 0
    downlink_bytes: int = 0
    dropouts: int = 0
    seconds_left: float | None = None
    metric: str = "accuracy"
    epsilon: float | None = None  # the ε that a private run has spent so far


Phase = Annotated[str, msgspec.Meta(pattern=r"^[a-z]{1,20}\Z")]

Watch = Callable[[Progress], None]
Record = dict[str, Any]
Summary = dict[str, Any]


class RoundMetrics(msgspec.Struct):
    """The fields of every round's metrics."""

    round: OptionalCount
    loss: float | None
    contributors: OptionalCount
    clipped: OptionalCount
    uplink_bytes: OptionalCount
    replies: OptionalCount
    downlink_bytes: OptionalCount
    requests: OptionalCount
    join_bytes: OptionalCount
    joins: OptionalCount
    refusals: OptionalCount
    seconds: NonNegative = 0.0
    epsilon: float | None = None
    silent: dict[Phase, OptionalCount] = {}
    abstained: dict[Phase, OptionalCount] = {}


def metric_in(record: Mapping[str, Any], metric: str) -> float | None:
    """A metric's value in a round's metrics; None if it was not measured."""
    return cast(float | None, _converted(record.get(f"test_{metric}"), float | None))


def require_sound(record: Any) -> Record:
    """A round's metrics as a journal holds them; a JournalError if they are not what a server wrote."""
    _converted(record, RoundMetrics)
    return cast(Record, record)


def _converted(value: Any, kind: Any) -> Any:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as fault:
        raise JournalError(f"the journal's metrics cannot be read: {fault}; it is damaged") from None


class Recorder:
    """Completes each round's metrics, keeps them in the run's folder, and reports progress.

    `samples` is the number of samples of each client, where it is known; `tiers` is how many directions each client
    evaluates.
    """

    def __init__(
        self,
        folder: RunFolder,
        journal: Journal,
        trajectory: Trajectory,
        evaluation: Evaluation,
        tiers: Sequence[int],
        samples: Mapping[int, int],
        watch: Watch,
        warn: Warn,
    ) -> None:
        self._folder, self._journal, self._trajectory = folder, journal, trajectory
        self._evaluation, self._tiers, self._samples, self._watch = evaluation, tiers, samples, watch
        self._records: list[Record] = [require_sound(record) for record in journal.metrics()]
        folder.write_metrics(self._records)
        self._began = time.perf_counter()
        self._seconds_before = max((float(record.get("seconds", 0)) for record in self._records), default=0.0)
        self._rounds_before = journal.length()
        self._reported = self._began
        self._record_seconds = self._evaluation_seconds = 0.0
        self._passes, self._counting = 0, Lock()
        self._skipped_because: list[str] = []
        """Why the rounds since the last sum were skipped."""
        self._headline = evaluation.names[0]
        self._progress = Progress(self._rounds_before, trajectory.plan.rounds, metric=self._headline)
        self._diagnosis = Diagnosis(trajectory, self._records, warn)

    def passed(self, passes: int) -> None:
        """A client of this process has made so many forward passes. A round that takes long reports how far it is.
        Threads may call this at once."""
        with self._counting:
            self._passes += passes
            if time.perf_counter() - self._reported > SOON:
                part = min(NEARLY, self._passes / self._passes_of_round)
                self._report(replace(self._progress, rounds_done=self._progress.rounds_done + part))

    @cached_property
    def _passes_of_round(self) -> float:
        """The forward passes of all clients of a round, in the mean over rounds."""
        each = [forwards_of(self._trajectory, k, self._samples.get(client, 1)) for client, k in enumerate(self._tiers)]
        return self._trajectory.plan.per_round * float(np.mean(each))

    def measure(self, rounds: int, state: ServerState) -> Record:
        """What to add to the last round's metrics: an evaluation, when it is due, and the seconds and ε so far."""
        due = rounds % self._trajectory.plan.run.evaluate_every == 0 or rounds == self._trajectory.plan.rounds
        began = time.perf_counter()
        evaluated = self._evaluation.evaluate(state) if due else {}
        self._evaluation_seconds += time.perf_counter() - began
        so_far = {"seconds": round(self._seconds(), 3), "rounds_done": rounds}
        return evaluated | so_far | self._of_privacy(rounds)

    def record(self, played: Played) -> None:
        """Add a round, which the journal already holds, to the folder's metrics, and report it."""
        began = time.perf_counter()
        self._passes = 0
        record: Record = {"round": played.present.round - 1, **played.metrics}
        self._folder.add_metrics(record)
        self._records.append(record)
        self._progress = replace(
            self._progress,
            rounds_done=played.present.round,
            loss=record["loss"],
            epsilon=record.get("epsilon"),
            value=self._progress.value if (value := metric_in(record, self._headline)) is None else value,
            uplink_bytes=self._progress.uplink_bytes + record["uplink_bytes"],
            downlink_bytes=self._progress.downlink_bytes + record["downlink_bytes"] + record["join_bytes"],
            dropouts=self._progress.dropouts + list(played.participation.values()).count(MISSING),
        )
        self._report(self._progress)
        self._diagnosis.look(played.present.round - 1, record, played.outcome, played.present.state.weights)
        self._record_seconds += time.perf_counter() - began
        self._stop_if_stuck(played)

    def finish(self, present: Present) -> Summary:
        """The summary of a run that has reached its last round, also written to its folder. An error if the run ended
        with losses or weights that are not finite."""
        plan, records = self._trajectory.plan, self._records
        self._journal.commit()

        def total(name: str) -> int:
            return sum(int(record[name]) for record in records)

        summary: Summary = {
            "name": plan.name,
            "metrics": self._evaluation.names,
            **self._last_evaluation(present),
            "train_loss": next((record["loss"] for record in reversed(records) if record["loss"] is not None), None),
            "rounds": present.round,
            "skipped_rounds": sum(1 for record in records if not record["contributors"]),
            "seconds": round(self._seconds(), 2),
            "forwards": self._forwards(),
            "derivatives": plan.run.derivatives,
            "uplink_bytes_per_client_round": _ratio(total("uplink_bytes"), total("replies")),
            "downlink_bytes_per_client_round": _ratio(total("downlink_bytes"), total("requests")),
            "join_bytes_per_client": _ratio(total("join_bytes"), total("joins")),
            "clipped": total("clipped"),
            "peak_rss_mb": round(_peak_rss_mb(), 1),
            "bookkeeping_seconds": round(self._journal.append_seconds + self._record_seconds, 3),
            # a resumed run does not know its earlier ones.
            **({} if self._rounds_before else {"evaluation_seconds": round(self._evaluation_seconds, 3)}),
            "n_weights": self._trajectory.n,
            "weights_sha256": present.state.weights_hash().hex(),
            "plan_digest": plan.digest().hex(),
            "trajectory_digest": self._trajectory.digest.hex(),
            "estimator": plan.estimator,
            **({"scalars": plan.scalars} if plan.scalars == "drawn" else {}),
            "supports": plan.probe.supports,
            "dropouts": self._journal.participation.count(MISSING),
            "refusals": total("refusals"),
            "secure": plan.secure.mode,
            **self._of_privacy(present.round),
            **({name: getattr(plan.privacy, name) for name in ("delta", "noise", "clip")} if plan.privacy.on else {}),
        }
        self._folder.write_summary(summary)
        skipped = len(self._skipped_because)
        if skipped and NOT_FINITE in self._skipped_because[0]:
            raise self._stuck(
                f"The last {skipped} rounds were skipped" if skipped > 1 else "The last round was skipped"
            )
        if not np.isfinite(present.state.weights).all():
            raise BaffleError(
                f"the last weights are not finite: {self._smaller_rate()}. The run is kept in {self._folder.path}"
            )
        return summary

    def _of_privacy(self, rounds: int) -> Record:
        """The ε of so many rounds, skipped ones included; nothing if the run is not private."""
        epsilon = self._trajectory.epsilon(rounds)
        return {} if epsilon is None else {"epsilon": round(epsilon, 6)}

    def _last_evaluation(self, present: Present) -> Record:
        last = self._records[-1] if self._records else {}
        if last.get("round") == present.round - 1 and f"test_{self._headline}" in last:
            return {name: value for name, value in last.items() if name.startswith("test_")}
        return self._evaluation.evaluate(present.state)

    def _forwards(self) -> int:
        """Forward passes of all clients. One whose number of samples is not known counts as if it had one sample."""
        federation, participation = self._trajectory.plan.federation, self._journal.participation

        def each(client: int) -> int:
            return forwards_of(self._trajectory, self._tiers[client], self._samples.get(client, 1))

        total = sum(count * each(client) for client, count in participation.contributions(federation.clients).items())
        if federation.local_steps == 1:
            return total
        first = range(min(federation.warm_up, len(self._records)))  # rounds of one step
        saved = sum(each(client) for number in first for client in participation.contributors(number))
        return total - saved * (federation.local_steps - 1) // federation.local_steps

    def _seconds(self) -> float:
        return self._seconds_before + time.perf_counter() - self._began

    def _report(self, progress: Progress) -> None:
        self._reported = time.perf_counter()
        done = progress.rounds_done - self._rounds_before
        left = (self._reported - self._began) / done * (progress.rounds - progress.rounds_done) if done else None
        self._watch(replace(progress, seconds_left=left))

    def _stop_if_stuck(self, played: Played) -> None:
        if played.metrics["contributors"]:
            self._skipped_because.clear()
            return
        self._skipped_because.append(next(iter(played.participation.values())))
        recent = self._records[-MOST_SKIPPED:]
        if len(recent) == MOST_SKIPPED and not any(record["contributors"] for record in recent):
            raise self._stuck(f"{MOST_SKIPPED} rounds in a row were skipped")

    def _stuck(self, what: str) -> BaffleError:
        first, last = self._skipped_because[0], self._skipped_because[-1]
        others = "" if first == last else f", and the last: {last}"
        return BaffleError(
            f"{what}; the first reason was: {first}{others}."
            f"{self._why_not_finite(first)}{self._why_abstained()} The run is kept in {self._folder.path}"
        )

    def _why_abstained(self) -> str:
        """The likely cause if clients of a private run have begun to abstain; empty for other reasons."""
        if not self._trajectory.plan.privacy.on or not self._records[-1].get("abstained"):
            return ""
        return " A client whose budget is spent (most_epsilon in its policy) abstains for good; its own log says so."

    def _smaller_rate(self) -> str:
        return f"a smaller update.rate than {self._trajectory.plan.update.rate:g} may help (`baffle tune` finds one)"

    def _why_not_finite(self, reason: str) -> str:
        """The likely cause if no loss was finite; empty for other reasons."""
        if NOT_FINITE not in reason:
            return ""
        known, plan = [record for record in self._records if record["loss"] is not None], self._trajectory.plan
        remedy = self._smaller_rate()
        if known:
            loss, last = shown(known[-1]["loss"]), known[-1]["round"]
            return f" The loss was {loss} in round {last}: the weights have probably diverged; {remedy}."
        cause = "NaN or infinite values in the data, or in the model's initial weights and outputs"
        if plan.federation.level == "epoch":
            return (
                f" No round had a finite loss: either there are {cause}, or clients' own steps diverge, and {remedy}."
            )
        return f" No loss was finite even at the initial weights: look for {cause}."


def _ratio(total: int, count: int) -> float:
    mean = total / count if count else 0.0
    return int(mean) if mean == int(mean) else round(mean, 1)


def _peak_rss_mb() -> float:
    """The peak memory of the process. macOS counts bytes, Linux kilobytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10
