"""One run of a grid: played into its folder, or resumed if it was stopped."""

import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from msgspec.structs import replace

from baffle.errors import BaffleError, DataError, RunFolderError
from baffle.plan import Plan, load
from baffle.plan.functions import named_by
from baffle.server.recorder import Progress
from baffle.simulation import resume, simulate
from baffle.task.features import Backbones

OFTEN = 0.5  # seconds between two reports of a run's progress
RESTARTS = 3  # a run whose process is lost is started again so many times


@dataclass(frozen=True)
class Job:
    """A run to be played: its name, its plan, and its folder."""

    name: str
    plan: Plan
    folder: Path

    @property
    def is_done(self) -> bool:
        return (self.folder / "summary.json").is_file()


@dataclass(frozen=True)
class Failure:
    """Why a run failed. `no_data`: its data set is missing or cannot be used."""

    words: str
    no_data: bool = False


@dataclass(frozen=True)
class Event:
    """What happens to a run of a grid."""

    name: str
    kind: Literal["began", "going on", "ended", "failed", "lost"]
    progress: Progress | None = None
    failure: Failure | None = None


TellEvent = Callable[[Event], None]

Runner = Callable[[list[Job], TellEvent], None]
"""Plays jobs, and tells for each when it begins and whether it ended or failed."""


@dataclass
class Player:
    """Plays jobs one after the other, in this process. A run that leaves its threads open has so many; 0: one a core.
    Runs on the same data share the features of a frozen backbone."""

    data: Path | None = None
    threads: int = 0
    backbones: Backbones = field(default_factory=Backbones, compare=False)

    def __call__(self, jobs: list[Job], tell: TellEvent) -> None:
        for job in jobs:
            tell(Event(job.name, "began"))
            failure = self.play(job, tell)
            tell(Event(job.name, "failed" if failure else "ended", failure=failure))

    def play(self, job: Job, tell: TellEvent) -> Failure | None:
        """Play a job to its end, and say why if it failed."""
        latest = -OFTEN

        def watch(progress: Progress) -> None:
            nonlocal latest
            if (now := time.monotonic()) - latest >= OFTEN:
                latest = now
                tell(Event(job.name, "going on", progress))

        try:
            self._play(job, watch)
        except BaffleError as fault:
            return Failure(str(fault), isinstance(fault, DataError))
        except Exception as fault:  # a bug must not end the other runs
            traceback.print_exc(file=sys.stderr)
            return Failure(f"{type(fault).__name__}: {fault}")
        return None

    def _play(self, job: Job, watch: Callable[[Progress], None]) -> None:
        if job.folder.is_symlink():  # the folder of a sweep may come from a stranger
            raise RunFolderError(f"{job.folder} is a link, and nothing is written through links; remove it")
        if not (job.folder / "plan.toml").exists():
            run = replace(job.plan.run, workers=job.plan.run.workers or self.threads)
            plan = replace(job.plan, run=run)
            simulate(plan, job.folder, data=self.data, watch=watch, backbones=self.backbones)
            return
        begun = load(str(job.folder / "plan.toml"))
        if named_by(begun) != named_by(job.plan):  # its functions would be called
            raise RunFolderError(f"{job.folder} holds another plan's run; move it away")
        resume(job.folder, data=self.data, watch=watch, own_code=True)
