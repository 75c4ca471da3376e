"""A run from where its journal ends to its last round, over any transport and with any aggregation."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from baffle.core.arrays import F32
from baffle.core.ports import CONTRIBUTED, Aggregation, Transport
from baffle.errors import JournalError
from baffle.journal.folder import RunFolder
from baffle.journal.replay import Present, catch_up
from baffle.journal.store import Journal
from baffle.runtime.model import FLOAT32
from baffle.server.downlink import Downlink
from baffle.server.evaluation import Evaluation
from baffle.server.recorder import Recorder, Summary, Watch
from baffle.server.round import Played, play_round
from baffle.task.load import Runtimes, ServerTask, versions
from baffle.trajectory import Trajectory


@dataclass
class Running:
    """A run that is under way: where it is, its journal, and what records and reports it."""

    trajectory: Trajectory
    journal: Journal
    recorder: Recorder
    downlink: Downlink
    present: Present
    contributed: dict[int, int]
    """Client → the last round that it contributed to."""
    unevaluated: str
    """Why accuracies are not measured; empty if they are."""

    @property
    def over(self) -> bool:
        return self.present.round >= self.trajectory.plan.rounds

    def play(self, transport: Transport, aggregation: Aggregation) -> Played:
        """Play one round, record it, and move on to the next."""
        played = play_round(
            self.trajectory,
            self.present,
            transport,
            aggregation,
            self.journal,
            self.downlink,
            self.recorder.measure,
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
) -> Iterator[Running]:
    """The run in a folder, replayed to where its journal ends. `samples` may gain clients while the run goes on."""
    plan = task.plan
    with _open_journal(folder, task, trajectory, task.initial_weights()) as journal:
        present = catch_up(journal, trajectory)
        if present.round < plan.rounds:
            folder.remove_summary()
        evaluating = runtimes if task.precision == FLOAT32 else Runtimes(task, 1, FLOAT32)
        evaluation = Evaluation(task, evaluating, trajectory.rule)
        recorder = Recorder(folder, journal, trajectory, evaluation, tiers, samples, watch)
        downlink = Downlink(plan.run.downlink, journal)
        contributed = journal.last_contributions(plan.federation.clients)
        yield Running(trajectory, journal, recorder, downlink, present, contributed, evaluation.missing)


def _open_journal(folder: RunFolder, task: ServerTask, trajectory: Trajectory, initial: F32) -> Journal:
    """The run's journal; a new one if there is none, or if a process was killed while making it."""
    plan = trajectory.plan
    if not folder.attempt(lambda: Journal.begun(folder.journal)):
        state = trajectory.rule.start(initial)
        return Journal.create(folder.journal, plan, state, versions(task.model), folder.attempt)
    journal = Journal.open(folder.journal, commit_seconds=plan.run.commit_seconds, attempt=folder.attempt)
    if journal.plan().trajectory_digest() != trajectory.digest:
        raise JournalError(f"{folder.journal} belongs to another plan than {folder.plan}; put the right file back")
    journal.extend(plan)
    return journal
