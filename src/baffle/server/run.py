"""A run from where its journal ends to its last round, whoever its clients are and however they are reached."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from baffle.core.arrays import F32
from baffle.core.ports import Aggregation, Transport
from baffle.errors import JournalError
from baffle.journal.folder import RunFolder
from baffle.journal.replay import Present, catch_up
from baffle.journal.store import Journal
from baffle.server.downlink import Downlink
from baffle.server.recorder import Recorder, Summary, Watch
from baffle.server.round import play_round
from baffle.task.load import Runtimes, Task, versions
from baffle.trajectory import Trajectory


@dataclass
class Running:
    """A run that is under way: where it stands, its journal, and who is told."""

    trajectory: Trajectory
    journal: Journal
    recorder: Recorder
    downlink: Downlink
    present: Present

    @property
    def over(self) -> bool:
        return self.present.round >= self.trajectory.plan.rounds

    def play(self, transport: Transport, sums: Aggregation) -> None:
        """One round."""
        played = play_round(self.trajectory, self.present, transport, sums, self.journal, self.downlink)
        self.recorder.record(played)
        self.present = played.present

    def finish(self) -> Summary:
        return self.recorder.finish(self.present)


@contextmanager
def opened(
    folder: RunFolder, task: Task, trajectory: Trajectory, runtimes: Runtimes, watch: Watch
) -> Iterator[Running]:
    """The run in a folder, brought to where its journal ends."""
    plan = task.plan
    with _open_journal(folder, trajectory, task.initial_weights()) as journal:
        present = catch_up(journal, trajectory)
        if present.round < plan.rounds:
            folder.remove_summary()
        evaluating = runtimes if task.dtype == torch.float32 else Runtimes(task, 1, torch.float32)
        recorder = Recorder(folder, journal, task, trajectory, evaluating, watch, present)
        yield Running(trajectory, journal, recorder, Downlink(plan.run.downlink, journal), present)


def _open_journal(folder: RunFolder, trajectory: Trajectory, initial: F32) -> Journal:
    """The run's journal; a new one where there is none, or where a process was killed while making it."""
    plan = trajectory.plan
    if not Journal.begun(folder.journal):
        return Journal.create(folder.journal, plan, trajectory.rule.start(initial), versions())
    journal = Journal.open(folder.journal, commit_seconds=plan.run.commit_seconds)
    if journal.plan().trajectory_digest() != trajectory.digest:
        raise JournalError(f"{folder.journal} belongs to another plan than {folder.plan}; put the right file back")
    journal.extend(plan)
    return journal
