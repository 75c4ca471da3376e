"""A federation in one process whose rounds a test plays by hand, over a transport that the test can disturb."""

from collections.abc import Callable, Mapping
from pathlib import Path

from baffle.aggregation.messages import Request, decode_request
from baffle.client.client import Client
from baffle.client.replica import Replica
from baffle.client.worker import Worker
from baffle.core.state import Present
from baffle.federation import sums_of
from baffle.journal.store import Journal
from baffle.lineage import Lineage
from baffle.plan import Plan
from baffle.server.downlink import Downlink
from baffle.server.round import Played, play_round
from baffle.task.load import Runtimes, load_task
from baffle.trajectory import Trajectory, trajectory_of


class RoundsByHand:
    """Clients that each keep their own weights and session, a journal in a new folder, and one round per `play`. The
    requests that are `unheard`, and the replies that are `unanswered`, are lost."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.unheard: Callable[[int, Request], bool] = lambda _client, _asked: False
        self.unanswered: Callable[[int, Request], bool] = lambda _client, _asked: False
        task = load_task(plan)
        initial = task.initial_weights()
        self.trajectory: Trajectory = trajectory_of(task.plan, len(initial))
        self.aggregation, sessions = sums_of(self.trajectory, task)
        runtimes = Runtimes(task, 1)
        self.lineage = Lineage(self.trajectory)
        self.present: Present = self.lineage.beginning(self.trajectory.rule.start(initial))
        self.clients = [
            Client(
                Replica(self.lineage, self.present),
                Worker(number, k, self.trajectory, task.source.train, share, runtimes.borrow),
                sessions.get(number),
            )
            for number, (k, share) in enumerate(zip(task.tiers, task.shares, strict=True))
        ]
        folder.mkdir()
        (folder / "plan.toml").write_text(task.plan.to_toml())
        self.journal = Journal.create(folder / "journal.sqlite", task.plan, self.present.state, {})
        self.downlink = Downlink(plan.run.downlink, self.journal, self.lineage)

    def exchange(self, requests: Mapping[int, bytes]) -> Mapping[int, bytes]:
        replies = {client: self.carry(client, message) for client, message in requests.items()}
        return {client: reply for client, reply in replies.items() if reply is not None}

    def carry(self, client: int, message: bytes) -> bytes | None:
        """Bring a message to a client and its reply back; None if either is lost."""
        asked = decode_request(message)
        if self.unheard(client, asked):
            return None
        reply = self.clients[client].answer(message)
        return None if self.unanswered(client, asked) else reply

    def play(self) -> Played:
        played = play_round(self.trajectory, self.present, self, self.aggregation, self.journal, self.downlink)
        self.present = played.present
        return played
