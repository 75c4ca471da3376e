"""The server of a networked run: wait for clients, settle the plan, play its rounds, say goodbye.

A server that is killed and started again with the same folder goes on where its journal ends. Each round is durable
before anybody is told of it.
"""

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np

from baffle.aggregation.plain import PlainSum
from baffle.aggregation.server.crash_record import CrashFile
from baffle.aggregation.server.secure_sum import SecureSum
from baffle.core.messages import RoundRequest
from baffle.core.ports import Aggregation
from baffle.errors import PlanError, RunFolderError
from baffle.journal.folder import PLAN, RunFolder
from baffle.network.joining import Begin, ConnectedClients, Introduction, Nodes
from baffle.network.keys import Roster
from baffle.network.member import for_roster, require_same
from baffle.plan import Plan, Tier, load, parse
from baffle.runtime.torch.loss import one_thread_each
from baffle.schedule import policy_of, tiers_of
from baffle.server.recorder import Summary, Watch
from baffle.server.run import Running, opened
from baffle.task.load import Runtimes, Task, load_task
from baffle.trajectory import Trajectory, trajectory_of

SETTLED = "network.json"
"""Stands in the run's folder before its plan does."""

LOOK = 0.25
"""Seconds between two looks at who is there, while there are too few."""

Tell = Callable[[str], None]


