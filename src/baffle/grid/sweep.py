"""A sweep: a grid of runs in one folder, with a file that names them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec

from baffle.errors import GridError, RunFolderError, unwritable
from baffle.files import make_folder, read_file, replace
from baffle.grid.job import Failure, Job
from baffle.grid.plans import MOST_RUNS, folder_of, grid_of, name_of
from baffle.grid.play import Watch, play_grid, runner_of
from baffle.journal.folder import RunFolder
from baffle.plan import Plan

SWEEP = "sweep.json"
SWEEP_BYTES = 8 << 20

FolderName = Annotated[str, msgspec.Meta(pattern=r"^[^/\\\x00.][^/\\\x00]*\Z", max_length=255)]


class Listed(msgspec.Struct, frozen=True):
    """A run of a sweep as its file names it. The folder is one in the sweep's folder."""

    row: str
    seed: int
    folder: FolderName


class _File(msgspec.Struct, frozen=True):
    command: str
    runs: Annotated[list[Listed], msgspec.Meta(max_length=MOST_RUNS)]


@dataclass(frozen=True)
class Sweep:
    """A sweep's folder, the command that made it, its runs, and why some failed."""

    folder: Path
    command: str
    runs: tuple[Listed, ...]
    failures: dict[str, Failure] = field(default_factory=dict)

    def rows(self) -> dict[str, dict[int, Path]]:
        """The folders of each row's runs by seed, in the order of the grid. Runs may be missing or unfinished."""
        rows = dict[str, dict[int, Path]]()
        for run in self.runs:
            rows.setdefault(run.row, {})[run.seed] = self.folder / run.folder
        return rows

    def summaries(self) -> dict[str, dict[int, dict[str, Any]]]:
        """The summaries of each row's finished runs by seed."""
        folders = {row: {seed: RunFolder(path) for seed, path in runs.items()} for row, runs in self.rows().items()}
        return {
            row: {seed: run.read_summary() for seed, run in runs.items() if run.summary.is_file()}
            for row, runs in folders.items()
        }

    def require_success(self) -> None:
        """Raise an error that names the runs that failed."""
        require_success(self.failures, len(self.runs))


def require_success(failures: dict[str, Failure], runs: int) -> None:
    if not failures:
        return
    whose = dict[str, list[str]]()
    for name, failure in failures.items():
        whose.setdefault(failure.words, []).append(name)
    words = "; ".join(f"{', '.join(names)}: {why}" for why, names in whose.items())
    raise GridError(f"{len(failures)} of {runs} runs failed, the others are kept: {words}")


def sweep(
    plan: Plan,
    out: str | Path,
    *,
    seeds: Sequence[int] = (),
    grid: Iterable[str] = (),
    on: str = "local",
    jobs: int = 0,
    data: str | Path | None = None,
    watch: Watch = lambda _event, _standing: None,
    command: str = "",
) -> Sweep:
    """Run a plan with every combination of the values in `grid`, such as ["update.rate=0.003,0.01"], each with every
    seed, into folders below `out`. Runs that ended there before are kept, and stopped ones are resumed.

    `on` is "local", "ray" or "ray://ADDRESS", and `jobs` how many runs are played at the same time: by default one for
    each core. On local processes, a script must guard its entry by `if __name__ == "__main__":`. Runs that fail are in
    the sweep's `failures`.
    """
    out, rows = Path(out), grid_of(plan, grid, seeds)
    runner = runner_of(on, jobs, Path(data) if data else None)
    todo, listed = list[Job](), list[Listed]()
    for row, plans in rows.items():
        for seed, plan in plans.items():
            name = name_of(row, seed)
            folder = folder_of(out, name, plan)
            todo.append(Job(name, plan, folder))
            listed.append(Listed(row, seed, folder.name))
    path = out / SWEEP
    try:
        make_folder(out)
        replace(path, msgspec.json.format(msgspec.json.encode(_File(command, listed))))
    except OSError as fault:
        raise unwritable(path, fault, "give another --out") from None
    return Sweep(out, command, tuple(listed), play_grid(todo, runner, watch))


def is_sweep(folder: Path) -> bool:
    return (folder / SWEEP).is_file()


def read_sweep(folder: Path) -> Sweep:
    """The sweep in a folder, which may come from a stranger."""
    try:
        file = msgspec.json.decode(read_file(folder / SWEEP, SWEEP_BYTES), type=_File)
        if len({run.folder for run in file.runs}) < len(file.runs):
            raise ValueError("it names a folder twice")
    except (OSError, ValueError, RecursionError) as fault:
        raise RunFolderError(f"{folder / SWEEP} cannot be read: {fault}") from None
    return Sweep(folder, file.command, tuple(file.runs))
