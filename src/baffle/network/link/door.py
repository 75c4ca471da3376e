"""Who may stand in the server's doorway: connections that have not proved who they are get little time, few bytes and
few places, and an address that keeps failing is shut out for a while."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

SECONDS = 5.0
"""How long a connection may take to prove who it is."""

BYTES = 16 * 1024
"""How many bytes a connection may send before it has proved who it is: a request's headers and two small frames."""

PLACES = 64
"""How many connections may be unproved at the same time; large federations get an eighth of their size on top."""

FAILURES = 20
"""An address that failed this often is shut out until time has forgiven it."""

FORGIVEN = 3.0
"""Seconds after which one failure of an address is forgiven."""

MOST_ADDRESSES = 10_000
"""How many addresses' failures are remembered; the oldest are forgotten first."""

KNOWN_FOR = 600.0
"""Seconds for which an address that a client has come from is not shut out: many clients may share one address."""


class Visitor(Protocol):
    """A connection that has not proved who it is."""

    address: str

    def drop(self) -> None: ...


@dataclass
class Door:
    """Counts visitors and failures by address. `now` is the clock."""

    clients: int
    now: Callable[[], float]
    turned_away: int = 0
    """Connections that were refused, failed or took too long."""
    _visitors: list[Visitor] = field(default_factory=list)
    _failures: dict[str, tuple[float, float]] = field(default_factory=dict)  # address → failures, and when counted
    _known: dict[str, float] = field(default_factory=dict)  # address → when a client last came from there

    @property
    def places(self) -> int:
        return PLACES + self.clients // 8

    def admits(self, address: str) -> bool:
        """Whether a connection from this address may enter. It is asked before a byte is read."""
        known = self.now() - self._known.get(address, -KNOWN_FOR) < KNOWN_FOR
        if not known and self._failures_of(address) >= FAILURES:
            self.turned_away += 1
            return False
        return True

    def enter(self, visitor: Visitor) -> None:
        """Take a visitor in. If there is no place left, the one that has waited longest has to go, of those from the
        address that holds most places."""
        if len(self._visitors) >= self.places:
            crowded, _ = Counter(other.address for other in self._visitors).most_common(1)[0]
            oldest = next(other for other in self._visitors if other.address == crowded)
            self.fail(oldest)
            oldest.drop()
        self._visitors.append(visitor)

    def prove(self, visitor: Visitor) -> None:
        """The visitor is a client: it is none of the door's business any more."""
        self._leave(visitor)
        self._known[visitor.address] = self.now()

    def fail(self, visitor: Visitor) -> None:
        """The visitor has failed to prove itself. Does nothing if it was no visitor (any more)."""
        if not self._leave(visitor):
            return
        self.turned_away += 1
        failures = self._failures_of(visitor.address) + 1
        self._failures.pop(visitor.address, None)
        self._failures[visitor.address] = failures, self.now()
        while len(self._failures) > MOST_ADDRESSES:
            del self._failures[next(iter(self._failures))]

    def leave(self, visitor: Visitor) -> None:
        """The visitor goes without having failed, for example after it asked for a page."""
        self._leave(visitor)

    def _leave(self, visitor: Visitor) -> bool:
        present = visitor in self._visitors
        if present:
            self._visitors.remove(visitor)
        return present

    def _failures_of(self, address: str) -> float:
        failures, counted = self._failures.get(address, (0.0, 0.0))
        return max(0.0, failures - (self.now() - counted) / FORGIVEN)
