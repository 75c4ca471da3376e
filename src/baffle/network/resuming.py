"""How a server goes on with a run that is already in its folder: what its plan may change, and what it may not."""

from collections.abc import Callable
from pathlib import Path

import msgspec

from baffle.errors import JournalError, PlanError, RunFolderError
from baffle.journal.folder import RunFolder
from baffle.journal.store import Journal
from baffle.network.same_plan import differences
from baffle.plan import Plan, load
from baffle.task.load import load_server_task
from baffle.task.server_task import ServerTask

Tell = Callable[[str], None]
"""Takes one line about the run's progress, to show to a person."""


def resume(folder: RunFolder, plan: Plan, data: Path | None, tell: Tell) -> ServerTask:
    """The task of the run in a folder. The plan may change `rounds` and `run.*`; the plan in the folder then changes
    too."""
    stored = load(str(folder.plan))
    if differing := differences(plan, stored):
        raise RunFolderError(
            f"the run in {folder.path} was begun with another plan: {differing}; start a new run with another --out, "
            "or give the plan that it was begun with"
        )
    played = _rounds_played(folder)
    if plan.rounds < played:
        raise PlanError(
            f"rounds: the run in {folder.path} has already played {played}, so it cannot end after {plan.rounds}; set "
            f"rounds to {played} or more, or start a new run with another --out"
        )
    new = msgspec.structs.replace(stored, name=plan.name, rounds=plan.rounds, run=plan.run)
    task = load_server_task(new, data, max(new.ring.n_max, new.probe.micro_batch))
    if task.plan != new:
        raise JournalError(f"{folder.plan} is not a resolved plan; expected the file that the run itself wrote")
    if new.rounds != stored.rounds:
        tell(f"the run now ends after {new.rounds} rounds, before it was {stored.rounds}")
    if new != stored:
        folder.write_plan(new.to_toml())
    return task


def _rounds_played(folder: RunFolder) -> int:
    def played() -> int:
        if not Journal.begun(folder.journal):
            return 0
        with Journal.open(folder.journal) as journal:
            if not journal.statements.networked:
                raise RunFolderError(
                    f"the run in {folder.path} was not begun by `baffle serve`, or by an earlier version of it: it has "
                    "no statement; start a new run with another --out"
                )
            return journal.length()

    return folder.attempt(played)
