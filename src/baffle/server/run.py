"""A run, from the end of its journal to its last round, over any transport and with any aggregation."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from baffle.core.ports import CONTRIBUTED, Aggregation, Transport
from baffle.core.state import Present, chain_epoch
from baffle.errors import JournalError
from baffle.journal.folder import RunFolder
from baffle.journal.replay import catch_up, lineage_of
from baffle.journal.store import Journal
from baffle.lineage import Lineage
from baffle.runtime.model import FLOAT32
from baffle.server.diagnosis import Warn
from baffle.server.downlink import Downlink
from baffle.server.recorder import Evaluation, Recorder, Summary, Watch
from baffle.server.round import Played, play_round
from baffle.statement import EpochRecord, epoch_of
from baffle.task.load import Runtimes, versions
from baffle.task.server_task import ServerTask
from baffle.trajectory import Trajectory


@dataclass
class Running:
    """A run in progress: its present, its journal, and what records and reports it."""

    lineage: Lineage
    initial: bytes  # the digest of the state that the run began with
    journal: Journal
    recorder: Recorder
    downlink: Downlink
    present: Present
    contributed: dict[int, int]  # client → the last round that it contributed to
    unevaluated: str  # why accuracies are not measured; empty if they are

    @property
    def trajectory(self) -> Trajectory:
        return self.lineage.trajectory

    def begin_epoch(self, record: EpochRecord, roster: bytes) -> None:
        """Continue under another statement and its roster's text. It is durable before anything else happens."""
        lineage = self.lineage.in_epoch(epoch_of(record))
        self.journal.add_epoch(record, roster, self.present.state)
        self.lineage = lineage
        self.present = Present(self.present.round, self.present.state, chain_epoch(self.present.chain, record.run))
        self.downlink.lineage = lineage

    @property
    def over(self) -> bool:
        return self.present.round >= self.trajectory.plan.rounds

    def play(self, transport: Transport, aggregation: Aggregation) -> Played:
        """Play one round, record it, and move on to the next."""
        played = play_round(
            self.trajectory, self.present, transport, aggregation, self.journal, self.downlink, self.recorder.measure
        )
        contributors = [client for client, event in played.participation.items() if event == CONTRIBUTED]
        self.contributed |= dict.fromkeys(contributors, self.present.round)
        self.recorder.record(played)
        self.present = played.present
        return played

    def finish(self) -> Summary:
        return self.recorder.finish(self.present)


@contextmanager
def opened(
    folder: RunFolder,
    task: ServerTask,
    trajectory: Trajectory,
    runtimes: Runtimes,
    tiers: Sequence[int],
    samples: Mapping[int, int],
    watch: Watch,
    warn: Warn = lambda _words: None,
    *,
    networked: bool = False,
) -> Iterator[Running]:
    """The run in a folder, replayed to the end of its journal. The journal of a networked run has statements. `warn`
    is called when the run is unlikely to converge."""
    plan = task.plan
    with _open_journal(folder, task, trajectory, networked=networked) as journal:
        lineage = lineage_of(journal, plan)
        present = catch_up(journal, lineage)
        if present.round < plan.rounds:
            folder.remove_summary()
        evaluating = runtimes if task.precision == FLOAT32 else Runtimes(task, 1, FLOAT32)
        evaluation = Evaluation(task, evaluating, trajectory.rule)
        recorder = Recorder(folder, journal, trajectory, evaluation, tiers, samples, watch, warn)
        downlink = Downlink(plan.run.downlink, journal, lineage)
        contributed = journal.participation.last_contributions(plan.federation.clients)
        initial = journal.snapshot(lineage.trajectory.rule, 0).digest()
        yield Running(lineage, initial, journal, recorder, downlink, present, contributed, evaluation.missing)


def _open_journal(folder: RunFolder, task: ServerTask, trajectory: Trajectory, *, networked: bool) -> Journal:
    """The run's journal; a new one if there is none, or if a process was killed while creating it."""
    plan = trajectory.plan
    if not folder.attempt(lambda: Journal.begun(folder.journal)):
        state = trajectory.rule.start(task.initial_weights())
        about = versions(task.model)
        return Journal.create(folder.journal, plan, state, about, folder.attempt, networked=networked)
    journal = Journal.open(folder.journal, commit_seconds=plan.run.commit_seconds, attempt=folder.attempt)
    if journal.plan().trajectory_digest() != trajectory.digest:
        raise JournalError(f"{folder.journal} belongs to another plan than {folder.plan}; put the right file back")
    journal.extend(plan)
    return journal
