"""Plays a grid: runs that have ended are kept, the others are handed to a runner, and all are counted together."""

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from baffle.errors import PlanError
from baffle.grid.job import Event, Failure, Job, Player, Runner
from baffle.grid.processes import Processes
from baffle.grid.ray_cluster import RayCluster
from baffle.server.recorder import Progress


@dataclass(frozen=True)
class Standing:
    """How far a grid has come. `done` counts runs that were kept, ended or failed; `going` are those that are played
    now, with their progress where it is known."""

    runs: int
    done: int
    failed: int
    going: Mapping[str, Progress | None]
    seconds_left: float | None


Watch = Callable[[Event, Standing], None]


def runner_of(on: str = "local", jobs: int = 0, data: Path | None = None) -> Runner:
    """Who plays the runs: "local", "ray" or "ray://ADDRESS". `jobs` is how many at the same time; 0: one for each core,
    or as many as Ray takes."""
    if on == "ray" or on.startswith("ray://"):
        return RayCluster(on.removeprefix("ray") and on, jobs, data)
    if on != "local":
        raise PlanError(f'--on: expected "local", "ray" or "ray://HOST:PORT", got {on!r}')
    count = jobs or os.cpu_count() or 1
    return Processes(count, data) if count > 1 else Player(data)


def play_grid(
    jobs: list[Job], runner: Runner, watch: Watch, clock: Callable[[], float] = time.monotonic
) -> dict[str, Failure]:
    """Play every job that has not ended yet, and give the reasons of those that failed."""
    waiting = [job for job in jobs if not job.is_done]
    rounds = {job.name: job.plan.rounds for job in waiting}
    began = clock()
    going, failures = dict[str, Progress | None](), dict[str, Failure]()
    first, share, over = dict[str, float](), dict[str, float](), set[str]()  # of the work of each run

    def tell(event: Event) -> None:
        name = event.name
        if event.progress:
            share[name] = event.progress.rounds_done / rounds[name]
            first.setdefault(name, max(0.0, share[name] - 1 / rounds[name]))
        if event.kind in ("ended", "failed"):
            share[name] = 1.0
            over.add(name)
            going.pop(name, None)
        elif event.kind == "lost":
            going.pop(name, None)
        else:
            going[name] = event.progress
        if event.kind == "failed" and event.failure:
            failures[name] = event.failure
        played = sum(part - first.get(name, 0.0) for name, part in share.items())
        left = len(waiting) - sum(share.values())
        seconds = (clock() - began) * left / played if played > 0 else None
        watch(event, Standing(len(jobs), len(jobs) - len(waiting) + len(over), len(failures), dict(going), seconds))

    if waiting:
        runner(waiting, tell)
    return failures
