"""The server of a networked run: wait for clients, settle the plan, play its rounds, send everybody the last weights.

A server that was killed and is started again with the same folder continues where its journal ends. A round is durable
before any client learns of it.
"""

import secrets
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import msgspec

from baffle.aggregation.plain import PlainSum
from baffle.aggregation.server.crash_record import CrashFile
from baffle.aggregation.server.secure_sum import SecureSum
from baffle.client.client import contribution_bytes
from baffle.core.messages import RoundRequest
from baffle.core.ports import MISSING, Aggregation
from baffle.journal.folder import PLAN, RunFolder
from baffle.network.board import Board
from baffle.network.full_disk import WaitForRoom
from baffle.network.joining import Begin, ConnectedClients, Introduction, Lines
from baffle.network.reception import Reception
from baffle.network.resuming import Tell, resume
from baffle.network.rosters import Roster
from baffle.network.same_plan import for_roster
from baffle.network.settling import Settled, read_settled, remove_settled, settle, write_settled
from baffle.plan import Plan, parse
from baffle.schedule import policy_of
from baffle.server.recorder import Summary, Watch
from baffle.server.run import Running, opened
from baffle.task.load import Runtimes, ServerTask, load_server_task
from baffle.trajectory import Trajectory, trajectory_of

LOOK = 0.25
"""Seconds between two checks for new clients, while there are too few."""

MOMENT = 0.02
"""Seconds between two checks whether clients are ready, before the first round."""


def serve(
    plan: Plan,
    out: Path,
    lines: Lines,
    roster: Roster,
    *,
    least: int = 0,
    data: Path | None = None,
    board: Board | None = None,
    watch: Watch = lambda _progress: None,
    tell: Tell = lambda _words: None,
) -> Summary:
    """Run a plan with the clients of a network into a folder. If a run is already there, continue it, to as many rounds
    and with the settings `run.*` that the plan has now. A new run begins when `least` clients are connected (0: as many
    as take part in a round, or all that the roster has if these are fewer).

    The server needs no training sample. Without a test set it measures no accuracy, and says so. The board always shows
    how the run goes."""
    plan = _plan_for(plan, roster)
    board = board or Board()
    board.begin(out.resolve().name, plan, len(roster.directory()))
    attempt = WaitForRoom(tell)
    if (out / PLAN).exists():
        with RunFolder.existing(out, attempt) as folder:
            settled = read_settled(out)
            task = resume(folder, plan, data, tell)
            clients = _connected_clients(lines, roster, settled, task.plan, tell)
            return _run(folder, settled, task, clients, {}, watch, board)
    remove_settled(out)
    folder = RunFolder.new(out, attempt)
    settled = Settled(secrets.token_hex(32), ())
    clients = _connected_clients(lines, roster, settled, plan, tell)
    newcomers = _gather(clients, least or min(plan.per_round, len(roster.directory())), board)
    plan, tiers = settle(plan, newcomers)
    task = load_server_task(plan, data, max(newcomer.samples for newcomer in newcomers.values()))
    with folder:
        settled = Settled(settled.run, tiers)
        attempt(partial(write_settled, out, settled))
        folder.write_plan(task.plan.to_toml())
        clients.plan = task.plan.to_toml()
        return _run(folder, settled, task, clients, newcomers, watch, board)


