"""The server of a networked run: wait for clients, agree on a statement, play its rounds, send all clients the last
weights.

A server that was killed and is started again with the same folder continues where its journal ends. A round is durable
before any client learns of it.

A run may go on under a later roster. It keeps its number of places, because partition, weights and thresholds follow
from it; another client may get an empty place. If the roster gets more places, the run goes on with its own clients: a
newcomer could not tell it from a run for which a server has picked few clients, all but one its own.
"""

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from baffle.aggregation.client.slot import MOST_QUERIES
from baffle.aggregation.plain import PlainSum
from baffle.aggregation.server.crash_record import CrashFile
from baffle.aggregation.server.faults import Faults
from baffle.aggregation.server.secure_sum import SecureSum
from baffle.client.abstaining import Tell
from baffle.client.client import contribution_bytes
from baffle.core.ports import MISSING, Aggregation
from baffle.errors import AbortError, KeysError, RunFolderError
from baffle.journal.folder import PLAN, RunFolder
from baffle.network import settling
from baffle.network.clock import Clock
from baffle.network.joining import Done, Lines, Ready
from baffle.network.keys.rosters import Reread, Roster
from baffle.network.server.assembly import Assembly
from baffle.network.server.board import Board
from baffle.network.server.connected import ConnectedClients
from baffle.network.server.epochs import Epochs
from baffle.network.server.machine import WaitForRoom
from baffle.network.server.resuming import Reception, plan_for, resume
from baffle.network.status import ranges
from baffle.plan import Plan
from baffle.plan.tasks import headline
from baffle.schedule import policy_of
from baffle.server.recorder import Summary, Watch
from baffle.server.run import Running, opened
from baffle.statement import least_salt
from baffle.task.load import Runtimes, load_server_task
from baffle.trajectory import trajectory_of

LOOK = 0.25  # seconds between two checks for new clients, while there are too few
# An epoch lasts at least so many seconds, because newcomers wait for each other; and until a client has taken part in
# so many rounds on average, because clients count the statements under which they did not.
EPOCH_SECONDS, EPOCH_TURNS = 10.0, 4
# How many epochs of a run begin because newcomers wait. The journal keeps a statement of each, and clients that come
# and go in turns could otherwise fill it.
EPOCHS_FOR_NEWCOMERS = 1000
SAY_AGAIN = 60.0  # seconds until it is said again that clients refuse, for operators that look at the log later
LIMITED = "it goes on with clients that have been in it, and all others take part from the next run on"


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
    clock: Clock | None = None,
) -> Summary:
    """Run a plan with the clients of a network into a folder. If a run is already there, continue it, to as many rounds
    and with the settings `run.*` that the plan has now. A new run begins when `least` clients are connected (0: as many
    as take part in a round, or all that the roster has if these are fewer). `reread` is asked between rounds and while
    the run waits: a later roster takes the place of the present one, with the next epoch. The server needs no training
    sample. Without a test set it measures no accuracy, and says so."""
    clock = clock or Clock()
    plan = plan_for(plan, out, roster)
    for require in (settling.require_sound_terms, settling.require_hidden_tiers, settling.require_clients_of_their_own):
        require(plan)
    board = board or Board(clock)
    board.begin(out.resolve().name, plan, len(roster.directory()))
    attempt = WaitForRoom(tell, clock)
    with ExitStack() as stack:
        if (out / PLAN).exists():
            folder = stack.enter_context(RunFolder.existing(out, attempt))
            task = resume(folder, plan, data, tell)
        else:
            folder, most = RunFolder.new(out, attempt), settling.N_MAX
            if not plan.ring.n_max and plan.federation.weighting == "samples":
                tell(f"ring.n_max is not set: a client with more than {most:,} samples counts as if it had {most:,}")
            task = load_server_task(plan, data, plan.ring.n_max or most)
            settling.require_fewer_directions_than_weights(trajectory_of(task.plan, len(task.initial_weights())))
            stack.enter_context(folder)
            folder.write_plan(task.plan.to_toml())
        plan, trajectory = task.plan, trajectory_of(task.plan, len(task.initial_weights()))
        lines.expect(contribution_bytes(trajectory))
        stack.enter_context(task.model.one_thread_each())
        running = stack.enter_context(
            opened(
                folder,
                task,
                trajectory,
                Runtimes(task, 1),
                settling.tiers_for(plan, {}),
                {},
                watch,
                tell,
                networked=True,
            )
        )
        board.open(plan, running.journal.metrics(), running.journal.participation.count(MISSING))
        for advice in (*task.remarks, *task.model.advice()):
            tell(advice)
        if running.unevaluated:
            tell(f"{headline(plan.task)} is not measured: {running.unevaluated}")
        epochs = Epochs(running, roster, tell)
        faults = Faults(clock.now, tell, plan.secure.liars)
        faults.remember(epochs.accused)
        clients = ConnectedClients(lines, epochs, tell, clock, faults)
        assembly = Assembly(epochs, clients, max(_enough(plan), least_salt(plan)))
        return _Service(folder, running, clients, assembly, reread, board, least, tell, clock).play()


