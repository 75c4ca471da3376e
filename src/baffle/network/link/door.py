"""Who may stand in the server's doorway: connections that have not proved who they are get little time, few bytes and
few places, and an address that keeps failing is shut out for a while."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from ipaddress import IPv6Address
from typing import Protocol, TypeVar

SECONDS = 5.0
"""How long a connection may take to prove who it is."""

BYTES = 16 * 1024
"""How many bytes a connection may send before it has proved who it is: a request's headers and two small frames."""

PLACES = 64
"""How many connections may be unproved at the same time; large federations get an eighth of their size on top."""

UNDISTURBED = 1.0
"""Seconds for which a visitor keeps its place, even if others wait for one: when a server starts, all its clients come
at once, and none would get through if each newcomer took the place of one that is halfway."""

FAILURES = 20
"""An address that failed this often is shut out until time has forgiven it."""

FORGIVEN = 3.0
"""Seconds after which one failure of an address is forgiven."""

MOST_ADDRESSES = 10_000
"""How many addresses are remembered; the oldest are forgotten first."""

KNOWN_FOR = 600.0
"""Seconds for which an address is not shut out after its last client has gone: many clients may share one address."""


class Visitor(Protocol):
    """A connection that has not proved who it is."""

    address: str

    def drop(self) -> None: ...


@dataclass
class Door:
    """Counts visitors and failures by address. `now` is the clock. Behind a proxy everybody has the proxy's address, so
    nobody is shut out by it."""

    clients: int
    now: Callable[[], float]
    behind_proxy: bool = False
    turned_away: int = 0
    """Connections that were refused, failed or took too long."""
    _visitors: dict[Visitor, float] = field(default_factory=dict)  # → when it came; the oldest first
    _failures: dict[str, tuple[float, float]] = field(default_factory=dict)  # address → failures, and when counted
    _connected: Counter[str] = field(default_factory=Counter)  # address → how many clients are connected from there
    _known: dict[str, float] = field(default_factory=dict)  # address → when the last client from there has gone

    @property
    def places(self) -> int:
        return places(self.clients)

    def admits(self, address: str) -> bool:
        """Whether a connection from this address may enter. It is asked before a byte is read. If every place is taken,
        somebody else may have to go."""
        if self._is_shut_out(address) or (len(self._visitors) >= self.places and not self._make_room(address)):
            self.turned_away += 1
            return False
        return True

    def enter(self, visitor: Visitor) -> None:
        self._visitors[visitor] = self.now()

    def prove(self, visitor: Visitor) -> None:
        """The visitor is a client: it needs no place in the doorway any more."""
        self._visitors.pop(visitor, None)
        self._connected[visitor.address] += 1

    def leave(self, visitor: Visitor, *, failed: bool) -> None:
        """The visitor has gone. Does nothing if it was no visitor (any more)."""
        if self._visitors.pop(visitor, None) is None or not failed:
            return
        self.turned_away += 1
        _remember(self._failures, visitor.address, (self._failures_of(visitor.address) + 1, self.now()))

    def part(self, address: str) -> None:
        """A client that came from this address has gone."""
        self._connected[address] -= 1
        if self._connected[address] <= 0:
            del self._connected[address]
        _remember(self._known, address, self.now())

    def _make_room(self, address: str) -> bool:
        """Send somebody away for a newcomer from this address: the one that has waited longest, of those from the
        address that holds most places. If that would be unfair, the newcomer gets no place."""
        held = Counter(visitor.address for visitor in self._visitors)
        crowded, most = held.most_common(1)[0]
        oldest = next(visitor for visitor in self._visitors if visitor.address == crowded)
        is_fair = most > held[address] + 1 or self.now() - self._visitors[oldest] > UNDISTURBED
        if is_fair:
            self.leave(oldest, failed=True)
            oldest.drop()
        return is_fair

    def _is_shut_out(self, address: str) -> bool:
        known = address in self._connected or self.now() - self._known.get(address, -KNOWN_FOR) < KNOWN_FOR
        return not self.behind_proxy and not known and self._failures_of(address) >= FAILURES

    def _failures_of(self, address: str) -> float:
        failures, counted = self._failures.get(address, (0.0, 0.0))
        return max(0.0, failures - (self.now() - counted) / FORGIVEN)


def places(clients: int) -> int:
    """How many connections may be unproved at the same time at the server of a federation of this size."""
    return PLACES + clients // 8


def origin(address: str) -> str:
    """What counts as one address. Whoever has an IPv6 address has all of its network, so the network counts as one."""
    if ":" not in address:
        return address
    whole = IPv6Address(address.partition("%")[0])
    return str(whole.ipv4_mapped or IPv6Address(int(whole) >> 64 << 64))


T = TypeVar("T")


def _remember(by_address: dict[str, T], address: str, value: T) -> None:
    by_address.pop(address, None)
    by_address[address] = value
    if len(by_address) > MOST_ADDRESSES:
        del by_address[next(iter(by_address))]
