"""Limits on unauthenticated connections: they get little time, few bytes and few places, and an address that keeps
failing is shut out for a while."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from ipaddress import IPv6Address
from typing import Protocol, TypeVar

SECONDS = 5.0  # how long a connection may take to authenticate
BYTES = 16 * 1024  # how many bytes it may send before it is authenticated: headers and two small frames
PLACES = 64  # how many connections may be unauthenticated at the same time; a federation's size adds an eighth to it
# Places besides, for addresses from which a client has come. To keep a client out, an attacker at its address, or at
# many others, needs more than so many connections within the time for which a visitor is undisturbed.
KEPT = 512
# Seconds for which a visitor keeps its place. When a server starts, all its clients come at once, and none would get
# through if each newcomer took the place of one that is halfway.
UNDISTURBED = 1.0
FAILURES = 20  # an address that failed this often is shut out until its failure count decays
FORGIVEN = 3.0  # seconds in which the failure count of an address decays by one
MOST_ADDRESSES = 10_000  # how many addresses are remembered; the oldest are forgotten first
KNOWN_FOR = 24 * 3600.0  # seconds for which an address is known after its last client has gone


class Visitor(Protocol):
    address: str

    def drop(self) -> None: ...


@dataclass
class Door:
    """Counts visitors and failures by address. Behind a proxy all have one address, so none is shut out. An address is
    known if a client has come from there and has shown its key; it is never shut out, because many may share it."""

    clients: int
    now: Callable[[], float]
    behind_proxy: bool = False
    turned_away: int = 0  # connections that were refused, failed or took too long
    _strangers: dict[Visitor, float] = field(default_factory=dict)  # → when it came; the oldest first
    _familiar: dict[Visitor, float] = field(default_factory=dict)  # the same, from addresses that are known
    _failures: dict[str, tuple[float, float]] = field(default_factory=dict)  # address → failures, and when counted
    _connected: Counter[str] = field(default_factory=Counter)  # address → how many clients are connected from there
    _known: dict[str, float] = field(default_factory=dict)  # address → when the last client from there has gone

    @property
    def places(self) -> int:
        """How many strangers may be inside."""
        return places(self.clients)

    def admits(self, address: str) -> bool:
        """Whether a connection from this address may enter. Another visitor may be dropped to make room."""
        known = self._is_known(address)
        visitors, places = (self._familiar, KEPT) if known else (self._strangers, self.places)
        is_shut_out = not known and not self.behind_proxy and self._failures_of(address) >= FAILURES
        if is_shut_out or (len(visitors) >= places and not self._make_room(address, visitors)):
            self.turned_away += 1
            return False
        return True

    def enter(self, visitor: Visitor) -> None:
        (self._familiar if self._is_known(visitor.address) else self._strangers)[visitor] = self.now()

    def prove(self, visitor: Visitor) -> None:
        """The visitor is a client, and no longer takes a place."""
        self._remove(visitor)
        self._connected[visitor.address] += 1

    def leave(self, visitor: Visitor, *, failed: bool) -> None:
        """The visitor has gone. Does nothing if it had no place, or has proved that it is a client."""
        if not self._remove(visitor) or not failed:
            return
        self.turned_away += 1
        _remember(self._failures, visitor.address, (self._failures_of(visitor.address) + 1, self.now()))

    def part(self, address: str) -> None:
        self._connected[address] -= 1
        if self._connected[address] <= 0:
            del self._connected[address]
        _remember(self._known, address, self.now())

    def _remove(self, visitor: Visitor) -> bool:
        """Whether it had a place, which is free now."""
        places = [visitors for visitors in (self._strangers, self._familiar) if visitors.pop(visitor, None) is not None]
        return bool(places)

    def _make_room(self, address: str, visitors: dict[Visitor, float]) -> bool:
        """Drop a visitor for a newcomer from this address: the oldest of those from the address that holds most
        places. If that would be unfair, the newcomer gets no place."""
        held = Counter(visitor.address for visitor in visitors)
        crowded, most = held.most_common(1)[0]
        oldest = next(visitor for visitor in visitors if visitor.address == crowded)
        is_fair = most > held[address] + 1 or self.now() - visitors[oldest] > UNDISTURBED
        if is_fair:
            self.leave(oldest, failed=True)
            oldest.drop()
        return is_fair

    def _is_known(self, address: str) -> bool:
        gone = self._known.get(address)
        return address in self._connected or (gone is not None and self.now() - gone < KNOWN_FOR)

    def _failures_of(self, address: str) -> float:
        failures, counted = self._failures.get(address, (0.0, 0.0))
        return max(0.0, failures - (self.now() - counted) / FORGIVEN)


def places(clients: int) -> int:
    """How many connections from addresses that are not known may be unauthenticated at the same time."""
    return PLACES + clients // 8


def origin(address: str) -> str:
    """The address under which a connection is counted. For IPv6 it is the /64 network, which has one owner."""
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
