"""Who shares masks with whom: everybody in small rounds, a regular graph of few neighbours in large ones.

With k neighbours a client sends k shares instead of n − 1, and keeps one. The threshold t is always more than half of
them: with less, a server that tells some neighbours "alive" and the others "dropped" could unmask any client.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from math import comb

from baffle.core.seeds import permutation

COMPLETE_UP_TO = 200
"""Rounds of at most this many clients use the complete graph."""

FAILURE = 2.0**-20
"""The probability that a round fails although no more clients dropped than the graph was made for."""

DROPOUT = 0.3
"""The share of clients that may drop from a round in a large graph."""


class Neighbours(Mapping[int, list[int]]):
    """Member → the members that it shares masks with, in order. Computed once, on request: a client needs only its
    own."""

    def __init__(self, members: tuple[int, ...], circle: list[int], half: int) -> None:
        self._members = members
        self._circle = circle
        self._half = half
        self._place = {member: place for place, member in enumerate(circle)}
        self._known: dict[int, list[int]] = {}

    def __getitem__(self, member: int) -> list[int]:
        if member not in self._known:
            self._known[member] = self._compute(member)
        return self._known[member]

    def _compute(self, member: int) -> list[int]:
        here = self._place[member]
        n = len(self._circle)
        if 2 * self._half >= n - 1:
            return [other for other in self._members if other != member]
        steps = (step for distance in range(1, self._half + 1) for step in (distance, -distance))
        return sorted(self._circle[(here + step) % n] for step in steps)

    def __iter__(self) -> Iterator[int]:
        return iter(self._members)

    def __len__(self) -> int:
        return len(self._members)


@dataclass(frozen=True)
class Graph:
    """Who shares masks with whom, and with how many neighbours."""

    neighbours: Neighbours
    k: int

    @property
    def least_threshold(self) -> int:
        """With any fewer, contradictory lists of survivors would expose a client.

        A client's k neighbours and the client itself hold shares. Those told that it is alive and those told that it
        dropped must never both be enough.
        """
        return (self.k + 1) // 2 + 1


def graph(members: tuple[int, ...], seed: bytes, *, complete: bool = False) -> Graph:
    """The graph of a round. It follows from the members and a public seed, so that everybody draws the same."""
    n = len(members)
    if complete or n <= COMPLETE_UP_TO:
        return Graph(Neighbours(members, list(members), n), max(n - 1, 0))
    k = degree(n, DROPOUT)
    return Graph(Neighbours(members, [members[i] for i in permutation(seed, n)], k // 2), k)


@cache
def degree(n: int, dropout: float) -> int:
    """The smallest even k with which, if a fraction `dropout` drops at random, all keep more than k/2 neighbours.

    The neighbours that stay are a sample without replacement; the bound on failure sums over clients.
    """
    stay = n - round(dropout * n)
    return next((k for k in range(2, n - 1, 2) if n * _too_few(n - 1, stay, k) <= FAILURE), (n - 1) // 2 * 2)


def _too_few(others: int, stay: int, k: int) -> float:
    """P(at most k/2 of a client's k neighbours stay)."""
    gone = others - stay
    return sum(comb(stay, a) * comb(gone, k - a) for a in range(k // 2 + 1)) / comb(others, k)
