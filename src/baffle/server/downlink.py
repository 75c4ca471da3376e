"""The server's side of keeping clients up to date; the client's side is `baffle.client.replica`."""

import numpy as np

from baffle.core.arrays import F32
from baffle.core.chain import Present
from baffle.core.messages import CatchUp
from baffle.core.state import FLOAT, pack
from baffle.journal.replay import chain_before
from baffle.journal.store import Journal
from baffle.lineage import Lineage

LARGE = 1 << 16
"""From this many weights on clients are told the hashes of states, which take them as long as the states do."""


class Downlink:
    """Remembers which round's weights each client holds, and makes the catch-ups from there to the present."""

    def __init__(self, kind: str, journal: Journal, lineage: Lineage) -> None:
        self._kind = kind
        self.snapshots = True
        """Whether clients may be sent the state that an epoch begins with."""
        self._journal = journal
        self._lineage = lineage
        self._held: dict[int, int] = {}
        self._before: tuple[int, F32] = (-1, np.empty(0, np.float32))

    @property
    def _first(self) -> int:
        """The round with which the present epoch begins."""
        return self._lineage.links[-1].first if self._lineage.links else 0

    def enter(self, lineage: Lineage) -> None:
        """Go on in another epoch."""
        self._lineage = lineage

    def catch_ups(self, clients: list[int], present: Present) -> dict[int, CatchUp]:
        """A catch-up for each client. Clients that hold the same weights share one object."""
        held_rounds = {self._held.get(client) for client in clients}
        by_round = {since: self._from(since, present) for since in held_rounds}
        return {client: by_round[self._held.get(client)] for client in clients}

    def newcomers(self, clients: list[int]) -> set[int]:
        """The clients that, as far as the server knows, hold no weights yet."""
        return set(clients) - self._held.keys()

    def holds(self, client: int, number: int | None) -> None:
        """Note which round's weights a client says it holds; None for none."""
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
        if self._kind == "scalars":
            return self._replay(since)
        if self._kind == "delta" and since is not None and since == self._before[0]:
            change = state.weights.view(np.uint32) - self._before[1].view(np.uint32)
            return CatchUp("delta", since, (change.astype("<u4").tobytes(),))
        return CatchUp("weights", now, (state.weights.astype(FLOAT).tobytes(),))

    def _replay(self, since: int | None) -> CatchUp:
        """The outcomes since a round, or from the beginning of the epoch with the state that it begins with, whichever
        is shorter. Before round 0 there is nothing to send: clients make the initial weights themselves."""
        first = self._first
        if since is None and first == 0:
            since = 0
        outcomes = None if since is None else self._outcomes(since)
        if since is not None and outcomes is not None and (first == 0 or since >= first):
            return self._by_outcomes(since, outcomes)
        proof, after = self._proof(), self._outcomes(first)
        shorter = outcomes is not None and _size(outcomes) <= _size((*proof, *after))
        if outcomes is not None and since is not None and (shorter or not self.snapshots):
            return self._by_outcomes(since, outcomes)
        return CatchUp("snapshot", first, (*proof, *after))

    def _by_outcomes(self, since: int, outcomes: tuple[bytes, ...]) -> CatchUp:
        """With the hashes of the states between them, where hashing takes a client longer than receiving them."""
        trajectory = self._lineage.trajectory
        unheeded = trajectory.n < LARGE or trajectory.plan.secure.mode == "malicious-server"
        if len(outcomes) < 2 or unheeded:
            return CatchUp("outcomes", since, outcomes)
        digests = (self._journal.digest_after(number) for number in range(since, since + len(outcomes) - 1))
        pairs = (item for pair in zip(outcomes[:-1], digests, strict=True) for item in pair)
        return CatchUp("hashed", since, (*pairs, outcomes[-1]))

    def _outcomes(self, since: int) -> tuple[bytes, ...]:
        return tuple(entry.outcome_bytes for entry in self._journal.entries(since))

    def _proof(self) -> tuple[bytes, bytes, bytes]:
        """The state with which the epoch begins, the hash of the chain before the last round, and its outcome."""
        state = self._journal.snapshot(self._lineage.trajectory.rule, self._first)
        before = chain_before(self._journal, self._lineage, self._first - 1)
        return pack(state), before, self._journal.entry(self._first - 1).outcome_bytes


def _size(items: tuple[bytes, ...]) -> int:
    return sum(map(len, items))
