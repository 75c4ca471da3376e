"""Who took part in a run's rounds, and how the others ended them."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from baffle.core.ports import CONTRIBUTED, MISSING
from baffle.errors import one_line
from baffle.journal.participation import Participation
from baffle.server.recorder import RoundMetrics

LEFT_OUT = "left out"
"""A client answered, but is not in the sum: it abstained, was refused, or too few others answered."""

MOST_WORDS = 200
"""A report keeps at most this many different reasons."""


@dataclass(frozen=True)
class Attendance:
    """How often each client ended a round in each way, how many did in each round, and why clients were left out."""

    clients: int
    by_client: Mapping[int, Mapping[str, int]]
    by_round: Mapping[int, Mapping[str, int]]
    reasons: Mapping[str, int]


def attendance_of(participation: Participation, clients: int) -> Attendance:
    by_client: dict[int, Counter[str]] = {}
    by_round: dict[int, Counter[str]] = {}
    reasons: Counter[str] = Counter()
    for client, event, count in participation.by_client(clients):
        by_client.setdefault(client, Counter())[_way(event)] += count
        if _way(event) == LEFT_OUT and len(reasons) < MOST_WORDS:
            reasons[one_line(event)] += count
    for number, event, count in participation.by_round():
        by_round.setdefault(number, Counter())[_way(event)] += count
    return Attendance(clients, by_client, by_round, reasons)


def _way(event: str) -> str:
    return event if event in (CONTRIBUTED, MISSING) else LEFT_OUT


@dataclass(frozen=True)
class Refusal:
    """Words of the server's record, in how many rounds they stand, and in which."""

    words: str
    count: int
    rounds: list[int]


def refusals(metrics: Iterable[Mapping[str, object]]) -> list[Refusal]:
    """What the server refused, in its words, the most frequent first. Rounds count from 1, as they do in a terminal."""
    found: dict[str, list[int]] = {}
    for place, record in enumerate(metrics, 1):
        words = record.get("refused")
        for text in words if isinstance(words, list) else []:
            found.setdefault(one_line(str(text)), []).append(place)
        if record.get("refused_update"):
            found.setdefault("the update moved the weights further than update.norm_max", []).append(place)
    most = sorted(found.items(), key=lambda item: -len(item[1]))[:MOST_WORDS]
    return [Refusal(words, len(rounds), rounds) for words, rounds in most]


def by_phase(rounds: Iterable[RoundMetrics]) -> dict[str, tuple[int, int]]:
    """For each phase of a round: how many messages got no answer, and how many requests clients did not follow."""
    silent: Counter[str] = Counter()
    abstained: Counter[str] = Counter()
    for metrics in rounds:
        silent.update(metrics.silent)
        abstained.update(metrics.abstained)
    return {phase: (silent[phase], abstained[phase]) for phase in dict.fromkeys([*silent, *abstained])}
