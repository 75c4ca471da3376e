"""Jobs on Ray: whole runs are handed to a cluster, and each run's folder comes back whole.

A run is played in a folder of its own where Ray puts it, so the machines need share no disk. A run that was stopped
here is sent along and resumed there. Ray starts the run of a lost worker again.
"""

import io
import logging
import shutil
import tempfile
import warnings
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baffle.errors import TransportError
from baffle.files import make_folder
from baffle.grid.job import RESTARTS, Event, Failure, Job, Player, TellEvent
from baffle.plan import parse
from baffle.version import __version__


@dataclass(frozen=True)
class RayCluster:
    """Plays jobs on the Ray cluster at an address; without one, on the cluster that Ray finds, or on a new one of this
    machine. At most `count` jobs are handed over at the same time, if it is given. `data` is a folder on the machines
    of the cluster."""

    address: str = ""
    count: int = 0
    data: Path | None = None

    def __call__(self, jobs: list[Job], tell: TellEvent) -> None:
        import ray

        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # tips for the next version of Ray
                ray.init(self.address or None, log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, RuntimeError, ValueError) as fault:
            raise TransportError(
                f"no Ray cluster can be used at {self.address or 'this machine'}: {fault}; start one with `ray start`, "
                "or leave --on out"
            ) from None
        try:
            self._play(ray, jobs, tell)
        finally:
            ray.shutdown()

    def _play(self, ray: Any, jobs: list[Job], tell: TellEvent) -> None:
        play = ray.remote(max_retries=RESTARTS)(played_elsewhere)
        waiting, begun = list(reversed(jobs)), dict[Any, Job]()
        while waiting or begun:
            while waiting and (not self.count or len(begun) < self.count):
                job = waiting.pop()
                threads = job.plan.run.workers or 1
                packed = pack(job.folder) if job.folder.exists() else b""
                call = play.options(num_cpus=threads, name=job.name)
                ref = call.remote(__version__, job.name, job.plan.to_toml(), packed, self.data)
                begun[ref] = job
                tell(Event(job.name, "began"))
            ended, _ = ray.wait([*begun])
            for ref in ended:
                job = begun.pop(ref)
                try:
                    packed, failure = ray.get(ref)
                    if not failure:
                        unpack(packed, job.folder)
                except ray.exceptions.RayError as fault:
                    failure = Failure(f"Ray lost it: {str(fault).strip().splitlines()[0]}")
                except OSError as fault:
                    failure = Failure(f"{job.folder} cannot be written: {fault.strerror or fault}")
                tell(Event(job.name, "failed" if failure else "ended", failure=failure))


def played_elsewhere(
    version: str, name: str, plan: str, packed: bytes, data: Path | None
) -> tuple[bytes, Failure | None]:
    """Play a run in a folder of this machine, from where the packed folder stopped. Gives the folder, packed."""
    if version != __version__:
        return b"", Failure(f"the cluster has BAFFLE {__version__}, and you have {version}: install the same on both")
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "run"
        if packed:
            unpack(packed, folder)
        failure = Player(data, threads=1).play(Job(name, parse(plan), folder), lambda _event: None)
        return (b"" if failure else pack(folder)), failure


def pack(folder: Path) -> bytes:
    """The files of a run's folder as one archive."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        for file in sorted(folder.rglob("*")):
            if file.is_file() and not file.is_symlink():
                archive.write(file, file.relative_to(folder))
    return data.getvalue()


def unpack(packed: bytes, folder: Path) -> None:
    """Put the packed folder in the place of a run's folder: all of it or nothing."""
    make_folder(folder.parent)
    with tempfile.TemporaryDirectory(prefix=".baffle-run-", dir=folder.parent) as parent:
        new = Path(parent) / "run"
        make_folder(new)
        with zipfile.ZipFile(io.BytesIO(packed)) as archive:
            archive.extractall(new)
        if folder.exists():
            shutil.rmtree(folder)
        new.rename(folder)
