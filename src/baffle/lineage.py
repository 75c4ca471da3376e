"""How a run came to where it is: round follows round by `advance`, and every step is a link of a chain of hashes.

A server, a client that catches up and an auditor all advance in the same way. In a networked run the statements of its
epochs are links too, and an outcome that the clients of a round cannot have caused is refused.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from baffle.core.chain import Present, chain_epoch, chain_next, chain_start
from baffle.core.messages import Outcome, decode
from baffle.core.state import ServerState, apply, within
from baffle.errors import BaffleError, ChainError, MessageError
from baffle.plan.privacy import least_survivors
from baffle.trajectory import Epoch, Trajectory


class Link(NamedTuple):
    """The statement of an epoch in the chain: the epoch's first round, the run's name, and the hash of the chain before
    it, if that is known."""

    first: int
    run: bytes
    before: bytes | None


@dataclass(frozen=True)
class Lineage:
    """A trajectory, and the links of its epochs in order. A simulation has none."""

    trajectory: Trajectory
    links: Sequence[Link] = ()
    _by_round: Mapping[int, Sequence[Link]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        by_round: dict[int, list[Link]] = {}
        for link in self.links:
            by_round.setdefault(link.first, []).append(link)
        object.__setattr__(self, "_by_round", by_round)

    def in_epoch(self, link: Link, salt: bytes) -> "Lineage":
        """The lineage with one more epoch."""
        epochs = (*self.trajectory.epochs, Epoch(link.first, salt))
        return Lineage(self.trajectory.with_epochs(epochs), (*self.links, link))

    def beginning(self, state: ServerState) -> Present:
        """Where the run begins."""
        return self.linked(Present(0, state, chain_start(self.trajectory.digest, state)))

    def linked(self, present: Present, after: bytes = b"") -> Present:
        """The present after the links of the epochs that begin with its round; only those after the run `after`, if the
        chain already holds that one."""
        return Present(present.round, present.state, self.chains(present.round, present.chain, after)[-1])

    def chains(self, number: int, chain: bytes, after: bytes = b"") -> list[bytes]:
        """The hashes of the chain before a round: without the links of the epochs that begin with it, and after each of
        them."""
        links = list(self._by_round.get(number, ()))
        runs = [link.run for link in links]
        chains = [chain]
        for link in links[runs.index(after) + 1 if after in runs else 0 :]:
            if link.before not in (None, chains[-1]):
                raise ChainError(f"the epoch that begins with round {number} names another past", number)
            chains.append(chain_epoch(chains[-1], link.run))
        return chains

    def advance(self, present: Present, outcome_bytes: bytes) -> Present:
        """Where the run is after one more round. The error for a round that cannot follow names it."""
        number = present.round
        try:
            outcome = decode(outcome_bytes, Outcome)
            if outcome.round != number:
                raise ChainError(f"round {number} holds the outcome of round {outcome.round}", number)
            state = apply(self.trajectory.rule, present.state, outcome)
            if self.links:
                _require_possible(self.trajectory, outcome, present.state, state)
        except ChainError:
            raise
        except BaffleError as fault:
            raise ChainError(f"round {number} cannot be replayed: {fault}", number) from None
        return self.linked(Present(number + 1, state, chain_next(present.chain, outcome_bytes, state)))


def _require_possible(trajectory: Trajectory, outcome: Outcome, before: ServerState, after: ServerState) -> None:
    """Refuse an outcome with another key than the round's, totals or a weight beyond what its clients could send, a
    private sum over fewer clients than its noise counts on, or a step that is not finite or longer than the plan
    allows."""
    plan, ring = trajectory.plan, trajectory.ring
    most = plan.group_sizes[1]
    keys = [trajectory.key_number(outcome.round, group) for group in range(plan.secure.groups)]
    for group in outcome.groups:
        if group.key not in keys:
            raise MessageError(f"a key with the number {group.key}, expected that of round {outcome.round}")
        if group.weight > most * ring.n_max:
            raise MessageError(f"a weight of {group.weight}, but {most} clients have at most {most * ring.n_max}")
        if trajectory.private and group.weight < least_survivors(plan):
            raise MessageError(
                f"a sum over {group.weight} clients, but a private one has at least {least_survivors(plan)}"
            )
        largest = int(np.max(np.abs(group.numbers().astype(np.int64)), initial=0))
        if largest > ring.most(most):
            raise MessageError(f"a total of {largest} is more than {most} clients can send within their bounds")
    if after is not before and not np.isfinite(after.weights).all():
        raise MessageError("it leads to weights that are not finite")
    if not within(plan.update.norm_max, before.weights, after.weights):
        raise MessageError(f"its step is longer than update.norm_max = {plan.update.norm_max:g}")
