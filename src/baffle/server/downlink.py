"""The server's side of keeping clients up to date; the client's side is `baffle.client.replica`."""

from dataclasses import dataclass, field

import numpy as np

from baffle.core.arrays import F32
from baffle.core.messages import CatchUp
from baffle.core.state import FLOAT, Present, pack
from baffle.journal.replay import chain_before
from baffle.journal.store import Journal
from baffle.lineage import Lineage

LARGE = 1 << 16
"""From this many weights on, clients are sent the hashes of states, because hashing would take them too long."""


@dataclass
class Downlink:
    """Remembers which round's weights each client holds, and makes the catch-ups from there to the present."""

    kind: str
    journal: Journal
    lineage: Lineage  # changes with every epoch
    snapshots: bool = True  # whether clients may be sent the state that an epoch begins with
    _held: dict[int, int] = field(default_factory=dict)
    _before: tuple[int, F32] = (-1, np.empty(0, np.float32))

    @property
    def _first(self) -> int:
        """The round with which the present epoch begins."""
        return self.lineage.epochs[-1].first if self.lineage.epochs else 0

    def catch_ups(self, clients: list[int], present: Present) -> dict[int, CatchUp]:
        """A catch-up for each client. Clients that hold the same weights share one object."""
        held_rounds = {self._held.get(client) for client in clients}
        by_round = {since: self._from(since, present) for since in held_rounds}
        return {client: by_round[self._held.get(client)] for client in clients}

    def newcomers(self, clients: list[int]) -> set[int]:
        """The clients that, as far as the server knows, hold no weights yet."""
        return set(clients) - self._held.keys()

    def holds(self, client: int, number: int | None) -> None:
        """Note which round's weights a client holds by its own account; None for none."""
        if number is None:
            self._held.pop(client, None)
        else:
            self._held[client] = number

    def delivered(self, clients: list[int], present: Present) -> None:
        """Note that these clients hold the present weights, because they have contributed to a round about them."""
        self._held.update(dict.fromkeys(clients, present.round))
        self._before = (present.round, present.state.weights)

    def _from(self, since: int | None, present: Present) -> CatchUp:
        now, state = present.round, present.state
        if self.kind == "scalars":
            return self._replay(since)
        if self.kind == "delta" and since is not None and since == self._before[0]:
            change = state.weights.view(np.uint32) - self._before[1].view(np.uint32)
            return CatchUp("delta", since, (change.astype("<u4").tobytes(),))
        return CatchUp("weights", now, (state.weights.astype(FLOAT).tobytes(),))

    def _replay(self, since: int | None) -> CatchUp:
        """The outcomes since a round, or the state at the start of the epoch and the outcomes since, whichever is
        shorter. Nothing is sent before round 0: clients make the initial weights themselves."""
        first = self._first
        if since is None and first == 0:
            since = 0
        if since is None:
            return CatchUp("snapshot", first, (*self._proof(), *self._outcomes(first)))
        outcomes = self._outcomes(since)
        if first == 0 or since >= first or not self.snapshots:
            return self._by_outcomes(since, outcomes)
        proof = *self._proof(), *self._outcomes(first)
        shorter = sum(map(len, outcomes)) <= sum(map(len, proof))
        return self._by_outcomes(since, outcomes) if shorter else CatchUp("snapshot", first, proof)

    def _by_outcomes(self, since: int, outcomes: tuple[bytes, ...]) -> CatchUp:
        """The outcomes, with the hashes of the states between them if hashing would take a client longer."""
        trajectory = self.lineage.trajectory
        send_no_hashes = trajectory.n < LARGE or trajectory.plan.secure.mode == "malicious-server"
        if len(outcomes) < 2 or send_no_hashes:
            return CatchUp("outcomes", since, outcomes)
        digests = (self.journal.digest_after(number) for number in range(since, since + len(outcomes) - 1))
        pairs = (item for pair in zip(outcomes[:-1], digests, strict=True) for item in pair)
        return CatchUp("hashed", since, (*pairs, outcomes[-1]))

    def _outcomes(self, since: int) -> tuple[bytes, ...]:
        return tuple(entry.outcome_bytes for entry in self.journal.entries(since))

    def _proof(self) -> tuple[bytes, bytes, bytes]:
        """The state with which the epoch begins, the hash of the chain before the last round, and its outcome."""
        state = self.journal.snapshot(self.lineage.trajectory.rule, self._first)
        before = chain_before(self.journal, self.lineage, self._first - 1)
        return pack(state), before, self.journal.entry(self._first - 1).outcome_bytes
