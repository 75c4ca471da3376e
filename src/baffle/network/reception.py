"""How a server receives the clients of its run: it compares how far they say they are with its own journal.

A client is never further than the journal, because a round is on disk before anybody learns its outcome. If clients are
further, an older copy of the run's folder was put back. Clients answer no round twice, so the server could only skip
rounds, and what the run had learnt in them would be lost.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from baffle.errors import JournalError
from baffle.network.joining import Ready
from baffle.server.run import Running


@dataclass
class Reception:
    """Receives the clients of the run in a folder."""

    running: Running
    tell: Callable[[str], None]
    folder: Path
    _reached: dict[int, int] = field(default_factory=dict)
    """Client → the round that it says it has reached."""

    def __post_init__(self) -> None:
        self._began_at = self.running.present.round

    def welcome(self, clients: Mapping[int, Ready]) -> None:
        """Note which round each of these clients holds. They take part from now on."""
        present = self.running.present.round
        for client, ready in sorted(clients.items()):
            reached = max(ready.held, ready.answered - 1)
            self.running.downlink.holds(client, ready.held if reached <= present else None)
            self._reached[client] = reached
            self.tell(f"client {client} takes part")
            if reached > present:
                self.tell(
                    f"client {client} says that it has reached round {reached}, but the journal ends at round "
                    f"{present}; it is treated as a client that holds nothing"
                )

    def require_newest_copy(self) -> None:
        """Refuse to go on from an older copy of the run: more than half of the clients, and more than one, say that
        they are further. Fewer may be mistaken or lie.

        This is decided until the server has played a round. Then the run has a new history, which no newer copy
        continues; to stop would lose it too, and would let clients end a run of weeks whenever they are the majority
        of those present. Clients that come later and are further are reported, and refuse rounds that they have
        answered; they contribute again when the run has passed them."""
        ahead = [reached for reached in self._reached.values() if reached > self._began_at]
        if self.running.present.round > self._began_at or len(ahead) < 2 or 2 * len(ahead) <= len(self._reached):
            return
        raise JournalError(
            f"{len(ahead)} of {len(self._reached)} clients have reached round {max(ahead)} of this run, but the "
            f"journal in {self.folder} ends at round {self._began_at}, so it is an older copy; clients answer no round "
            "twice, so put a newer copy of the folder back, or begin a new run with another --out"
        )
