"""The status of a server's run, kept up to date for readers on other threads."""

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Set
from statistics import fmean, median
from typing import Any

import msgspec

from baffle.core.ports import MISSING
from baffle.errors import one_line
from baffle.network.clock import Clock
from baffle.network.status import RECENT, REMEMBERED, LinkCounts, Status, ranges
from baffle.plan import Plan
from baffle.plan.tasks import headline
from baffle.server.recorder import RoundMetrics, metric_in
from baffle.server.round import Played
from baffle.version import __version__

MOST_NAME = 200  # longer names of runs and plans are cut


class Board:
    """The server's thread writes, any other may read: each change replaces the whole status by another."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or Clock()
        self._began = self._clock.now()
        self._round_began = self._began
        self._round_ended: float | None = None
        self._seconds: deque[float] = deque(maxlen=REMEMBERED)
        self._status = Status(__version__, run="", plan="", secure="", doing="starting")

    def status(self, link: LinkCounts) -> Status:
        now, ended = self._clock.now(), self._round_ended
        return msgspec.structs.replace(
            self._status,
            uptime_seconds=round(now - self._began, 3),
            seconds_since_round=None if ended is None else round(now - ended, 3),
            clients_connected=len(link.connected),
            connected=ranges(link.connected),
            late_replies=link.late,
            refused_replies=link.refused,
            turned_away=link.turned_away,
            received_bytes=link.received_bytes,
            sent_bytes=link.sent_bytes,
        )

    def begin(self, run: str, plan: Plan, on_roster: int) -> None:
        self._change(
            run=one_line(run, MOST_NAME),
            plan=one_line(plan.name, MOST_NAME),
            secure=plan.secure.mode,
            rounds=plan.rounds,
            clients_on_roster=on_roster,
        )

    def count_roster(self, clients: int) -> None:
        self._change(clients_on_roster=clients)

    def prepare(self) -> None:
        """Enough clients are here, and the server loads what the plan names."""
        self._change(doing="starting", waits_for=None)

    def open(self, plan: Plan, metrics: Iterable[Mapping[str, Any]], dropouts: int) -> None:
        self._change(rounds=plan.rounds, dropouts=dropouts, metric=headline(plan.task))
        for record in metrics:
            self._count(record)

    def wait(self, why: str, needed: int, taking_part: Set[int] = frozenset()) -> None:
        self._change(doing="waiting", waits_for=why, clients_needed=needed, **_those(taking_part))

    def play(self, needed: int, taking_part: Set[int]) -> None:
        self._round_began = self._clock.now()
        self._change(doing="playing", waits_for=None, clients_needed=needed, **_those(taking_part))

    def record(self, played: Played, taking_part: Set[int]) -> None:
        self._round_ended = self._clock.now()
        self._seconds.append(self._round_ended - self._round_began)
        self._count({"round": played.present.round - 1, **played.metrics})
        self._change(
            dropouts=self._status.dropouts + list(played.participation.values()).count(MISSING),
            recent_round_seconds=round(fmean(list(self._seconds)[-RECENT:]), 3),
            median_round_seconds=round(median(self._seconds), 3),
            **_those(taking_part),
        )

    def end(self, holders: int, expected: int, taking_part: Set[int]) -> None:
        """All rounds are played, and this many of the expected clients hold the last weights."""
        why = f"clients to take the last weights: {holders} of {expected} have them"
        self._change(doing="ending", waits_for=why, **_those(taking_part))

    def _count(self, record: Mapping[str, Any]) -> None:
        """Add a round. The loss of a round with a single contributor would be that client's own, so it is left out."""
        before, metrics = self._status, msgspec.convert(record, RoundMetrics)
        value = metric_in(record, before.metric)
        value = before.value if value is None else value
        self._change(
            rounds_done=metrics.round + 1,
            skipped_rounds=before.skipped_rounds + (not metrics.contributors),
            silent=dict(Counter(before.silent) + Counter(metrics.silent)),
            abstained=dict(Counter(before.abstained) + Counter(metrics.abstained)),
            refusals=before.refusals + metrics.refusals,
            uplink_bytes=before.uplink_bytes + metrics.uplink_bytes,
            downlink_bytes=before.downlink_bytes + metrics.downlink_bytes + metrics.join_bytes,
            epsilon=metrics.epsilon,
            loss=metrics.loss if metrics.contributors > 1 else before.loss,
            value=value,
            accuracy=value if before.metric == "accuracy" else None,
        )

    def _change(self, **fields: Any) -> None:
        self._status = msgspec.structs.replace(self._status, **fields)


def _those(taking_part: Set[int]) -> dict[str, Any]:
    return {"clients_taking_part": len(taking_part), "taking_part": ranges(taking_part)}
