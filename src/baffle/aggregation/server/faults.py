"""Which clients have broken the rules, and which may have spoilt a sum unseen.

A client that is caught is left out for half a minute, and twice as long each further time, up to a day. That is gentle,
because a broken line can look like a lie.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

SHORTEST, LONGEST = 30.0, 24 * 3600.0  # seconds for which a client is left out: the first time, and at most
MOST_CORNERED = 3  # with more liars, it takes too long to look at everything that may have happened
MOST_SPOILT = 100  # how many spoilt sums are remembered


class Bar(NamedTuple):
    times: int
    until: float
    why: str


def _still(*_: object) -> float:
    """A clock for simulations, in which no bar ever lifts."""
    return 0.0


@dataclass
class Faults:
    """The faults of a run's clients, over all its epochs. `now` gives seconds, and `tell` hears who is left out. Of all
    clients at most `liars` lie; 0: nobody knows how many, so only those that were seen to lie are named.

    `wasted` counts the rounds since the last sum in which clients released shares and no sum came out.
    """

    now: Callable[[], float] = _still
    tell: Callable[[str], object] = _still
    liars: int = 0
    wasted: int = 0
    _bars: dict[int, Bar] = field(default_factory=dict)
    _spoilt: list[frozenset[int]] = field(default_factory=list)

    @property
    def barred(self) -> Mapping[int, str]:
        """The clients that are left out at this moment, and why."""
        now = self.now()
        return {client: bar.why for client, bar in self._bars.items() if now < bar.until}

    @property
    def known(self) -> set[int]:
        """The clients that have been left out at least once."""
        return set(self._bars)

    def charge(self, client: int, why: str) -> None:
        """Leave a client out for a while, also if it comes back as another process."""
        bar, now = self._bars.get(client, Bar(0, 0.0, "")), self.now()
        if bar.times and now < bar.until:
            return
        seconds = min(SHORTEST * 2 ** min(bar.times, 20), LONGEST)
        self._bars[client] = Bar(bar.times + 1, now + seconds, why)
        self._spoilt = [clients for clients in self._spoilt if client not in clients]
        self.tell(f"client {client} is left out for {seconds:g} s: {why}")

    def remember(self, clients: Collection[int]) -> None:
        """These clients were left out once, before the server was started again."""
        self._bars |= {client: Bar(1, -math.inf, "") for client in clients if client not in self._bars}

    def forget(self, client: int) -> None:
        """Another client has the place of this one."""
        self._bars.pop(client, None)
        self._spoilt = [clients for clients in self._spoilt if client not in clients]

    def note_spoilt(self, clients: Collection[int]) -> None:
        """One of these clients has spoilt their sum, and nobody saw which."""
        self._spoilt = [*self._spoilt, frozenset(clients)][-MOST_SPOILT:]

    @property
    def suspects(self) -> list[int]:
        """The clients that were in every spoilt sum."""
        return sorted(frozenset.intersection(*self._spoilt)) if self._spoilt else []

    def cornered(self) -> dict[int, str]:
        """The clients that must have lied, since the spoilt sums have no other explanation, and the words for it."""
        if not 0 < self.liars <= MOST_CORNERED:
            return {}
        if not _explained(self._spoilt, self.liars):  # more clients lie than the plan allows
            self._spoilt = []
        why = f"{len(self._spoilt)} spoilt sums have no other explanation if at most {self.liars} clients lie"
        suspects = sorted(frozenset().union(*self._spoilt))
        return {client: why for client in suspects if not _explained(self._spoilt, self.liars, client)}


def _explained(spoilt: Sequence[frozenset[int]], liars: int, innocent: int = -1) -> bool:
    """Whether so many liars, the innocent client not among them, could have spoilt all these sums."""
    if not spoilt or not liars:
        return not spoilt
    return any(
        _explained([clients for clients in spoilt if liar not in clients], liars - 1, innocent)
        for liar in spoilt[0] - {innocent}
    )
