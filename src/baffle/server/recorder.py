"""What a run records and reports: metrics after every round, progress to a watcher, a summary at the end."""

import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, cast

import msgspec

from baffle.client.worker import forwards_of
from baffle.core.chain import Present
from baffle.core.ports import MISSING
from baffle.core.ring import NOT_FINITE
from baffle.core.state import ServerState
from baffle.errors import BaffleError, JournalError
from baffle.journal.folder import RunFolder
from baffle.journal.store import Journal
from baffle.server.diagnosis import Diagnosis, Warn, shown
from baffle.server.evaluation import Evaluation
from baffle.server.round import Played
from baffle.trajectory import Trajectory

MOST_SKIPPED = 10
"""A run stops after this many skipped rounds in a row, because more rounds would not help."""

SOON = 1.0
"""Seconds after the last report until a long round reports its progress."""


@dataclass(frozen=True)
class Progress:
    """How far a run has come."""

    rounds_done: float
    rounds: int
    loss: float | None = None
    value: float | None = None
    """The latest value of the metric that stands for all others."""
    uplink_bytes: int = 0
    downlink_bytes: int = 0
    dropouts: int = 0
    seconds_left: float | None = None
    metric: str = "accuracy"
    epsilon: float | None = None
    """What a private run has cost so far."""


Phase = Annotated[str, msgspec.Meta(pattern=r"^[a-z]{1,20}\Z")]

Watch = Callable[[Progress], None]
Record = dict[str, Any]
Summary = dict[str, Any]


class RoundMetrics(msgspec.Struct):
    """What the metrics of every round must hold."""

    round: int
    loss: float | None
    contributors: int
    clipped: int
    uplink_bytes: int
    replies: int
    downlink_bytes: int
    requests: int
    join_bytes: int
    joins: int
    refusals: int
    seconds: float = 0.0
    epsilon: float | None = None
    silent: dict[Phase, int] = {}
    abstained: dict[Phase, int] = {}


def measured(record: Mapping[str, Any], metric: str) -> float | None:
    """A metric's value in a round's metrics; None if it was not measured."""
    try:
        return msgspec.convert(record.get(f"test_{metric}"), float | None)
    except msgspec.ValidationError as fault:
        raise JournalError(f"the journal's metrics cannot be read: {fault}; it is damaged") from None