class Settled(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a networked run must keep beside its plan: its name among all runs, and each client's directions."""

    run: str
    tiers: tuple[int, ...]


def serve(
    plan: Plan,
    out: Path,
    nodes: Nodes,
    roster: Roster,
    *,
    least: int = 0,
    data: Path | None = None,
    watch: Watch = lambda _progress: None,
    tell: Tell = lambda _words: None,
) -> Summary:
    """Run a plan with the clients of a network into a folder, or go on with the run that is there. A new run begins
    when `least` clients are there (0: as many as take part in a round)."""
    plan = _for(plan, roster)
    with one_thread_each():
        if (out / PLAN).exists():
            with RunFolder.existing(out) as folder:
                stored = load(str(folder.plan))
                require_same(plan, stored)
                settled, task = _read(out), load_task(stored, data)
                return _run(
                    folder, settled, task, ConnectedClients(*_about(nodes, roster, settled, stored, tell)), {}, watch
                )
        _forget(out)
        folder = RunFolder.new(out)
        settled = Settled(secrets.token_hex(32), ())
        roll = ConnectedClients(*_about(nodes, roster, settled, plan, tell))
        found = _gather(roll, least or plan.per_round)
        plan, tiers = settle(plan, found)
        task = load_task(plan, data)
        with folder:
            settled = Settled(settled.run, tiers)
            _write(out, settled)
            folder.write_plan(task.plan.to_toml())
            roll.plan = task.plan.to_toml()
            return _run(folder, settled, task, roll, found, watch)


def settle(plan: Plan, found: Mapping[int, Introduction]) -> tuple[Plan, tuple[int, ...]]:
    """The plan with what the clients say of themselves: the largest number of samples, and tiers for those who afford
    fewer directions than others. Who has not come yet is expected to afford them all."""
    ring, federation = plan.ring, plan.federation
    most = 1 if federation.weighting == "uniform" else max(one.samples for one in found.values())
    tiers = tiers_of(plan)
    if plan.outcome_kind == "scalars" and not federation.tiers:
        for client, one in found.items():
            tiers[client] = min(one.affords or plan.probe.k, plan.probe.k)
    slower = sorted({k for k in tiers if k < plan.probe.k})
    if slower and not federation.tiers and tiers.count(plan.probe.k) < plan.secure.floor and plan.secure.mode != "off":
        raise PlanError(
            f"probe.k: {tiers.count(plan.probe.k)} clients afford {plan.probe.k} directions, and their last ones would "
            f"be seen: expected {plan.secure.floor} at least; set probe.k={slower[-1]}"
        )
    shares = tuple(Tier(k=k, share=tiers.count(k) / len(tiers)) for k in slower)
    return (
        msgspec.structs.replace(
            plan,
            ring=msgspec.structs.replace(ring, n_max=ring.n_max or most),
            federation=msgspec.structs.replace(federation, tiers=federation.tiers or shares),
        ),
        tuple(tiers),
    )


def _run(
    folder: RunFolder,
    settled: Settled,
    task: Task,
    roll: ConnectedClients,
    found: Mapping[int, Introduction],
    watch: Watch,
) -> Summary:
    tiers = list(settled.tiers)
    task = replace(task, tiers=tiers, shares=[np.zeros(0, np.int64) for _ in tiers])
    trajectory = trajectory_of(task.plan, len(task.initial_weights()))
    sums = _aggregation(trajectory, settled, folder, roll)
    about = Begin(bytes.fromhex(settled.run), task.plan.to_toml(), tuple(tiers))
    waiting = False
    with opened(folder, task, trajectory, Runtimes(task, 1), watch) as running:
        _welcome(running, task, roll, found, about)
        while not running.over:
            for client in _welcome(running, task, roll, roll.meet_new_nodes(), about):
                if isinstance(sums, SecureSum):
                    sums.forget(client)
            if len(roll.ready) < _enough(task.plan):
                if not waiting:
                    roll.tell(f"{len(roll.ready)} clients are here, {_enough(task.plan)} are needed: waiting")
                waiting = True
                time.sleep(LOOK)
                continue
            waiting = False
            running.play(roll, sums)
        _part(running, task, roll, about)
        return running.finish()


def _welcome(
    running: Running, task: Task, roll: ConnectedClients, found: Mapping[int, Introduction], about: Begin
) -> set[int]:
    """Tell newcomers about the run, and believe them what they hold. Those who take part."""
    if not found:
        return set()
    begun = roll.start_run(list(found), about, running.trajectory.digest)
    for client in sorted(begun):
        held = found[client].held - 1
        running.downlink.holds(client, held if 0 <= held <= running.present.round else None)
        task.shares[client] = np.zeros(found[client].samples, np.int64)
        roll.tell(f"client {client} takes part")
    return begun


def _part(running: Running, task: Task, roll: ConnectedClients, about: Begin) -> None:
    """Bring everybody to the last weights. Who was here is waited for, as long as for an answer; after a restart that
    is everybody."""
    expected, hold = roll.ever_ready or set(roll.directory), set[int]()
    give_up = time.monotonic() + task.plan.run.deadline_seconds
    present = running.present
    while True:
        _welcome(running, task, roll, roll.meet_new_nodes(), about)
        clients = sorted(roll.ready - hold)
        catch_ups = running.downlink.catch_ups(clients, present)
        hold |= roll.end_run(
            {
                client: RoundRequest(
                    present.round, 0, running.trajectory.digest, present.state.weights_hash(), catch_ups[client]
                )
                for client in clients
            }
        )
        if expected <= hold or time.monotonic() > give_up:
            break
        time.sleep(LOOK)
    roll.tell(f"{len(hold)} of {len(roll.directory)} clients hold the last weights")


def _enough(plan: Plan) -> int:
    """With fewer clients no round can end."""
    return plan.secure.floor if plan.secure.mode != "off" else 1


def _aggregation(trajectory: Trajectory, settled: Settled, folder: RunFolder, roll: ConnectedClients) -> Aggregation:
    if trajectory.plan.secure.mode == "off":
        return PlainSum(trajectory.ring, trajectory.length)
    policy, memory = policy_of(trajectory, dict(enumerate(settled.tiers))), CrashFile(folder.path / "kept")
    return SecureSum(trajectory.ring, trajectory.length, bytes.fromhex(settled.run), roll.directory, policy, memory)


def _gather(roll: ConnectedClients, least: int) -> dict[int, Introduction]:
    """Wait until enough clients have said who they are."""
    found: dict[int, Introduction] = {}
    told = -1
    while True:
        found |= roll.meet_new_nodes()
        found = {client: one for client, one in found.items() if client in roll.met}
        if len(found) != told:
            told = len(found)
            roll.tell(f"{told} of {least} clients are here")
        if told >= least:
            return found
        time.sleep(LOOK)


def _for(plan: Plan, roster: Roster) -> Plan:
    """The plan with as many clients as the roster has, every round durable before it counts."""
    run = msgspec.structs.replace(plan.run, commit_seconds=0.0)
    return parse(msgspec.structs.replace(for_roster(plan, roster), run=run).to_toml())  # checked as a whole


def _about(
    nodes: Nodes, roster: Roster, settled: Settled, plan: Plan, tell: Tell
) -> tuple[Nodes, dict[int, bytes], bytes, str, Tell]:
    return nodes, roster.directory(), bytes.fromhex(settled.run), plan.to_toml(), tell


def _read(out: Path) -> Settled:
    path = out / SETTLED
    try:
        return msgspec.json.decode(path.read_bytes(), type=Settled)
    except (OSError, msgspec.MsgspecError) as fault:
        raise RunFolderError(
            f"{path} cannot be read: {fault}; the run in {out} was not begun by `baffle serve`, or is damaged"
        ) from None


def _forget(out: Path) -> None:
    """Remove what a server left that was killed before it wrote its plan: nobody was told of that run."""
    try:
        (out / SETTLED).unlink(missing_ok=True)
    except OSError as fault:
        raise RunFolderError(f"{out} cannot be used for a run: {fault.strerror or fault}; give another --out") from None


def _write(out: Path, settled: Settled) -> None:
    try:
        (out / SETTLED).write_bytes(msgspec.json.encode(settled))
    except OSError as fault:
        raise RunFolderError(f"{out} cannot be written: {fault.strerror or fault}") from None
