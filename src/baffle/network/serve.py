"""The server of a networked run: wait for clients, agree on a statement, play its rounds, send everybody the last
weights.

A server that was killed and is started again with the same folder continues where its journal ends. A round is durable
before any client learns of it.
"""

import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from baffle.aggregation.plain import PlainSum
from baffle.aggregation.server.crash_record import CrashFile
from baffle.aggregation.server.secure_sum import SecureSum
from baffle.client.client import contribution_bytes
from baffle.core.chain import Present
from baffle.core.messages import RoundRequest
from baffle.core.ports import MISSING, Aggregation
from baffle.errors import MessageError
from baffle.journal.folder import PLAN, RunFolder
from baffle.network.assembly import Assembly, certificate_of
from baffle.network.board import Board
from baffle.network.connected import ConnectedClients
from baffle.network.full_disk import WaitForRoom
from baffle.network.joining import Done, Lines
from baffle.network.link.limits import most_request_bytes
from baffle.network.reception import Reception
from baffle.network.resuming import Tell, resume
from baffle.network.rosters import Reread, Roster
from baffle.network.same_plan import with_places
from baffle.network.settling import (
    N_MAX,
    require_clients_of_their_own,
    require_hidden_tiers,
    require_sound_terms,
    tiers_for,
)
from baffle.network.succession import Succession, places_of
from baffle.network.waiting import Waiting
from baffle.plan import Plan, parse
from baffle.plan.tasks import headline
from baffle.schedule import policy_of
from baffle.server.recorder import Summary, Watch
from baffle.server.run import Running, opened
from baffle.statement import least_salt, require_certified
from baffle.task.load import Runtimes, load_server_task
from baffle.task.server_task import ServerTask
from baffle.trajectory import trajectory_of

LOOK = 0.25
"""Seconds between two checks for new clients, while there are too few."""

EPOCH_SECONDS = 10.0
"""An epoch lasts at least this long, unless it has too few clients left: newcomers wait for each other."""

EPOCH_TURNS = 4
"""An epoch lasts until a client has taken part in so many rounds on average: clients count the statements under which
they did not."""


def serve(
    plan: Plan,
    out: Path,
    lines: Lines,
    roster: Roster,
    *,
    least: int = 0,
    data: Path | None = None,
    reread: Reread = lambda: None,
    board: Board | None = None,
    watch: Watch = lambda _progress: None,
    tell: Tell = lambda _words: None,
) -> Summary:
    """Run a plan with the clients of a network into a folder. If a run is already there, continue it, to as many rounds
    and with the settings `run.*` that the plan has now. A new run begins when `least` clients are connected (0: as many
    as take part in a round, or all that the roster has if these are fewer).

    `reread` is asked between rounds and while the run waits: a later roster takes the place of the present one, and the
    run goes on with the next epoch.

    The server needs no training sample. Without a test set it measures no accuracy, and says so. The board always shows
    how the run goes."""
    plan = _plan_for(plan, places_of(out, roster))
    require_sound_terms(plan)
    require_hidden_tiers(plan)
    require_clients_of_their_own(plan)
    board = board or Board()
    board.begin(out.resolve().name, plan, len(roster.directory()))
    attempt = WaitForRoom(tell)
    if (out / PLAN).exists():
        with RunFolder.existing(out, attempt) as folder:
            task = resume(folder, plan, data, tell)
            return _run(folder, task, lines, roster, least, reread, watch, board, tell)
    folder = RunFolder.new(out, attempt)
    if not plan.ring.n_max and plan.federation.weighting == "samples":
        tell(f"ring.n_max is not set: a client with more than {N_MAX:,} samples counts as if it had {N_MAX:,}")
    task = load_server_task(plan, data, plan.ring.n_max or N_MAX)
    with folder:
        folder.write_plan(task.plan.to_toml())
        return _run(folder, task, lines, roster, least, reread, watch, board, tell)