class Recorder:
    """Completes each round's metrics, keeps them in the run's folder, and reports progress.

    `samples` is the number of samples of each client that has introduced itself so far; `tiers` is how many directions
    each client evaluates.
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
        self._skipped_because: list[str] = []
        """Why the rounds since the last sum were skipped."""
        self._headline = evaluation.names[0]
        self._progress = Progress(self._rounds_before, trajectory.plan.rounds, metric=self._headline)
        self._diagnosis = Diagnosis(trajectory, self._records, warn)

    def tick(self, done: int, of: int) -> None:
        """Report that `done` replies of the present round, out of `of`, have arrived."""
        if done < of and time.perf_counter() - self._reported > SOON:
            self._report(replace(self._progress, rounds_done=self._progress.rounds_done + done / of))

    def measure(self, rounds: int, state: ServerState) -> Record:
        """What to add to the metrics of the last of `rounds` rounds: an evaluation, when it is due, and the run's
        seconds and ε so far."""
        due = rounds % self._trajectory.plan.run.evaluate_every == 0 or rounds == self._trajectory.plan.rounds
        began = time.perf_counter()
        evaluated = self._evaluation.evaluate(state) if due else {}
        self._evaluation_seconds += time.perf_counter() - began
        so_far = {"seconds": round(self._seconds(), 3), "rounds_done": rounds}
        return evaluated | so_far | self._of_privacy(rounds)

    def record(self, played: Played) -> None:
        """Add a round, which the journal already holds, to the folder's metrics, and report it."""
        began = time.perf_counter()
        record: Record = {"round": played.present.round - 1, **played.metrics}
        self._folder.add_metrics(record)
        self._records.append(record)
        self._progress = replace(
            self._progress,
            rounds_done=played.present.round,
            loss=record["loss"],
            epsilon=record.get("epsilon"),
            value=self._progress.value if (value := measured(record, self._headline)) is None else value,
            uplink_bytes=self._progress.uplink_bytes + record["uplink_bytes"],
            downlink_bytes=self._progress.downlink_bytes + record["downlink_bytes"] + record["join_bytes"],
            dropouts=self._progress.dropouts + list(played.participation.values()).count(MISSING),
        )
        self._report(self._progress)
        self._diagnosis.look(played.present.round - 1, record, played.outcome, played.present.state.weights)
        self._record_seconds += time.perf_counter() - began
        self._stop_if_stuck(played)

    def finish(self, present: Present) -> Summary:
        """The summary of a run that has reached its last round, also written to its folder."""
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
            "forwards": sum(
                self._forwards(client) * rounds
                for client, rounds in self._journal.participation.contributions(plan.federation.clients).items()
            ),
            "uplink_bytes_per_client_round": _ratio(total("uplink_bytes"), total("replies")),
            "downlink_bytes_per_client_round": _ratio(total("downlink_bytes"), total("requests")),
            "join_bytes_per_client": _ratio(total("join_bytes"), total("joins")),
            "clipped": total("clipped"),
            "peak_rss_mb": round(_peak_rss_mb(), 1),
            "bookkeeping_seconds": round(self._journal.append_seconds + self._record_seconds, 3),
            **self._of_evaluation(),
            "n_weights": self._trajectory.n,
            "weights_sha256": present.state.weights_hash().hex(),
            "plan_digest": plan.digest().hex(),
            "trajectory_digest": self._trajectory.digest.hex(),
            "estimator": plan.estimator,
            "supports": plan.probe.supports,
            "dropouts": self._journal.participation.count(MISSING),
            "refusals": total("refusals"),
            "secure": plan.secure.mode,
            **self._of_privacy(present.round),
            **({name: getattr(plan.privacy, name) for name in ("delta", "noise", "clip")} if plan.privacy.on else {}),
        }
        self._folder.write_summary(summary)
        return summary

    def _of_privacy(self, rounds: int) -> Record:
        """The ε of so many rounds, skipped ones included; nothing if the run is not private."""
        epsilon = self._trajectory.epsilon(rounds)
        return {} if epsilon is None else {"epsilon": round(epsilon, 6)}

    def _of_evaluation(self) -> Record:
        """Seconds spent on measuring; a run that was resumed does not know those before."""
        return {} if self._rounds_before else {"evaluation_seconds": round(self._evaluation_seconds, 3)}

    def _last_evaluation(self, present: Present) -> Record:
        last = self._records[-1] if self._records else {}
        if last.get("round") == present.round - 1 and f"test_{self._headline}" in last:
            return {name: value for name, value in last.items() if name.startswith("test_")}
        return self._evaluation.evaluate(present.state)

    def _forwards(self, client: int) -> int:
        """Forward passes of a client in one round. A client that has not come back since the server was restarted
        counts as if it had one sample."""
        return forwards_of(self._trajectory, self._tiers[client], self._samples.get(client, 1))

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
            first, last = self._skipped_because[0], self._skipped_because[-1]
            others = "" if first == last else f", and the last: {last}"
            raise BaffleError(
                f"{MOST_SKIPPED} rounds in a row were skipped; the first reason was: {first}{others}."
                f"{self._why_not_finite(first)}{self._why_abstained()} The run is kept in {self._folder.path}"
            )

    def _why_abstained(self) -> str:
        """The likely cause if clients of a private run have begun to abstain; empty for other reasons."""
        if not self._trajectory.plan.privacy.on or not self._records[-1].get("abstained"):
            return ""
        return " A client whose budget is spent (most_epsilon in its policy) abstains for good; its own log says so."

    def _why_not_finite(self, reason: str) -> str:
        """The likely cause if no loss was finite; empty for other reasons."""
        if NOT_FINITE not in reason:
            return ""
        known, plan = [record for record in self._records if record["loss"] is not None], self._trajectory.plan
        remedy = f"a smaller update.rate than {plan.update.rate:g} may help (`baffle tune` finds one)"
        if known:
            last = known[-1]
            return (
                f" The loss was {shown(last['loss'])} in round {last['round']}: the weights have probably diverged; "
                f"{remedy}."
            )
        cause = "NaN or infinite values in the data, or in the model's initial weights and outputs"
        if plan.federation.level == "epoch":
            return (
                f" No round had a finite loss: either there are {cause}, or clients' own steps diverge, and {remedy}."
            )
        return f" No loss was finite even at the initial weights: look for {cause}."


def require_sound(record: Any) -> Record:
    """A round's metrics as a journal holds them; a JournalError if they are not what a server wrote."""
    try:
        msgspec.convert(record, RoundMetrics)
    except msgspec.ValidationError as fault:
        raise JournalError(f"the journal's metrics cannot be read: {fault}; it is damaged") from None
    return cast(Record, record)


def _ratio(total: int, count: int) -> float:
    mean = total / count if count else 0.0
    return int(mean) if mean == int(mean) else round(mean, 1)


def _peak_rss_mb() -> float:
    """The most memory that the process has held; macOS counts bytes, Linux kilobytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10
