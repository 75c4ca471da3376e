"""What the clients of a run insist on, whatever the server asks. It follows from the plan, so everybody knows it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256

from baffle.aggregation.graph import Graph, graph
from baffle.aggregation.messages import Opening
from baffle.errors import RefusalError

Groups = Sequence[Sequence[int]]
"""The clients of a round, divided into groups that are summed separately."""


@dataclass(frozen=True)
class ClientPolicy:
    """`floor`: the least number of clients in a sum. `agreement`: clients agree on the survivors before they release a
    share, so that even a server that lies to them learns nothing but one sum. `groups_of`: slot → the groups that are
    summed, none after the end of the run; without it, any clients may be summed. `tiers`: how many directions each
    client evaluates; without it, all evaluate the same number. `salt`: what the graphs of large rounds are drawn with,
    so that nobody can choose them."""

    floor: int = 2
    threshold: int = 0  # 0: the smallest safe threshold
    agreement: bool = False
    groups_of: Callable[[int], Groups] | None = None
    tiers: Mapping[int, int] = field(default_factory=dict)
    salt: bytes = b""

    def graph(self, members: tuple[int, ...], slot: int) -> Graph:
        seed = sha256(b"baffle/graph/2" + self.salt + slot.to_bytes(8, "big")).digest()
        return graph(members, seed, complete=self.agreement)

    def least_threshold(self, drawn: Graph, company: int) -> int:
        """More than half of the holders; if the server may lie, more than two thirds of all that may take part."""
        return 2 * company // 3 + 1 if self.agreement else drawn.least_threshold

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
