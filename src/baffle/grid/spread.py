"""What several seeds of one row come to: mean and range, and which rows their seeds cannot tell apart."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from string import ascii_lowercase

MOST_ROWS, MOST_LETTERS = 500, 1000
"""More rows are not compared, and more sets of rows are not told: they can be too many to count, which is what a
stranger's sweep would be made for."""
UNTOLD = "?"
EQUAL = (
    "Rows that share a letter are equal: their means differ by no more than the seeds of one of them do. (?: too many.)"
)


@dataclass(frozen=True)
class Spread:
    """A figure of one row, with every seed."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return fmean(self.values)

    @property
    def least(self) -> float:
        return min(self.values)

    @property
    def most(self) -> float:
        return max(self.values)

    def equals(self, other: "Spread") -> bool:
        """Whether the means differ by no more than the seeds of one of the two rows. With one seed there is no
        spread, so such a row equals no other."""
        if min(len(self.values), len(other.values)) < 2:
            return False
        return abs(self.mean - other.mean) <= max(self.most - self.least, other.most - other.least)


def letters_of(spreads: Sequence[Spread]) -> list[str]:
    """A letter for each largest set of rows that all equal each other. A row that equals no other has none. If they are
    too many, nothing is told of any row."""
    if len(spreads) > MOST_ROWS:
        return [UNTOLD] * len(spreads)
    places = range(len(spreads))
    equal = {
        place: {other for other in places if other != place and spreads[place].equals(spreads[other])}
        for place in places
    }
    cliques = list[set[int]]()

    def grow(clique: set[int], candidates: set[int], left_out: set[int]) -> None:
        """Bron and Kerbosch: all largest sets of mutual neighbours, or one more than are told."""
        if len(cliques) > MOST_LETTERS:
            return
        if not candidates and not left_out and len(clique) > 1:
            cliques.append(clique)
        pivot = max(candidates | left_out, key=lambda place: len(candidates & equal[place]), default=-1)
        for place in sorted(candidates - equal.get(pivot, set())):
            grow(clique | {place}, candidates & equal[place], left_out & equal[place])
            candidates = candidates - {place}
            left_out = left_out | {place}

    grow(set(), set(places), set())
    if len(cliques) > MOST_LETTERS:
        return [UNTOLD] * len(spreads)
    ordered = sorted(cliques, key=sorted)
    return ["".join(_letter(number) for number, clique in enumerate(ordered) if place in clique) for place in places]


def _letter(number: int) -> str:
    """a, b, …, z, a2, b2, …"""
    turn, letter = divmod(number, len(ascii_lowercase))
    return ascii_lowercase[letter] + (str(turn + 1) if turn else "")
