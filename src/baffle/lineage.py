"""How a run advances: `advance` applies one round after the other, and every step extends a chain of hashes.

Servers, clients that catch up and auditors all use it. In a networked run the statements of its epochs are links of the
chain too, and an outcome that the clients of a round cannot have caused is refused.
"""

from dataclasses import dataclass

import numpy as np

from baffle.core.messages import Outcome, decode
from baffle.core.state import Present, ServerState, apply, chain_epoch, chain_over, chain_start, within
from baffle.errors import BaffleError, ChainError, MessageError
from baffle.plan.privacy import least_survivors
from baffle.trajectory import Epoch, Trajectory


@dataclass(frozen=True)
class Lineage:
    """A trajectory, and the chain of hashes that its rounds and epochs make. A simulation has no epochs."""

    trajectory: Trajectory

    @property
    def epochs(self) -> tuple[Epoch, ...]:
        return self.trajectory.epochs

    def in_epoch(self, epoch: Epoch) -> "Lineage":
        """The lineage with one more epoch."""
        return Lineage(self.trajectory.with_epochs((*self.epochs, epoch)))

    def _beginning_at(self, number: int) -> list[Epoch]:
        return [epoch for epoch in self.epochs if epoch.first == number]

    def beginning(self, state: ServerState) -> Present:
        """The present before round 0."""
        return self.linked(Present(0, state, chain_start(self.trajectory.digest, state)))

    def linked(self, present: Present, after: bytes = b"") -> Present:
        """The present with the links of the epochs that begin with its round. If the chain already holds the statement
        `after`, only the links after it are added."""
        return Present(present.round, present.state, self.chains(present.round, present.chain, after)[-1])

    def chains(self, number: int, chain: bytes, after: bytes = b"") -> list[bytes]:
        """The hashes of the chain before a round: without links of epochs that begin with it, and after each."""
        epochs = self._beginning_at(number)
        runs = [epoch.run for epoch in epochs]
        chains = [chain]
        for epoch in epochs[runs.index(after) + 1 if after in runs else 0 :]:
            if epoch.before not in (None, chains[-1]):
                raise ChainError(f"the epoch that begins with round {number} names another past", number)
            chains.append(chain_epoch(chains[-1], epoch.run))
        return chains

    def advance(self, present: Present, outcome_bytes: bytes, digest: bytes = b"") -> Present:
        """The present after one more round. If the round cannot follow, the error names it.

        `digest` is the hash of the state after the round, if another party supplies it: hashing a large state takes
        longer than computing it. If the digest is wrong, so is the chain from here on. A later state that is hashed
        here, and a chain that matches a trusted hash, prove both. Where an epoch begins, the state is always hashed
        here.
        """
        return self.linked(self.step(present, outcome_bytes, digest))

    def step(self, present: Present, outcome_bytes: bytes, digest: bytes = b"") -> Present:
        """The same, without the links of the epochs that begin with the next round."""
        number = present.round
        try:
            outcome = decode(outcome_bytes, Outcome)
            if outcome.round != number:
                raise ChainError(f"round {number} holds the outcome of round {outcome.round}", number)
            state = apply(self.trajectory.rule, present.state, outcome)
            if self.epochs:
                _require_possible(self.trajectory, outcome, present.state, state)
        except ChainError:
            raise
        except BaffleError as fault:
            raise ChainError(f"round {number} cannot be replayed: {fault}", number) from None
        if not digest or self._beginning_at(number + 1):
            digest = state.digest()
        return Present(number + 1, state, chain_over(present.chain, outcome_bytes, digest))


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
        if group.weight > (heaviest := ring.weights(most)[-1]):
            raise MessageError(f"a weight of {group.weight}, but {most} clients have at most {heaviest}")
        if trajectory.private and group.weight < least_survivors(plan):
            raise MessageError(
                f"a sum over {group.weight} clients, but a private one has at least {least_survivors(plan)}"
            )
        contributors = min(most, group.weight)  # each has at least weight 1
        if largest := ring.beyond(group.numbers(), contributors, group.weight):
            raise MessageError(
                f"a total of {largest} is more than {contributors} clients of weight {group.weight} can send within "
                "their bounds"
            )
    if after is not before and not np.isfinite(after.weights).all():
        raise MessageError("it leads to weights that are not finite")
    if not within(plan.update.norm_max, before.weights, after.weights):
        raise MessageError(f"its step is longer than update.norm_max = {plan.update.norm_max:g}")
