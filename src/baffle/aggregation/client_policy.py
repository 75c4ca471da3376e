"""What the clients of a run require, whatever the server asks. It follows from the plan, so both sides know it.

Clients share masks with all others in small rounds, and with their neighbours in a sparse regular graph in large ones.
With k neighbours a client sends k shares instead of n − 1, and keeps one. The threshold t is always more than half of
them: with less, a server that tells some neighbours "alive" and the others "dropped" could unmask any client.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256
from math import comb

from baffle.aggregation.messages import Opening
from baffle.core.seeds import permutation
from baffle.errors import RefusalError

COMPLETE_UP_TO = 200  # rounds of at most this many clients use the complete graph
FAILURE = 2.0**-20  # the probability that a round fails although no more clients dropped than the graph was made for
DROPOUT = 0.3  # the share of clients that may drop from a round in a large graph


class Neighbours(dict[int, list[int]]):
    """Member → the members that it shares masks with, in order. Computed on demand: a client needs only its own."""

    def __init__(self, members: tuple[int, ...], circle: list[int], half: int) -> None:
        self._members, self._circle, self._half = members, circle, half
        self._place = {member: place for place, member in enumerate(circle)}

    def __missing__(self, member: int) -> list[int]:
        here, n = self._place[member], len(self._circle)
        if 2 * self._half >= n - 1:
            self[member] = [other for other in self._members if other != member]
        else:
            steps = (step for distance in range(1, self._half + 1) for step in (distance, -distance))
            self[member] = sorted(self._circle[(here + step) % n] for step in steps)
        return self[member]


@dataclass(frozen=True)
class Graph:
    """Which clients share masks, and each client's number of neighbours."""

    neighbours: Neighbours
    k: int

    @property
    def least_threshold(self) -> int:
        """A client's k neighbours and the client itself hold shares. Those told that it is alive and those told that it
        dropped must never both be enough."""
        return (self.k + 1) // 2 + 1


def graph(members: tuple[int, ...], seed: bytes, *, complete: bool = False) -> Graph:
    """The graph of a round. It follows from the members and a public seed, so that all clients draw the same one."""
    n = len(members)
    if complete or n <= COMPLETE_UP_TO:
        return Graph(Neighbours(members, list(members), n), max(n - 1, 0))
    k = degree(n, DROPOUT)
    return Graph(Neighbours(members, [members[i] for i in permutation(seed, n)], k // 2), k)


@cache
def degree(n: int, dropout: float) -> int:
    """The smallest even k with which, if a fraction `dropout` drops at random, all keep more than k/2 neighbours. Those
    that stay are a sample without replacement; the bound on failure sums over clients."""
    stay, gone = n - round(dropout * n), round(dropout * n) - 1

    def too_few(k: int) -> float:
        """P(at most k/2 of a client's k neighbours stay)."""
        return sum(comb(stay, a) * comb(gone, k - a) for a in range(k // 2 + 1)) / comb(n - 1, k)

    return next((k for k in range(2, n - 1, 2) if n * too_few(k) <= FAILURE), (n - 1) // 2 * 2)


def liars_among(clients: int, most: int = 0) -> int:
    """How many of so many clients may work with a server that lies: at most `most`, and always fewer than a third,
    since a sum could not succeed without the others otherwise; with 0, just fewer than a third."""
    third = max(-(-clients // 3) - 1, 0)
    return min(most, third) if most else third


def quorum(clients: int, liars: int = 0) -> int:
    """How many of so many clients it takes to do what a lying server must not get done twice: to release shares, to
    enter a statement, to sign a state. An honest client does it once and a liar as often as it likes, so twice a quorum
    must be more than all clients and the liars together. With 0 liars stated, it is more than two thirds."""
    return (clients + liars_among(clients, liars)) // 2 + 1 if liars else 2 * clients // 3 + 1


Groups = Sequence[Sequence[int]]  # the clients of a round, divided into groups that are summed separately


@dataclass(frozen=True)
class ClientPolicy:
    """`floor`: the least number of clients in a sum. `agreement`: clients agree on the survivors before they release a
    share, so that even a lying server learns one sum at most. `liars`: how many clients may work with it; 0: just fewer
    than a third. `groups_of`: slot → the groups that are summed, none
    after the end of the run; without it, any clients may be summed. `tiers`: how many directions each client evaluates;
    without it, all evaluate the same number. `salt`: seeds the graphs of large rounds, so that nobody can choose
    them."""

    floor: int = 2
    threshold: int = 0  # 0: the smallest safe threshold
    agreement: bool = False
    groups_of: Callable[[int], Groups] | None = None
    tiers: Mapping[int, int] = field(default_factory=dict)
    salt: bytes = b""
    liars: int = 0

    def graph(self, members: tuple[int, ...], slot: int) -> Graph:
        seed = sha256(b"baffle/graph/2" + self.salt + slot.to_bytes(8, "big")).digest()
        return graph(members, seed, complete=self.agreement)

    def least_threshold(self, drawn: Graph, company: int) -> int:
        """More than half of the holders; if the server may lie, a quorum of all that may take part."""
        return quorum(company, self.liars) if self.agreement else drawn.least_threshold

    def company_of(self, client: int, slot: int, members: tuple[int, ...]) -> Sequence[int]:
        """All clients that a client may be summed with, itself included."""
        if self.groups_of is None:
            return members
        return next((group for group in self.groups_of(slot) if client in group), ())


@dataclass(frozen=True)
class Slot:
    """An opening that has been checked, and the graph that follows from it."""

    opening: Opening
    graph: Graph

    @property
    def number(self) -> int:
        return self.opening.slot


def checked_slot(opening: Opening, policy: ClientPolicy) -> Slot:
    """Refuse an opening under which the sum would not be safe."""
    members = opening.members
    if not members or list(members) != sorted(set(members)):
        raise RefusalError("a round's members must be named once each, in order")
    company = policy.company_of(members[0], opening.slot, members)
    if not set(members) <= set(company):
        raise RefusalError(f"the plan does not sum these clients together in slot {opening.slot}")
    drawn = policy.graph(members, opening.slot)
    least = max(policy.least_threshold(drawn, len(company)), policy.threshold)
    if not least <= opening.threshold <= drawn.k + 1:
        raise RefusalError(
            f"a threshold of {opening.threshold} with {drawn.k} neighbours, expected {least} to {drawn.k + 1}"
        )
    if not policy.floor <= opening.floor <= len(members):
        raise RefusalError(f"a survivor floor of {opening.floor}, expected {policy.floor} to {len(members)}")
    return Slot(opening, drawn)
