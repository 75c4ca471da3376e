"""Jobs on local processes. A process that dies does not take the others with it: its run is started again."""

import multiprocessing
import os
import signal
from collections import Counter, deque
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from queue import SimpleQueue
from threading import Thread

from baffle.grid.job import RESTARTS, Event, Failure, Job, Player, TellEvent


@dataclass(frozen=True)
class Processes:
    """Plays so many jobs at the same time, each in a process of its own."""

    count: int
    data: Path | None = None

    def __call__(self, jobs: list[Job], tell: TellEvent) -> None:
        waiting, losses = deque(jobs), Counter[str]()
        workers = dict[Connection, _Worker]()
        player = Player(self.data, max(1, (os.cpu_count() or 1) // self.count))
        try:
            while waiting or workers:
                while waiting and len(workers) < self.count:
                    worker = _Worker.start(player, waiting.popleft())
                    workers[worker.pipe] = worker
                for pipe in wait([*workers]):
                    assert isinstance(pipe, Connection)
                    worker = workers[pipe]
                    try:
                        event: Event = pipe.recv()
                    except (EOFError, ConnectionError):
                        worker.end()
                        del workers[pipe]
                        losses[worker.job.name] += 1
                        if losses[worker.job.name] <= RESTARTS:
                            waiting.appendleft(worker.job)
                        tell(worker.lost(again=losses[worker.job.name] <= RESTARTS))
                        continue
                    tell(event)
                    if event.kind in ("ended", "failed"):
                        if waiting:
                            worker.give(waiting.popleft())
                        else:
                            worker.end()
                            del workers[pipe]
        finally:
            for worker in workers.values():
                worker.end()


@dataclass
class _Worker:
    """A process that plays one job after the other, the pipe to it, and its present job."""

    process: BaseProcess
    pipe: Connection
    job: Job

    @classmethod
    def start(cls, player: Player, job: Job) -> "_Worker":
        context = multiprocessing.get_context("spawn")  # a fork would copy locks that threads hold
        ours, theirs = context.Pipe()
        process = context.Process(target=_work, args=(theirs, player), daemon=True)
        process.start()
        theirs.close()
        worker = cls(process, ours, job)
        worker.give(job)
        return worker

    def give(self, job: Job) -> None:
        self.job = job
        try:
            self.pipe.send(job)
        except ConnectionError:  # it has died; the next read of the pipe says so
            return

    def end(self) -> None:
        self.pipe.close()
        self.process.terminate()
        self.process.join()

    def lost(self, *, again: bool) -> Event:
        """What to tell of its job when the process has died."""
        code = self.process.exitcode or 0
        words = f"its process died of {f'signal {-code}' if code < 0 else f'exit code {code}'}"
        if again:
            return Event(self.job.name, "lost", failure=Failure(words))
        words += f", for the {RESTARTS + 1}th time; if memory is short, give fewer --jobs"
        return Event(self.job.name, "failed", failure=Failure(words))


def _work(pipe: Connection, player: Player) -> None:
    """Play jobs from the pipe until the process at its other end is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the first process ends the others
    jobs = SimpleQueue[Job]()

    def receive() -> None:
        try:
            while True:
                jobs.put(pipe.recv())
        except (EOFError, OSError):
            os._exit(1)

    Thread(target=receive, daemon=True).start()
    while True:
        player([jobs.get()], pipe.send)
