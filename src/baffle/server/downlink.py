"""The server's side of keeping clients up to date; the client's side is `baffle.client.replica`."""

import numpy as np

from baffle.core.arrays import F32
from baffle.core.messages import CatchUp
from baffle.core.state import FLOAT, ServerState, pack
from baffle.journal.replay import Present
from baffle.journal.store import Journal


class Downlink:
    """Remembers which round's weights each client holds, and makes the catch-ups from there to the present."""

    def __init__(self, kind: str, journal: Journal) -> None:
        self._kind = kind
        self._journal = journal
        self._held: dict[int, int] = {}
        self._before: tuple[int, F32] = (-1, np.empty(0, np.float32))

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
            return self._replay(since, now, state)
        if self._kind == "delta" and since is not None and since == self._before[0]:
            change = state.weights.view(np.uint32) - self._before[1].view(np.uint32)
            return CatchUp("delta", since, (change.astype("<u4").tobytes(),))
        return CatchUp("weights", now, (state.weights.astype(FLOAT).tobytes(),))

    def _replay(self, since: int | None, now: int, state: ServerState) -> CatchUp:
        """The outcomes since a round, unless the whole state is smaller."""
        state_size = sum(vector.nbytes for vector in state.vectors())
        if since is not None:
            items: list[bytes] = []
            for entry in self._journal.entries(since):
                items.append(entry.outcome_bytes)
                state_size -= len(entry.outcome_bytes)
                if state_size < 0:
                    break
            else:
                return CatchUp("outcomes", since, tuple(items))
        return CatchUp("snapshot", now, (pack(state),))
