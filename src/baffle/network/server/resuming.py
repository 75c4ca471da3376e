"""How a server goes on with a run that is already in its folder: what its plan may change, and what tells that the
folder is an older copy.

A client is never further than the journal, because a round is on disk before anybody learns its outcome. If clients are
further, an older copy of the run's folder was put back. Clients answer no round twice, so the server could only skip
rounds, and what the run had learnt in them would be lost.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from baffle.client.abstaining import Tell
from baffle.errors import JournalError, PlanError, RunFolderError
from baffle.journal.folder import PLAN, RunFolder
from baffle.journal.store import Journal
from baffle.network.joining import Ready
from baffle.network.keys.rosters import Roster
from baffle.network.settling import differences, with_places
from baffle.plan import Plan, load, parse
from baffle.server.run import Running
from baffle.task.load import load_server_task
from baffle.task.server_task import ServerTask


def plan_for(plan: Plan, out: Path, roster: Roster) -> Plan:
    """The plan for the run in a folder, with every round written to disk before it counts. The run has as many places
    for clients as when it began; a new one has as many as the roster."""
    places = len(roster.clients)
    if (out / PLAN).exists():
        places = min(load(str(out / PLAN)).federation.clients, places)
    run = msgspec.structs.replace(plan.run, commit_seconds=0.0)
    return parse(msgspec.structs.replace(with_places(plan, places), run=run).to_toml())  # parse checks it as a whole


def resume(folder: RunFolder, plan: Plan, data: Path | None, tell: Tell) -> ServerTask:
    """The task of the run in a folder. The plan may change `rounds` and `run.*`, also in the folder."""
    stored = load(str(folder.plan))
    if differing := differences(plan, stored):
        raise RunFolderError(
            f"the run in {folder.path} was begun with another plan: {differing}; start a new run with another --out, "
            "or give the plan that it was begun with"
        )

    def rounds_played() -> int:
        if not Journal.begun(folder.journal):
            return 0
        with Journal.open(folder.journal) as journal:
            if not journal.statements.networked:
                raise RunFolderError(
                    f"the run in {folder.path} was not begun by `baffle serve`, or by an earlier version of it: it has "
                    "no statement; start a new run with another --out"
                )
            return journal.length()

    played = folder.attempt(rounds_played)
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


@dataclass
class Reception:
    running: Running
    tell: Tell
    folder: Path
    _reached: dict[int, int] = field(default_factory=dict)  # client → the round that it says it has reached

    def __post_init__(self) -> None:
        self._began_at = self.running.present.round

    def welcome(self, clients: Mapping[int, Ready]) -> None:
        """Note which round each of these clients holds. They take part from now on."""
        present = self.running.present.round
        for client, ready in sorted(clients.items()):
            reached = max(ready.held, ready.answered - 1)
            self.running.downlink.holds(client, ready.held if reached <= present else None)
            self._reached[client] = reached
            self.tell(f"client {client} takes part")
            if reached > present:
                self.tell(
                    f"client {client} says that it has reached round {reached}, but the journal ends at round "
                    f"{present}; it is treated as a client that holds nothing"
                )

    def require_newest_copy(self) -> None:
        """Refuse to go on from an older copy of the run: more than half of the clients, and more than one, say that
        they are further. Fewer may be mistaken or lie. After the server has played a round, it no longer refuses: the
        run has a new history, and clients could end a run of weeks whenever they are the majority of the present ones.
        Those that come later and are further refuse rounds that they have answered, until the run has passed them."""
        ahead = [reached for reached in self._reached.values() if reached > self._began_at]
        if self.running.present.round > self._began_at or len(ahead) < 2 or 2 * len(ahead) <= len(self._reached):
            return
        raise JournalError(
            f"{len(ahead)} of {len(self._reached)} clients have reached round {max(ahead)} of this run, but the "
            f"journal in {self.folder} ends at round {self._began_at}, so it is an older copy; clients answer no round "
            "twice, so put a newer copy of the folder back, or begin a new run with another --out"
        )
