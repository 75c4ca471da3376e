"""Repeat a networked run in one process: under its statements, with the clients that its journal names."""

import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from baffle.aggregation.plain import PlainSum
from baffle.client.client import Client
from baffle.client.replica import Replica
from baffle.client.worker import Worker
from baffle.errors import ChainError, JournalError, PlanError
from baffle.journal.folder import RunFolder
from baffle.journal.store import Journal
from baffle.plan import Plan, change
from baffle.server.recorder import Summary, Watch
from baffle.server.run import Running, opened
from baffle.statement import EpochRecord, Statement, read_statement
from baffle.task.load import Runtimes, Task, load_task
from baffle.trajectory import trajectory_of
from baffle.transport.local import LocalTransport


def repeat(
    path: str | Path,
    out: str | Path,
    settings: Iterable[str] = (),
    *,
    data: str | Path | None = None,
    watch: Watch = lambda _progress: None,
) -> Summary:
    """Repeat the networked run in a folder into a new one. Every round has the contributors that the journal names, so
    the weights are the same, bit for bit, if the samples are: each client's are those of the plan's partition. Settings
    may change `run.*` alone: clients choose their runtimes themselves, and `run.runtime` names the one they had."""
    original = RunFolder.existing(Path(path))
    folder = RunFolder.new(Path(out))
    with Journal.open(original.journal) as journal:
        if not journal.statements.networked:
            raise JournalError(f"{path} holds no networked run with statements; a simulation is repeated by its plan")
        plan = _changed(journal.plan(), settings)
        if plan.privacy.on:
            raise PlanError(
                "a run with noise can be verified, not repeated: its clients' noise was drawn once and is kept "
                f"nowhere; `baffle verify {shlex.quote(str(path))}` checks it"
            )
        task = load_task(plan, data)
        if task.plan != plan:
            raise JournalError(f"{original.plan} is not a resolved plan; expected the file that the run itself wrote")
        with task.model.one_thread_each(), folder:
            folder.write_plan(plan.to_toml())
            return _Repetition(folder, task, journal, watch).play()


def _changed(plan: Plan, settings: Iterable[str]) -> Plan:
    changed = change(plan, settings)
    if msgspec.structs.replace(changed, run=plan.run) != plan:
        raise PlanError("a repeated run may change run.* and nothing else; leave the other settings out")
    return changed


class _Repetition:
    def __init__(self, folder: RunFolder, task: Task, journal: Journal, watch: Watch) -> None:
        self._folder, self._task, self._journal, self._watch = folder, task, journal, watch
        self._epochs = [
            (read_statement(record.statement), record, roster)
            for record, roster in journal.statements.epochs_with_rosters()
        ]
        self._clients: dict[int, Client] = {}

    def play(self) -> Summary:
        plan = self._task.plan
        trajectory = trajectory_of(plan, len(self._task.initial_weights()))
        runtimes = Runtimes(self._task, trajectory.threads)
        samples = {number: len(share) for number, share in enumerate(self._task.shares)}
        tiers = list(self._epochs[0][0].tiers) if self._epochs else self._task.tiers
        with (
            opened(
                self._folder, self._task.server, trajectory, runtimes, tiers, samples, self._watch, networked=True
            ) as running,
            LocalTransport(self._answer, trajectory.threads, running.recorder.tick) as local,
        ):
            for entry in self._journal.entries():
                self._enter_epochs(running, runtimes)
                running.play(_Only(local, self._journal.participation.contributors(entry.round)), self._sums(running))
                self._require_same(running, entry.round, entry.chain)
            self._enter_epochs(running, runtimes)
            return running.finish()

    def _sums(self, running: Running) -> PlainSum:
        return PlainSum(running.trajectory.ring, running.trajectory.length)

    def _enter_epochs(self, running: Running, runtimes: Runtimes) -> None:
        """Begin the epochs that the original began with the present round."""
        while self._epochs and self._epochs[0][0].first == running.present.round:
            statement, record, roster = self._epochs.pop(0)
            self._enter(running, runtimes, statement, record, roster)

    def _enter(
        self, running: Running, runtimes: Runtimes, statement: Statement, record: EpochRecord, roster: bytes
    ) -> None:
        running.begin_epoch(record, roster)
        task, replica = self._task, Replica(running.lineage, running.present)
        for number, (k, share) in enumerate(zip(statement.tiers, task.shares, strict=True)):
            worker = Worker(number, k, running.trajectory, task.source.train, share, runtimes.borrow)
            self._clients[number] = Client(replica, worker)
            running.downlink.holds(number, running.present.round)

    def _answer(self, number: int, message: bytes) -> bytes:
        return self._clients[number].answer(message)

    def _require_same(self, running: Running, number: int, chain: bytes) -> None:
        if running.journal.entry(number).chain != chain:
            raise ChainError(
                f"round {number} does not come out as in the original: the clients had other samples than the plan's "
                "partition gives them, another runtime (try --set run.runtime=torch or onnx), or other versions of the "
                "libraries",
                number,
            )


class _Only:
    """A transport to some of the clients."""

    def __init__(self, transport: LocalTransport, clients: set[int]) -> None:
        self._transport, self._clients = transport, clients

    def exchange(self, requests: Mapping[int, bytes]) -> Mapping[int, bytes]:
        return self._transport.exchange({client: data for client, data in requests.items() if client in self._clients})