@dataclass
class _Service:
    folder: RunFolder
    running: Running
    clients: ConnectedClients
    assembly: Assembly
    reread: Reread
    board: Board
    least: int
    tell: Tell
    clock: Clock

    def __post_init__(self) -> None:
        self._epochs = self.assembly.epochs
        self._enough = _enough(self.running.trajectory.plan)
        self._reception = Reception(self.running, self.tell, self.folder.path)
        self._crash_file = CrashFile(self.folder.path / "kept", self.folder.attempt)
        self._aggregation = self._new_aggregation()
        self._epoch_began = self.clock.now()
        self._waiting = WaitingLog(self.tell, self.clock)
        if (grown := self._grown(self._epochs.roster)) and not self._epochs.have_begun:
            raise RunFolderError(f"{grown}; nobody has taken part in it yet: start a new run with another --out")
        if grown:
            self.tell(f"{grown}: {LIMITED}")

    def play(self) -> Summary:
        while not self.running.over:
            self._look_for_roster()
            self._welcome(self.clients.meet())
            if self._is_epoch_due() and not self._epochs.roster.has_expired():
                self._begin_epoch()
            if why := self._lacking():
                self._wait(why)
                continue
            self._waiting.end()
            self._reception.require_newest_copy()
            self._play_round()
        self._hand_out_last_weights()
        return self.running.finish()

    def _look_for_roster(self) -> None:
        """Take a later roster, if there is one. An invalid one is reported once, and changes nothing."""
        before = self._epochs.roster
        try:
            roster = self.reread()
        except KeysError as fault:
            self.tell(f"{fault}; the run goes on with roster {before.number}")
            return
        if roster is None:
            return
        grown = self._grown(roster)
        if grown and not self._epochs.have_begun:
            self.tell(
                f"{grown}, which has not begun and stays with roster {before.number}; for all clients, start a new run "
                "with another --out"
            )
            return
        self.tell(f"roster {roster.number} takes the place of roster {before.number}")
        if grown:
            self.tell(f"{grown}: {LIMITED}")
        now = roster.directory()
        self.clients.lines.admit(roster)
        self.assembly.take(roster, [client for client, key in before.directory().items() if now.get(client) != key])
        self.board.count_roster(len(now))

    def _grown(self, roster: Roster) -> str:
        """A sentence if a roster has more places than this run; empty otherwise."""
        here, there = self._epochs.places, len(roster.clients)
        return f"roster {roster.number} has {there} places, but this run {here}" if there > here else ""

    def _welcome(self, started: dict[int, Ready]) -> None:
        """Clients of the epoch take part again. They may have lost the keys of a round that has begun."""
        self._reception.welcome(started)
        for client in started:
            self._aggregation.forget(client)

    def _is_epoch_due(self) -> bool:
        """Whether another statement is needed: there is none for the plan as it is now, or clients wait for one."""
        clients, epoch = self.clients, self._epochs.epoch
        if epoch is None:
            return len(clients.here()) >= self._needed()
        if len(clients.able) < self._enough:
            return bool(clients.introduced)
        played = self.running.present.round - epoch.statement.first
        plan = self.running.trajectory.plan
        share = plan.federation.participation
        all_had_turns = share == 1 or played * share >= EPOCH_TURNS
        has_lasted = (
            self.clock.now() - self._epoch_began > EPOCH_SECONDS and played >= plan.rounds / EPOCHS_FOR_NEWCOMERS
        )
        return bool(clients.introduced) and has_lasted and all_had_turns

    def _begin_epoch(self) -> None:
        self.board.prepare()
        begun = self.assembly.form()
        self._epoch_began = self.clock.now()
        if begun:
            self._crash_file.clear()
            self._aggregation = self._new_aggregation()
            self._reception.welcome(begun)

    def _lacking(self) -> str:
        """What the run waits for; empty if a round can be played."""
        clients, roster = self.clients, self._epochs.roster
        if roster.has_expired():
            return f"roster {roster.number} expired at {roster.expires}, `baffle keys renew` makes a later one"
        if self._epochs.epoch is None:
            return f"{len(clients.here())} clients are here, {self._needed()} are needed to begin"
        if clients.starting and not self.running.contributed:
            return "clients of the first round get ready"
        if len(clients.able) < self._enough:
            return f"{len(clients.able)} clients are here, {self._enough} are needed"
        return ""

    def _needed(self) -> int:
        """How many clients an epoch needs to begin. A run that has begun before waits for no more than it needs."""
        if self._epochs.have_begun:
            return self.assembly.least
        plan = self.running.trajectory.plan
        return max(self.least or min(plan.per_round, len(self._epochs.members())), least_salt(plan))

    def _wait(self, why: str) -> None:
        needed = self._enough if self._epochs.epoch else self._needed()
        self.board.wait(why, needed, self.clients.ready)
        self._waiting.say(why, len(self.clients.lines.present()), len(self.clients.refusing()))
        self.clock.sleep(LOOK)

    def _play_round(self) -> None:
        self.board.play(self._enough, self.clients.ready)
        before, wasted = self.running.present, self.clients.faults.wasted
        played = self.running.play(self.clients, self._aggregation)
        self.board.record(played, self.clients.ready)
        if played.states and before.round % self.running.trajectory.plan.run.snapshot_every == 0:
            self._epochs.certify(before, played.states)
        if wasted >= MOST_QUERIES and not played.outcome.groups and not self.running.trajectory.private:
            self._give_up(wasted)

    def _give_up(self, wasted: int) -> None:
        """End a run that cannot go on. In a private one clients pay for each sum, and go on while they can."""
        suspects = self.clients.faults.suspects
        named = f"; one of the clients {ranges(suspects)} has spoilt them" if suspects else ""
        raise AbortError(
            f"{wasted} sums about the weights before round {self.running.present.round} have come to nothing, and "
            f"clients release no more shares about these weights{named}: begin a new run with another seed, and "
            "without the client that spoils it, or with secure.groups and secure.liars, which corner one"
        )

    def _new_aggregation(self) -> Aggregation:
        trajectory, epoch = self.running.trajectory, self._epochs.epoch
        if trajectory.plan.secure.mode == "off" or epoch is None:
            return PlainSum(trajectory.ring, trajectory.length)
        policy = policy_of(trajectory, dict(enumerate(epoch.statement.tiers)), epoch.salt)
        directory, reachable = self._epochs.members(), self.clients.reachable
        ring, length, faults = trajectory.ring, trajectory.length, self.clients.faults
        return SecureSum(ring, length, epoch.run, directory, policy, self._crash_file, reachable, faults)

    def _hand_out_last_weights(self) -> None:
        """Bring all clients to the last weights. Wait for each client that has taken part, at most as long as a round
        waits for a reply. If none has, wait for every client. No epoch follows: clients outside the last one cannot
        be told the weights, so nobody waits for them."""
        clients, members, epoch = self.clients, self._epochs.members(), self._epochs.epoch
        able = members.keys() & epoch.salters if epoch else set(members)
        expected = (clients.ever_ready | self.running.contributed.keys()) & able or able
        holders: dict[int, Done] = {}
        give_up = self.clock.now() + self.running.trajectory.plan.run.deadline_seconds
        while True:
            self._reception.welcome(clients.meet())
            self._reception.require_newest_copy()
            self.board.end(len(holders), len(expected), clients.ready)
            holders |= clients.end_run(self._epochs.last_requests(sorted(clients.ready - holders.keys())))
            if expected <= holders.keys() or self.clock.now() > give_up:
                break
            self.clock.sleep(LOOK)
        self._epochs.certify(self.running.present, {client: done.signature for client, done in holders.items()})
        self.tell(f"{len(holders)} of {len(members)} clients hold the last weights")


@dataclass
class WaitingLog:
    """Tells what a run waits for, once, and how many clients refuse to take part, when that changes and now and then:
    otherwise a server that all clients refuse would wait for ever without a word."""

    tell: Tell
    clock: Clock
    _why: str = ""
    _counts: tuple[int, int] = (0, 0)
    _told: float | None = None

    def say(self, why: str, connected: int, refusing: int) -> None:
        """The run waits for this, with so many clients connected and so many of them refusing."""
        if why != self._why:
            self.tell(f"{why}: waiting")
        self._why = why
        again = self._told is None or self.clock.now() - self._told >= SAY_AGAIN
        if refusing and (again or (connected, refusing) != self._counts):
            self.tell(
                f"{connected} clients are connected, and {refusing} of them refuse to take part: each client's own log "
                "says why"
            )
            self._told = self.clock.now()
        self._counts = connected, refusing

    def end(self) -> None:
        self._why = ""


def _enough(plan: Plan) -> int:
    """The fewest clients that a round needs to have a sum."""
    return plan.secure.floor if plan.secure.mode != "off" else 1