def _run(
    folder: RunFolder,
    settled: Settled,
    task: ServerTask,
    clients: ConnectedClients,
    newcomers: Mapping[int, Introduction],
    watch: Watch,
    board: Board,
) -> Summary:
    trajectory = trajectory_of(task.plan, len(task.initial_weights()))
    aggregation = _aggregation(trajectory, settled, folder, clients)
    clients.lines.expect(contribution_bytes(trajectory))
    about = Begin(bytes.fromhex(settled.run), task.plan.to_toml(), settled.tiers)
    samples: dict[int, int] = {}
    waiting, enough = False, _enough(task.plan)
    with (
        task.model.one_thread_each(),
        opened(folder, task, trajectory, Runtimes(task, 1), settled.tiers, samples, watch) as running,
    ):
        board.open(task.plan, running.journal.metrics(), running.journal.count(MISSING))
        for advice in task.model.advice():
            clients.tell(advice)
        if running.unevaluated:
            clients.tell(f"accuracy is not measured: {running.unevaluated}")
        reception = Reception(running, clients, about, folder.path, samples)
        reception.welcome(newcomers)
        while clients.starting:  # the first round is with everybody who is here
            time.sleep(MOMENT)
            reception.welcome({})
        while not running.over:
            for client in reception.welcome(clients.meet()):
                aggregation.forget(client)
            if len(clients.ready) < enough:
                why = f"{len(clients.ready)} clients are here, {enough} are needed"
                board.wait(why, enough, clients.ready)
                if not waiting:
                    clients.tell(f"{why}: waiting")
                waiting = True
                time.sleep(LOOK)
                continue
            waiting = False
            reception.require_newest_copy()
            board.play(enough, clients.ready)
            board.record(running.play(clients, aggregation), clients.ready)
        _hand_out_last_weights(running, clients, reception, board)
        return running.finish()


def _hand_out_last_weights(running: Running, clients: ConnectedClients, reception: Reception, board: Board) -> None:
    """Bring everybody to the last weights. Wait for each client that has taken part, at most as long as a round waits
    for a reply. If the server was restarted and knows of none, wait for every client of the roster."""
    expected = clients.ever_ready or set(clients.directory)
    holders = set[int]()
    give_up = time.monotonic() + running.trajectory.plan.run.deadline_seconds
    present = running.present
    while True:
        reception.welcome(clients.meet())
        reception.require_newest_copy()
        board.end(len(holders), len(expected), clients.ready)
        behind = sorted(clients.ready - holders)
        catch_ups = running.downlink.catch_ups(behind, present)
        digest, weights_hash = running.trajectory.digest, present.state.weights_hash()
        holders |= clients.end_run(
            {client: RoundRequest(present.round, 0, digest, weights_hash, catch_ups[client]) for client in behind}
        )
        if expected <= holders or time.monotonic() > give_up:
            break
        time.sleep(LOOK)
    clients.tell(f"{len(holders)} of {len(clients.directory)} clients hold the last weights")


def _enough(plan: Plan) -> int:
    """The fewest clients that a round needs to have a sum."""
    return plan.secure.floor if plan.secure.mode != "off" else 1


def _aggregation(trajectory: Trajectory, settled: Settled, folder: RunFolder, clients: ConnectedClients) -> Aggregation:
    if trajectory.plan.secure.mode == "off":
        return PlainSum(trajectory.ring, trajectory.length)
    policy = policy_of(trajectory, dict(enumerate(settled.tiers)))
    run, crash_file = bytes.fromhex(settled.run), CrashFile(folder.path / "kept", folder.attempt)
    return SecureSum(trajectory.ring, trajectory.length, run, clients.directory, policy, crash_file, clients.reachable)


def _gather(clients: ConnectedClients, least: int, board: Board) -> dict[int, Introduction]:
    """Wait until enough clients have introduced themselves."""
    newcomers: dict[int, Introduction] = {}
    reported = -1
    while True:
        newcomers |= clients.meet()
        newcomers = {client: newcomer for client, newcomer in newcomers.items() if client in clients.met}
        if len(newcomers) != reported:
            reported = len(newcomers)
            board.wait(f"{reported} clients are here, {least} are needed to begin", least)
            clients.tell(f"{reported} of {least} clients are here")
        if reported >= least:
            board.prepare()
            return newcomers
        time.sleep(LOOK)


def _plan_for(plan: Plan, roster: Roster) -> Plan:
    """The plan for this roster's places, with every round written to disk before it counts."""
    run = msgspec.structs.replace(plan.run, commit_seconds=0.0)
    return parse(msgspec.structs.replace(for_roster(plan, roster), run=run).to_toml())  # parse checks it as a whole


def _connected_clients(lines: Lines, roster: Roster, settled: Settled, plan: Plan, tell: Tell) -> ConnectedClients:
    return ConnectedClients(lines, roster.directory(), bytes.fromhex(settled.run), plan.to_toml(), tell)