def _run(
    folder: RunFolder,
    task: ServerTask,
    lines: Lines,
    roster: Roster,
    least: int,
    reread: Reread,
    watch: Watch,
    board: Board,
    tell: Tell,
) -> Summary:
    plan = task.plan
    trajectory = trajectory_of(plan, len(task.initial_weights()))
    lines.expect(contribution_bytes(trajectory))
    with (
        task.model.one_thread_each(),
        opened(
            folder, task, trajectory, Runtimes(task, 1), tiers_for(plan, {}), {}, watch, tell, networked=True
        ) as running,
    ):
        board.open(plan, running.journal.metrics(), running.journal.participation.count(MISSING))
        for advice in (*task.remarks, *task.model.advice()):
            tell(advice)
        if running.unevaluated:
            tell(f"{headline(running.trajectory.plan.task)} is not measured: {running.unevaluated}")
        return _Service(folder, running, lines, roster, least, reread, board, tell).play()


class _Service:
    """A run that is being served."""

    def __init__(
        self,
        folder: RunFolder,
        running: Running,
        lines: Lines,
        roster: Roster,
        least: int,
        reread: Reread,
        board: Board,
        tell: Tell,
    ) -> None:
        plan = running.trajectory.plan
        self._running, self._lines, self._board, self._tell = running, lines, board, tell
        self._clients = ConnectedClients(lines, tell, answered=lambda one: running.contributed.get(one, -1) + 1)
        size = most_request_bytes(plan.federation.clients, running.trajectory.n, contribution_bytes(running.trajectory))
        self._clients.most_request_bytes = size
        self._least = least
        self._assembly = Assembly(running, self._clients, roster, max(_enough(plan), least_salt(plan)))
        self._reception = Reception(running, tell, folder.path)
        self._crash_file = CrashFile(folder.path / "kept", folder.attempt)
        self._aggregation = self._new_aggregation()
        self._epoch_began = time.monotonic()
        self._waiting = Waiting(tell)
        self._succession = Succession(reread, lines, self._assembly, board, tell)

    def play(self) -> Summary:
        """Play the run to its end."""
        running, clients, board = self._running, self._clients, self._board
        enough = _enough(running.trajectory.plan)
        while not running.over:
            self._succession.look()
            started = clients.meet()
            self._reception.welcome(started)
            for client in started:
                self._aggregation.forget(client)
            if self._is_epoch_due(enough) and not self._assembly.roster.has_expired():
                self._begin_epoch()
            if why := self._lacking(enough):
                self._wait(why, enough)
                continue
            self._waiting.end()
            self._reception.require_newest_copy()
            board.play(enough, clients.ready)
            self._play_round()
        self._hand_out_last_weights()
        return running.finish()

    def _play_round(self) -> None:
        before = self._running.present
        played = self._running.play(self._clients, self._aggregation)
        self._board.record(played, self._clients.ready)
        if played.states and before.round % self._running.trajectory.plan.run.snapshot_every == 0:
            self._certify(before, played.states)

    def _is_epoch_due(self, enough: int) -> bool:
        """Whether another statement is needed: there is none for the plan as it is now, or clients wait for one."""
        clients = self._clients
        if clients.epoch is None:
            return len(clients.here()) >= self._needed()
        if len(clients.ready) < enough:
            return bool(clients.introduced)
        played = self._running.present.round - clients.epoch.statement.first
        share = self._running.trajectory.plan.federation.participation
        everybody_had_turns = share == 1 or played * share >= EPOCH_TURNS
        return bool(clients.introduced) and time.monotonic() - self._epoch_began > EPOCH_SECONDS and everybody_had_turns

    def _begin_epoch(self) -> None:
        self._board.prepare()
        begun = self._assembly.form()
        self._epoch_began = time.monotonic()
        if begun:
            self._crash_file.clear()
            self._aggregation = self._new_aggregation()
            self._reception.welcome(begun)

    def _lacking(self, enough: int) -> str:
        """What the run waits for; empty if a round can be played."""
        clients, roster = self._clients, self._assembly.roster
        if roster.has_expired():
            return f"roster {roster.number} expired at {roster.expires}, `baffle keys renew` makes a later one"
        if clients.epoch is None:
            return f"{len(clients.here())} clients are here, {self._needed()} are needed to begin"
        if clients.starting and not self._running.contributed:
            return "clients of the first round get ready"
        if len(clients.ready) < enough:
            return f"{len(clients.ready)} clients are here, {enough} are needed"
        return ""

    def _needed(self) -> int:
        """How many clients must be here for an epoch to begin. A run that has begun before waits for no more than it
        needs."""
        if self._running.lineage.links:
            return self._assembly.least
        plan = self._running.trajectory.plan
        return max(self._least or min(plan.per_round, len(self._assembly.members())), least_salt(plan))

    def _wait(self, why: str, enough: int) -> None:
        needed = enough if self._clients.epoch else self._needed()
        self._board.wait(why, needed, self._clients.ready)
        self._waiting.say(why, len(self._lines.present()), len(self._clients.refusing()))
        time.sleep(LOOK)

    def _new_aggregation(self) -> Aggregation:
        trajectory, epoch = self._running.trajectory, self._clients.epoch
        if trajectory.plan.secure.mode == "off" or epoch is None:
            return PlainSum(trajectory.ring, trajectory.length)
        policy = policy_of(trajectory, dict(enumerate(epoch.statement.tiers)), epoch.salt)
        directory = self._assembly.members()
        reachable = self._clients.reachable
        return SecureSum(trajectory.ring, trajectory.length, epoch.run, directory, policy, self._crash_file, reachable)

    def _hand_out_last_weights(self) -> None:
        """Bring everybody to the last weights. Wait for each client that has taken part, at most as long as a round
        waits for a reply. If the server was restarted and knows of none, wait for every client of the roster."""
        clients, running = self._clients, self._running
        trajectory, present = running.trajectory, running.present
        expected = clients.ever_ready or set(self._assembly.members())
        holders: dict[int, Done] = {}
        give_up = time.monotonic() + trajectory.plan.run.deadline_seconds
        while True:
            self._reception.welcome(clients.meet())
            self._reception.require_newest_copy()
            self._board.end(len(holders), len(expected), clients.ready)
            behind = sorted(clients.ready - holders.keys())
            catch_ups = running.downlink.catch_ups(behind, present)
            weights_hash = present.state.weights_hash()
            holders |= clients.end_run(
                {
                    client: RoundRequest(
                        present.round, trajectory.digest, present.chain, weights_hash, catch_ups[client]
                    )
                    for client in behind
                }
            )
            if expected <= holders.keys() or time.monotonic() > give_up:
                break
            time.sleep(LOOK)
        self._certify(present, {client: done.signature for client, done in holders.items()})
        self._tell(f"{len(holders)} of {len(self._assembly.members())} clients hold the last weights")

    def _certify(self, present: Present, states: Mapping[int, bytes]) -> None:
        """Keep the clients' signatures under a state, if there are enough for a certificate."""
        epoch, plan = self._clients.epoch, self._running.trajectory.plan
        if epoch is None or plan.secure.mode != "malicious-server":
            return
        certificate = certificate_of(epoch.run, present, states)
        try:
            require_certified(certificate, self._assembly.roster.directory(), plan.per_round)
        except MessageError as fault:
            self._tell(f"the state before round {present.round} has no certificate: {fault}")
            return
        self._running.journal.statements.add_certificate(certificate)


def _enough(plan: Plan) -> int:
    """The fewest clients that a round needs to have a sum."""
    return plan.secure.floor if plan.secure.mode != "off" else 1


def _plan_for(plan: Plan, places: int) -> Plan:
    """The plan for so many places, with every round written to disk before it counts."""
    run = msgspec.structs.replace(plan.run, commit_seconds=0.0)
    return parse(msgspec.structs.replace(with_places(plan, places), run=run).to_toml())  # parse checks it as a whole
